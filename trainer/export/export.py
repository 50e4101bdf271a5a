"""The command `export`: write a projector, with all that its users need, to a folder."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from cache_store.errors import ConfigError
from cache_store.messages import counted
from cache_store.program.output_file import refuse_inside
from cache_store.storage.local import LocalStore
from cache_store.storage.publish import publish_folder
from trainer.config import views_of_run
from trainer.export import standalone
from trainer.model.projector_file import CONFIG_FILE, PROJECTOR_FILE, ProjectorConfig, Tower, projector_bytes
from trainer.run.checkpoint import STATE_FILE
from trainer.run.folder import read_records
from trainer.run.load_projector import config_of_run, load_projector

LAST_STEPS = 10
"""The training loss shown is the mean over this many last steps; the loss of a single step is too noisy."""


def export(run: str, folder: Path) -> None:
    """Write the folder as a whole or not at all."""
    projector = load_projector(run)
    config = config_of_run(projector.path)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"folder: {folder} is not empty; name an empty or a new folder")
    # A file may be in the place of the folder, or of a parent.
    LocalStore(folder).refuse_foreign_names((), "folder", "export")
    for caches in views_of_run(config or {}):
        for cache in caches.values():
            refuse_inside("folder", folder, cache)
    of_run = projector.path.parent  # or of a checkpoint
    run_folder = of_run.parent.parent if (of_run / STATE_FILE).is_file() else of_run
    shared, records = shareable(projector.config), read_records(run_folder)
    with publish_folder(folder) as scratch:
        (scratch / PROJECTOR_FILE).write_bytes(projector_bytes(projector, shared))
        (scratch / CONFIG_FILE).write_bytes(shared.as_json)
        (scratch / "README.md").write_text(model_card(shared, records), encoding="utf-8")
        (scratch / "projector.py").write_bytes(Path(standalone.__file__).read_bytes())
    print(f"exported {counted(projector.config.training.steps, 'step')} of training: {folder}")


def shareable(config: ProjectorConfig) -> ProjectorConfig:
    """Remove paths of this machine: a model's folder is reduced to its name, as `./name`."""

    def named(name: str) -> str:
        return f"./{Path(name).name}" if is_folder(name) else name

    replace, language = msgspec.structs.replace, config.language_model
    towers = (replace(each, encoder_model=each.encoder_model and named(each.encoder_model)) for each in config.towers)
    return replace(config, towers=tuple(towers), language_model=replace(language, name=named(language.name)))


CARD = """\
---
library_name: encode-once
pipeline_tag: image-text-to-text
{base}---

# {encoders} for {language}

A projector through which the frozen language model {language} reads images, as {encoders} encodes them. encode-once
trained it, and nothing else:

{facts}

| tower | of | a sample | becomes | trained from the cache |
| --- | --- | --- | --- | --- |
{towers}

`config.json` and the metadata of `projector.safetensors` hold more. To use it with encode-once, in this folder:

```
trainer generate .{options} --image photo.jpg --prompt "What is this?"
```

Without it, `projector.py` needs torch and safetensors, and for answers transformers. `samples` are a tensor [N, …] as
the encoder gives it, or a mapping of such tensors by tower; `encode_once.encode_images` makes them from pictures:

```python
from projector import Answerer, ExportedProjector

tokens = ExportedProjector(".")(samples)  # for the language model's inputs_embeds
print(Answerer("."{where})(samples, "What is this?"))  # about one image
```
"""


def model_card(config: ProjectorConfig, records: Iterable[Mapping[str, Any]]) -> str:
    name = config.language_model.name
    models = [(tower.name, tower.encoder_model or "./ENCODER") for tower in config.towers]
    encoders = ", ".join(f"{tower}: {moved(model)}" for tower, model in models if is_folder(model))
    return CARD.format(
        base="" if is_folder(name) else f"base_model: {name}\n",
        encoders=" and ".join(tower.array.encoder.class_name for tower in config.towers),
        language=name.removeprefix("./"),
        facts="\n".join(f"- {fact}" for fact in training_facts(config, records)),
        towers="\n".join(map(tower_row, config.towers)),
        options=f" --language_model {moved(name)}" * is_folder(name) + f" --encoders '{{{encoders}}}'" * bool(encoders),
        where=f', "{moved(name)}"' * is_folder(name),
    )


def is_folder(name: str) -> bool:
    return name.startswith((".", "/"))


def moved(name: str) -> str:
    return f"PATH/{Path(name).name}"


def training_facts(config: ProjectorConfig, records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    training, known = config.training, [each for each in records if each["step"] <= config.training.steps]
    started = f", from the projector with the SHA-256 `{training.started_from}`" if training.started_from else ""
    yield f"{training.steps:,} steps, {training.samples:,} samples{started}"
    if losses := [record["loss"] for record in known if "loss" in record][-LAST_STEPS:]:
        yield f"training loss per label token {fmean(losses):.4f}, mean of the last {len(losses)} steps"
    if validated := [record for record in known if "val_loss" in record]:
        own, other = validated[-1]["val_loss"], validated[-1].get("val_loss_shuffled")
        worth = "" if other is None else f"; with another image {other:.4f}: the image is worth {other - own:.4f}"
        yield f"validation loss {own:.4f}, after step {validated[-1]['step']:,}{worth}"


def tower_row(tower: Tower) -> str:
    array, encoder = tower.array, tower.array.encoder
    model = f" of {tower.encoder_model.removeprefix('./')}" if tower.encoder_model else ""
    made = f"{array.made_of}: {array.recipe_summary}; {encoder.class_name}{model}"
    most, full = "up to " * (len(tower.shapes) > 1), "; its tokens attend to each other" * (tower.attention == "full")
    becomes = f"{most}{tower.tokens} tokens by {tower.projector}, {tower.layout}{full}"
    becomes += "; not trained here" * (not tower.trained)
    return f"| {tower.name} | {made} | [{array.named(tower.shape)}] | {becomes} | `{tower.cache_identity}` |"
