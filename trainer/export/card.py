"""The model card: what the projector reads, how well it learned, and code that uses it without this program."""

from string import Template
from typing import Any

import yaml

from trainer.export.figures import LAST_STEPS, Figures
from trainer.model.projector_file import PROJECTOR_FILE, ProjectorConfig, Tower

CURVE_FILE = "curve.png"

FLATTEN = {
    "spatial": "x.flatten(2).transpose(1, 2)  # a token for each cell",
    "channel": "x.flatten(2)  # a token for each channel",
}
"""Of each layout."""

LAYERS = {
    "linear": "layer(x, 0)",
    "mlp": "layer(gelu(layer(x, 0)), 2)",
    "mlp_gelu": "gelu(layer(gelu(layer(x, 0)), 2))",
}
"""Of each shape."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def model_card(config: ProjectorConfig, run: dict[str, Any] | None, figures: Figures | None) -> str:
    """Write the card; `run` is the resolved config of the run, where there is one."""
    tower, language = config.tower, config.language_model
    header: dict[str, Any] = {"library_name": "encode-once", "pipeline_tag": "image-text-to-text"}
    header["tags"] = ["projector", "vision-language", "encode-once"]
    if is_hub_id(language.name):
        header["base_model"] = language.name
    return f"""\
---
{yaml.safe_dump(header, sort_keys=False)}---

# {tower.array.encoder.class_name} latents for {shown(language.name)}

A projector through which the frozen language model {shown(language.name)} reads images, as latents of a frozen encoder.
It was trained with encode-once, from a cache of latents; nothing but the projector has learned.

{curve(figures)}{table(training_rows(config, run, figures))}

## What it reads

{table(input_rows(tower, config))}

`config.json` says it all, and `{PROJECTOR_FILE}` holds the same in its metadata.

## Use it

With encode-once, in this folder:

```
trainer generate . --image photo.jpg --prompt "What is this?"
```

Without it, from latents as the encoder gives them:

```python
{use_alone(config)}```
"""


def is_hub_id(name: str) -> bool:
    return not name.startswith((".", "/"))


def shown(name: str) -> str:
    return name.removeprefix("./")


def table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def curve(figures: Figures | None) -> str:
    return f"![Loss per label token, by step]({CURVE_FILE})\n\n" if figures else ""


def training_rows(config: ProjectorConfig, run: dict[str, Any] | None, figures: Figures | None) -> dict[str, str]:
    training = config.training
    rows = {"trained": f"{training.steps:,} steps, {training.samples:,} samples"}
    if training.started_from is not None:
        rows["started from"] = f"the trained projector whose file has the SHA-256 `{training.started_from}`"
    if run is not None:
        data, optim = run["data"], run["optim"]
        rows["batches"] = f"{data['batch_size']} samples"
        rows["learning rate"] = f"{optim['lr']:g}, {optim['schedule']}; weight decay {optim['weight_decay']:g}"
    if figures is not None:
        rows[f"training loss per label token, mean of the last {LAST_STEPS} steps"] = f"{figures.last_loss:.4f}"
    if figures is not None and figures.validation:
        step, own = list(figures.validation.items())[-1]
        rows["validation loss per label token"] = f"{own:.4f}, after step {step:,}"
        if step in figures.shuffled:
            other = figures.shuffled[step]
            rows["— with another sample's image"] = f"{other:.4f}: the image is worth {other - own:.4f}"
        if step in figures.accuracy:
            rows["— share of its tokens that are the model's likeliest"] = f"{figures.accuracy[step]:.1%}"
    return rows | {"versions": ", ".join(f"{name} {version}" for name, version in config.versions.items())}


def input_rows(tower: Tower, config: ProjectorConfig) -> dict[str, str]:
    encoder, language = tower.array.encoder, config.language_model
    where = f" of {shown(tower.encoder_model)}" if tower.encoder_model else ""
    first = "after BOS" if config.text.begins_with_bos else "first of all"
    return {
        "image": tower.array.image.summary,
        "encoder": f"{encoder.class_name}{where}, posterior {encoder.posterior}, weights `{encoder.weights_sha256}`",
        "latents": f"[{tower.array.named_shape}], not standardised",
        "becomes": f"{tower.tokens} tokens of {language.width}, START and END among them, {first}",
        "projector": f"{tower.projector}, layout {tower.layout}",
        "language model": f"{shown(language.name)}, identity `{language.identity}`",
        "trained from the cache": f"`{tower.cache_identity}`",
    }


def use_alone(config: ProjectorConfig) -> str:
    """Write code that reads the projector and generates with it, for exactly this one."""
    tower, language = config.tower, config.language_model
    mean_alone = f"[:, : {len(tower.array.encoder.latents_mean)}]" if tower.array.encoder.posterior == "moments" else ""
    return USE_ALONE.substitute(
        model=language.name,
        dtype=DTYPES[language.precision],
        tower=tower.name,
        shape=", ".join(map(str, tower.array.shape)),
        tokens=tower.tokens,
        width=language.width,
        mean_alone=mean_alone,
        flatten=FLATTEN[tower.layout],
        layers=LAYERS[tower.projector],
        before=1 if config.text.begins_with_bos else 0,
        bos="[tokenizer.bos_token_id]" if config.text.begins_with_bos else "[]",
    )


USE_ALONE = Template("""\
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, linear
from transformers import AutoModelForCausalLM, AutoTokenizer

text, weights = json.loads(Path("config.json").read_text())["text"], load_file("projector.safetensors")
model = AutoModelForCausalLM.from_pretrained("$model", dtype=torch.$dtype)
tokenizer, embed = AutoTokenizer.from_pretrained("$model"), model.get_input_embeddings()
stop = [tokenizer.eos_token_id, *tokenizer.encode(text["end_of_turn"], add_special_tokens=False)[:1]]

def layer(x, n):
    return linear(x, weights[f"$tower.layers.{n}.weight"], weights[f"$tower.layers.{n}.bias"])

def project(latents):  # [1, $shape] to [1, $tokens, $width]
    x = (latents$mean_alone.float() - weights["$tower.mean"]) / weights["$tower.std"]
    x = $flatten
    start, end = weights["$tower.ends"][None].split(1, 1)
    return torch.cat([start, $layers, end], 1)

@torch.no_grad()
def answer(latents, prompt, longest=128):
    chat, ours = [{"role": "user", "content": prompt}], {"chat_template": text["chat_template"]}
    words = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **ours)
    tokens, first = tokenizer.encode(words, add_special_tokens=False), $bos
    x = embed(torch.tensor([tokens if tokens[:1] == first else first + tokens]))
    x, cache, said = torch.cat([x[:, :$before], project(latents).to(x), x[:, $before:]], 1), None, []
    while len(said) < longest:
        out = model(inputs_embeds=x, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        if token.item() in stop:
            break
        said, x = [*said, token.item()], embed(token)
    return tokenizer.decode(said, skip_special_tokens=True).strip()
""")
"""The test of an export runs it, for every layout and shape."""
