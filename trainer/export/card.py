"""The model card: what the projector reads, how well it learned, and how to use it, with and without this program."""

import io
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.export.standalone import token_kinds
from trainer.model.model_config import PRETRAINED
from trainer.model.projector_file import PROJECTOR_FILE, ProjectorConfig, Tower
from trainer.run.figures import Metrics
from trainer.run.folder import read_records

LAST_STEPS = 10
"""The training loss shown is the mean over this many last steps; the loss of a single step is too noisy."""

INCHES, DOTS_PER_INCH = (7.0, 3.2), 144


@dataclass(frozen=True)
class Figures:
    """Losses per label token, by step."""

    loss: dict[int, float]
    validation: dict[int, float]
    shuffled: dict[int, float]
    """Validation loss with another sample's latents."""
    accuracy: dict[int, float]
    """Share of validation label tokens predicted right."""

    @property
    def last_loss(self) -> float:
        return statistics.fmean(list(self.loss.values())[-LAST_STEPS:])


def read_figures(run: Path, steps: int) -> Figures | None:
    """Read the log up to step `steps`; return None if the folder has no log, or no such steps in it."""
    records = [record for record in read_records(run) if record["step"] <= steps]
    figures = Figures(*(by_step(records, key) for key in ("loss", "val_loss", "val_loss_shuffled", "val_accuracy")))
    return figures if figures.loss else None


def by_step(records: list[Metrics], key: str) -> dict[int, float]:
    return {int(record["step"]): record[key] for record in records if key in record}


def draw_curve(figures: Figures) -> bytes:
    """Draw the losses as a PNG; equal figures give equal bytes."""
    figure = Figure(INCHES, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss per label token")
    axes.plot(*by_axis(figures.loss), color="#6a9bd8", linewidth=1, label="training")
    for name, values, marker in (("validation", figures.validation, "o"), ("another's image", figures.shuffled, "x")):
        if values:
            axes.plot(*by_axis(values), marker, color="#b3432b", label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()


def by_axis(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


CURVE_FILE, STANDALONE_FILE = "curve.png", "projector.py"


def model_card(config: ProjectorConfig, run: dict[str, Any] | None, figures: Figures | None) -> str:
    """Write the card; `run` is the resolved config of the run, where there is one."""
    language = config.language_model
    header: dict[str, Any] = {"library_name": "encode-once", "pipeline_tag": "image-text-to-text"}
    header["tags"] = ["projector", "vision-language", "encode-once"]
    if is_hub_id(language.name):
        header["base_model"] = language.name
    return f"""\
---
{yaml.safe_dump(header, sort_keys=False)}---

# {title(config)}

A projector through which the frozen language model {display_name(language.name)} reads images,
as {read_in_words(config)}. encode-once trained it, and nothing else, from {caches_in_words(config)}.

{curve_image(figures)}{table(training_rows(config, run, figures))}

## What it reads

{input_tables(config)}

`config.json` holds all of this, and so does the metadata of `{PROJECTOR_FILE}`.

## Use it

With encode-once, in this folder:

```
trainer generate .{local_models(config)} --image photo.jpg --prompt "What is this?"
```

{standalone_section(config)}
"""


def title(config: ProjectorConfig) -> str:
    encoders = " and ".join(tower.array.encoder.class_name for tower in config.towers)
    samples = f" {samples_word(config.tower)}" if has_one_tower(config) else ""
    return f"{encoders}{samples} for {display_name(config.language_model.name)}"


def has_one_tower(config: ProjectorConfig) -> bool:
    return len(config.towers) == 1


def samples_word(tower: Tower) -> str:
    """Return the word for an encoder's samples: `latents` or `features`."""
    return "features" if tower.layout == "token" else "latents"


def read_in_words(config: ProjectorConfig) -> str:
    return (
        f"{samples_word(config.tower)} of a frozen encoder"
        if has_one_tower(config)
        else "several frozen encoders see them"
    )


def caches_in_words(config: ProjectorConfig) -> str:
    return f"a cache of {samples_word(config.tower)}" if has_one_tower(config) else "a cache of each encoder's samples"


def input_tables(config: ProjectorConfig) -> str:
    """Return one table per tower, in the order in which they are read; with several towers, each under a heading."""
    if has_one_tower(config):
        return table(input_rows(config.tower, config))
    return "\n\n".join(f"### {tower.name}\n\n{table(input_rows(tower, config))}" for tower in config.towers)


def local_models(config: ProjectorConfig) -> str:
    """Return the options that say where models are that came from a folder: a shared file names no folder of others."""
    encoders = {tower.name: tower.encoder_model for tower in config.towers if is_local(tower.encoder_model)}
    named = {name: f"PATH/{Path(model or 'ENCODER').name}" for name, model in encoders.items()}
    options = f" --language_model {local_path(config)}" if is_local(config.language_model.name) else ""
    if not named:
        return options
    if has_one_tower(config):
        return f"{options} --encoder {named[config.tower.name]}"
    return f"{options} --encoders '{{{', '.join(map(': '.join, named.items()))}}}'"


def local_path(config: ProjectorConfig) -> str:
    return f"PATH/{Path(config.language_model.name).name}"


def standalone_section(config: ProjectorConfig) -> str:
    """Return code that runs without this program."""
    samples, given = samples_word(config.tower) if has_one_tower(config) else "samples", "a tensor [N, …]"
    if not has_one_tower(config):
        given = "a mapping of " + " and ".join(f"`{tower.name}`" for tower in config.towers) + f", each {given}"
    num_tokens, width = sum(tower.tokens for tower in config.towers), config.language_model.width
    counted = "P" if any(len(tower.shapes) > 1 for tower in config.towers) else num_tokens
    where = f', "{local_path(config)}"' if is_local(config.language_model.name) else ""
    code = f"""\
from projector import Answerer, ExportedProjector

tokens = ExportedProjector(".")({samples})  # [N, {counted}, {width}], for the language model's inputs_embeds
print(Answerer("."{where})({samples}, "What is this?"))  # about one image
"""
    needs = "torch and safetensors, and for answers transformers"
    if token_kinds(json.loads(config.as_json)) is None:
        code = code.replace("Answerer, ", "").rpartition("print")[0]
        needs = "torch and safetensors. Answers need encode-once: an image's tokens attend to each other"
    return f"""\
Without encode-once, `{STANDALONE_FILE}` needs {needs}:

```python
{code}```

`{samples}` is {given} in the shape named above, as the encoder gives it;
`encode_once.encode_images(cache, ["photo.jpg"])` makes it from a picture."""


def is_hub_id(name: str) -> bool:
    return not name.startswith((".", "/"))


def is_local(name: str | None) -> bool:
    return name is None or not is_hub_id(name)


def display_name(name: str) -> str:
    return name.removeprefix("./")


def table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def curve_image(figures: Figures | None) -> str:
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
            rows["— share of its tokens predicted right"] = f"{figures.accuracy[step]:.1%}"
    return rows | {"versions": ", ".join(f"{name} {version}" for name, version in config.versions.items())}


def input_rows(tower: Tower, config: ProjectorConfig) -> dict[str, str]:
    encoder, language = tower.array.encoder, config.language_model
    where = f" of {display_name(tower.encoder_model)}" if tower.encoder_model else ""
    before = config.towers[: config.towers.index(tower)]
    first = "after BOS" if config.text.begins_with_bos else "first of all"
    first = f"after those of {before[-1].name}" if before else first
    most = "up to " if len(tower.shapes) > 1 else ""
    return {
        tower.array.made_of: tower.array.recipe_summary,
        "encoder": f"{encoder.class_name}{where}, posterior {encoder.posterior}, weights `{encoder.weights_sha256}`",
        samples_word(tower): f"[{tower.array.named(tower.shape)}], {samples_in_words(tower)}",
        "becomes": f"{most}{tower.tokens} tokens of {language.width}{ends_in_words(tower)}, {first}",
        "projector": f"{tower.projector}, layout {tower.layout}{attention_in_words(tower)}",
        "language model": f"{display_name(language.name)}, identity `{language.identity}`",
        "trained from the cache": f"`{tower.cache_identity}`",
    }


def samples_in_words(tower: Tower) -> str:
    if tower.projector == PRETRAINED:
        return "as the encoder gives them"
    return f"as the encoder gives them; `{tower.name}.mean` and `{tower.name}.std` in the file standardise them"


def ends_in_words(tower: Tower) -> str:
    if not tower.ends:
        return ""
    own = ", START and END among them"
    return own if tower.ends_from == "learned" else f"{own}: the language model's own around an image"


def attention_in_words(tower: Tower) -> str:
    frozen = "" if tower.trained else "; not trained here"
    return f"{'; its tokens attend to each other' if tower.attention == 'full' else ''}{frozen}"
