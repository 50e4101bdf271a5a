"""Use an exported projector without encode-once: with torch and safetensors, and transformers to generate.

    from projector import Answerer, ExportedProjector

    tokens = ExportedProjector(".")(samples)                # [N, P, D], for `inputs_embeds` of the language model
    print(Answerer(".")(samples, "What is this?"))          # about one image

`.` is the folder that holds config.json and projector.safetensors. `samples` are as the encoder gives them, a tensor
[N, ...] in the shape that config.json names; if several encoders see an image, a mapping of such tensors by tower.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, gelu, linear

# Axes: N samples, S world tokens, F values of one, P tokens with START and END, D model width.

TEXT_ALONE = "AutoModelForCausalLM"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ExportedProjector:
    """Turns samples into tokens of the language model's width; float32, on the CPU."""

    def __init__(self, folder: str | Path = ".") -> None:
        self.config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        self.weights = load_file(Path(folder, "projector.safetensors"))

    def __call__(self, samples: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return all towers' tokens, [N, P, D]."""
        towers = self.config["towers"]
        if isinstance(samples, Tensor):
            (only,) = towers
            samples = {only["name"]: samples}
        return torch.cat([self.tower_tokens(tower, samples[tower["name"]].float()) for tower in towers], 1)

    def tower_tokens(self, tower: dict[str, Any], samples: Tensor) -> Tensor:
        """Return one tower's tokens, between START and END if it has them."""
        prefix = f"{tower['name']}."
        weights = {name.removeprefix(prefix): each for name, each in self.weights.items() if name.startswith(prefix)}
        if "norm" in weights:  # a multimodal checkpoint's own projector
            tokens = pool(samples, tower["tokens"] - 2 * tower["ends"])
            scale = torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + tower["norm_eps"])
            tokens = tokens * scale * (1 + weights["norm"]) @ weights["weight"]
        else:
            tokens = features(samples, tower["layout"], weights)
            for number in (0, 2) if "layers.2.weight" in weights else (0,):
                tokens = gelu(tokens) if number else tokens
                tokens = linear(tokens, weights[f"layers.{number}.weight"], weights[f"layers.{number}.bias"])
            if tower["projector"] == "mlp_gelu":
                tokens = gelu(tokens)
        if not tower["ends"]:
            return tokens
        ends = weights["ends"].expand(len(tokens), -1, -1)
        return torch.cat([ends[:, :1], tokens, ends[:, 1:]], 1)


def features(samples: Tensor, layout: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Standardise samples and arrange them as tokens, [N, S, F]; for posterior moments, only the means are read."""
    mean, std = weights["mean"], weights["std"]
    if layout == "token":
        return (samples - mean) / std
    by_channel = ((samples[:, : len(mean)] - mean) / std).flatten(2)
    return by_channel.mT if layout == "spatial" else by_channel


def pool(states: Tensor, world_tokens: int) -> Tensor:
    """Average each square of the vision tower's tokens; states that are pooled already stay unchanged."""
    side = isqrt(states.shape[1])
    by = side // isqrt(world_tokens)
    return states if by == 1 else avg_pool2d(states.mT.reshape(len(states), -1, side, side), by).flatten(2).mT


class Answerer:
    """The language model, which answers about one image; it is loaded once, on the CPU, by transformers."""

    def __init__(self, folder: str | Path = ".", language_model: str | None = None) -> None:
        """Load the language model from a folder or hub id, by default the one that config.json names."""
        import transformers

        self.projector = ExportedProjector(folder)
        config = self.projector.config
        language, self.text, kinds = config["language_model"], config["text"], token_kinds(config)
        if kinds is None:
            raise ValueError("an image's tokens attend to each other, which takes attention masks: use encode-once")
        self.kinds, opened_by = kinds, language.get("opened_by", TEXT_ALONE)
        # PaliGemma's faster attention lets a prompt attend to later tokens.
        options = {} if opened_by == TEXT_ALONE else {"attn_implementation": "eager"}
        name, dtype = language_model or language["name"], DTYPES[language["precision"]]
        self.model = getattr(transformers, opened_by).from_pretrained(name, dtype=dtype, **options)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)

    @torch.no_grad()
    def __call__(self, samples: Tensor | Mapping[str, Tensor], prompt: str, longest: int = 128) -> str:
        """Return the likeliest answer, token by token."""
        text, tokenizer, embed = self.text, self.tokenizer, self.model.get_input_embeddings()
        content = [{"type": "text", "text": prompt}] if text.get("content_in_parts") else prompt
        chat, template = [{"role": "user", "content": content}], {"chat_template": text["chat_template"]}
        words = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **template)
        first = [tokenizer.bos_token_id] if text["begins_with_bos"] else []
        tokens = tokenizer.encode(words, add_special_tokens=False)
        x = embed(torch.tensor([tokens if tokens[:1] == first else first + tokens]))
        x = torch.cat([x[:, : len(first)], self.projector(samples).to(x), x[:, len(first) :]], 1)
        kinds = [*self.kinds, *[0] * (x.shape[1] - len(self.kinds))]
        more = {"token_type_ids": torch.tensor([kinds])} if self.kinds else {}
        eos = self.model.generation_config.eos_token_id
        stop = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
        stop |= {*tokenizer.encode(text["end_of_turn"], add_special_tokens=False)[:1]}
        cache, generated = None, list[int]()
        while len(generated) < longest:
            out = self.model(inputs_embeds=x, past_key_values=cache, use_cache=True, **more)
            cache, token, more = out.past_key_values, out.logits[:, -1:].argmax(-1), {}
            if token.item() in stop:
                break
            generated, x = [*generated, token.item()], embed(token)
        answer: str = tokenizer.decode(generated, skip_special_tokens=True).strip()
        return answer


def token_kinds(config: Mapping[str, Any]) -> list[int] | None:
    """Return the token types, up to the last image token, under which Gemma 3's image tokens attend to each other.

    It is empty if no tokens do, and None if no types can say which do.
    """
    runs, full = [(0, int(config["text"]["begins_with_bos"]))], False
    for tower in config["towers"]:
        attends = tower.get("attention") == "full"
        inside, full = (int(attends), tower["tokens"] - 2 * tower["ends"]), full or attends
        runs += [(0, 1), inside, (0, 1)] if tower["ends"] else [inside]
    if not full:
        return []
    is_gemma = any(tower.get("norm_eps") is not None for tower in config["towers"])
    has_sizes = any(len(tower["shapes"]) > 1 for tower in config["towers"])  # then token counts differ
    if not is_gemma or has_sizes or any(one == other == 1 for (one, _), (other, _) in pairwise(runs)):
        return None
    return [kind for kind, length in runs for _ in range(length)]
