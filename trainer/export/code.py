"""Code for a model card that reads the projector and generates with it, using only torch, safetensors and transformers.

The tests of an export run it, for every layout and shape, and for two towers.
"""

from itertools import groupby, pairwise
from math import isqrt
from string import Template

from trainer.model.config import PRETRAINED, TEXT_ALONE
from trainer.model.projector_file import ProjectorConfig, Tower

FLATTEN = {
    "spatial": "    x = x.flatten(2).transpose(1, 2)  # a token for each cell\n",
    "channel": "    x = x.flatten(2)  # a token for each channel\n",
    "token": "",
}
"""Code of each layout."""

LAYERS = {
    "linear": "layer(x, {0})",
    "mlp": "layer(gelu(layer(x, {0})), {2})",
    "mlp_gelu": "gelu(layer(gelu(layer(x, {0})), {2}))",
}
"""Code of each kind of projector."""

EAGER = ', attn_implementation="eager"'
"""For multimodal models: PaliGemma's faster attention lets a prompt attend to later tokens."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def standalone_code(config: ProjectorConfig) -> str | None:
    """Write the code for exactly this projector; None if it would have to make attention masks."""
    if (kinds := image_kinds(config)) is None:
        return None
    language, only = config.language_model, len(config.towers) == 1
    functions = [tower_function(tower, language.width, only) for tower in config.towers]
    if not only:
        calls = ", ".join(f'{tower.name}(samples["{tower.name}"])' for tower in config.towers)
        functions.append(f"def project(samples):\n    return torch.cat([{calls}], 1)\n")
    return USE_ALONE.substitute(
        model=language.name,
        opened_by=language.opened_by,
        eager="" if language.opened_by == TEXT_ALONE else EAGER,
        content='[{"type": "text", "text": prompt}]' if config.text.content_in_parts else "prompt",
        dtype=DTYPES[language.precision],
        layer=f"{config.towers[0].name}.layers.{{n}}" if only else "{n}",
        imports="avg_pool2d, gelu, linear" if any("avg_pool2d" in each for each in functions) else "gelu, linear",
        functions="\n\n".join(functions),
        before=1 if config.text.begins_with_bos else 0,
        bos="[tokenizer.bos_token_id]" if config.text.begins_with_bos else "[]",
        kinds=KINDS.format(kinds) if kinds else "",
        more=", **more" if kinds else "",
        no_more="\n        more = {}" if kinds else "",
    )


def image_kinds(config: ProjectorConfig) -> str | None:
    """Write the token types under which Gemma 3's image tokens attend to each other; None if no types do it."""
    runs = [(0, int(config.text.begins_with_bos))]
    for tower in config.towers:
        inside = (int(tower.attention == "full"), tower.tokens - 2 * tower.ends)
        runs += [(0, 1), inside, (0, 1)] if tower.ends else [inside]
    if any(one == other == 1 for (one, _), (other, _) in pairwise(runs)):
        return None
    if config.full and not any(tower.projector == PRETRAINED for tower in config.towers):
        return None
    lengths = ((kind, sum(length for _, length in run)) for kind, run in groupby(runs, key=lambda run: run[0]))
    return " + ".join(f"[{kind}] * {length}" for kind, length in lengths if length) if config.full else ""


def tower_function(tower: Tower, width: int, only: bool) -> str:
    world_tokens = tower.tokens - 2 * tower.ends
    if tower.projector == PRETRAINED:
        body, tokens = pretrained_body(tower, world_tokens), f'x @ weights["{tower.name}.weight"]'
    else:
        body = STANDARDISE.substitute(tower=tower.name, mean_alone=mean_slice(tower)) + FLATTEN[tower.layout]
        names = [str(n) if only else f'"{tower.name}.layers.{n}"' for n in range(3)]
        tokens = LAYERS[tower.projector].format(*names)
    name, samples = ("project", "latents") if only else (tower.name, "x")
    return TOWER.substitute(
        name=name,
        samples=samples,
        shape=", ".join(map(str, tower.array.shape)),
        tokens=tower.tokens,
        width=width,
        body=body.replace("SAMPLES", samples),
        ends=f'    start, end = weights["{tower.name}.ends"][None].split(1, 1)\n' if tower.ends else "",
        returned=f"torch.cat([start, {tokens}, end], 1)" if tower.ends else tokens,
    )


def mean_slice(tower: Tower) -> str:
    array = tower.array
    return f"[:, : {array.num_features // 2}]" if array.encoder.posterior == "moments" else ""


def pretrained_body(tower: Tower, world_tokens: int) -> str:
    side, by = isqrt(tower.array.shape[0]), isqrt(tower.array.shape[0] // world_tokens)
    pool = POOL.format(side=side, by=by) if by > 1 else ""
    return f"    x = SAMPLES.float()\n{pool}" + NORM.substitute(tower=tower.name, eps=tower.norm_eps)


STANDARDISE = Template('    x = (SAMPLES$mean_alone.float() - weights["$tower.mean"]) / weights["$tower.std"]\n')

POOL = "    x = avg_pool2d(x.transpose(1, 2).unflatten(2, ({side}, {side})), {by}).flatten(2).transpose(1, 2)\n"

NORM = Template("""\
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + $eps) * (1 + weights["$tower.norm"])
""")

TOWER = Template("""\
def $name($samples):  # [1, $shape] to [1, $tokens, $width]
$body$ends    return $returned
""")

KINDS = """
    kinds = {}  # 1: tokens that attend to each other
    more = {{"token_type_ids": torch.tensor([kinds + [0] * (x.shape[1] - len(kinds))])}}"""

USE_ALONE = Template("""\
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import $imports
from transformers import $opened_by, AutoTokenizer

text, weights = json.loads(Path("config.json").read_text())["text"], load_file("projector.safetensors")
model = $opened_by.from_pretrained("$model", dtype=torch.$dtype$eager)
tokenizer, embed = AutoTokenizer.from_pretrained("$model"), model.get_input_embeddings()
stop = [tokenizer.eos_token_id, *tokenizer.encode(text["end_of_turn"], add_special_tokens=False)[:1]]


def layer(x, n):
    return linear(x, weights[f"$layer.weight"], weights[f"$layer.bias"])


$functions

@torch.no_grad()
def answer(latents, prompt, longest=128):
    chat, ours = [{"role": "user", "content": $content}], {"chat_template": text["chat_template"]}
    words = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **ours)
    tokens, first = tokenizer.encode(words, add_special_tokens=False), $bos
    x = embed(torch.tensor([tokens if tokens[:1] == first else first + tokens]))
    x, cache, said = torch.cat([x[:, :$before], project(latents).to(x), x[:, $before:]], 1), None, []$kinds
    while len(said) < longest:
        out = model(inputs_embeds=x, past_key_values=cache, use_cache=True$more)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)$no_more
        if token.item() in stop:
            break
        said, x = [*said, token.item()], embed(token)
    return tokenizer.decode(said, skip_special_tokens=True).strip()
""")
