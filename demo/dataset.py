"""The demo's data set in LLaVA's form: chat.json and images.zip, the same bytes for the same seed."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demo.conversations import Turn, converse
from demo.scenes import Scene, compose
from demo.special_files import BROKEN, UNUSUAL, jpeg, recoloured
from trainer.text.store import held_out, id_hash

CHAT_FILE, IMAGES_FILE = "chat.json", "images.zip"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A scene, its conversation, and its image file; no bytes if the file is missing."""

    id: str
    image: str
    data: bytes | None
    scene: Scene
    conversation: list[Turn]


def samples(count: int, seed: int) -> Iterator[Sample]:
    """Yield `count` ordinary scenes, then one scene for each special kind of file."""
    for number in range(count):
        scene = compose(seed, number)
        name = f"scene-{number:05d}"
        yield Sample(id=name, image=f"{name}.jpg", data=jpeg(scene), scene=scene, conversation=converse(scene, number))
    for number, (kind, special) in enumerate((BROKEN | UNUSUAL).items(), start=count):
        scene = recoloured(compose(seed, number), special)
        yield Sample(
            id=f"special-{kind}",
            image=f"special-{kind}.{special.suffix}",
            data=special.write(scene),
            scene=scene,
            conversation=converse(scene, number),
        )


def write_dataset(folder: Path, drawn: list[Sample]) -> None:
    """Write chat.json and images.zip; members have zip's earliest date, so that equal inputs give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"id": each.id, "image": each.image, "conversations": each.conversation} for each in drawn]
    (folder / CHAT_FILE).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    with zipfile.ZipFile(folder / IMAGES_FILE, "w", zipfile.ZIP_STORED) as archive:
        for sample in drawn:
            if sample.data is not None:
                archive.writestr(zipfile.ZipInfo(sample.image), sample.data)


def is_held_out(sample_id: str, val_fraction: float) -> bool:
    """Return whether the trainer keeps this sample for validation."""
    return bool(held_out(np.array(id_hash(sample_id), np.uint64), val_fraction))
