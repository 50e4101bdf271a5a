"""The kinds of sample: a source, an encoder and settings each, and the claims that a kind's nature refuses.

A test that takes `sealed` runs once for each line of `KINDS`; a new kind is a line there.
"""

# Axes: N samples, T frames, Y X pixels.

import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cache_store import open_cache
from tests.places import Folder
from tests.precompute.conftest import Project, image_bytes, make_vae
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.encoders.towers import SIDE, save_model
from tests.videos import make_video, scene


class MeanColour:
    """An encoder of one's own, whose samples are one vector."""

    identity = "mean colour, version 1"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Need no weights."""

    def layout(self, size: tuple[int, int, int]) -> dict[str, int]:
        return {"feature": 3}

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        return pixels_N3TYX.mean((2, 3, 4))


MODELS: dict[str, Callable[[Path], Path]] = {
    "vae": make_vae,
    "t5": lambda folder: save_text_encoder("T5EncoderModel", folder),
    "siglip": lambda folder: save_model("SiglipVisionModel", folder),
    "own": lambda folder: Path("tests.guarantees.kinds:MeanColour"),
}

LANDSCAPE, PORTRAIT, WIDE = (64, 48), (48, 64), (96, 32)
"""Width and height; files of a wide one come only when a source grows."""


def write_picture(folder: Path, number: int, size: tuple[int, int] = LANDSCAPE, shown: int | None = None) -> None:
    """Write a picture and its caption; another number may be shown."""
    picture = Image.open(io.BytesIO(image_bytes(number if shown is None else shown)))
    picture.resize(size, Image.Resampling.BICUBIC).save(folder / f"p{number:02d}.png")
    (folder / f"p{number:02d}.txt").write_text(f"Of p{number:02d}.{' This is long.' * (number == 2)}")


def write_pictures(folder: Path) -> None:
    for number in range(8):
        write_picture(folder, number, PORTRAIT if number % 3 == 1 else LANDSCAPE)
    (folder / "p03.png").write_bytes(b"no image")
    (folder / "p05.txt").unlink()


def write_video(folder: Path, name: str, frames: int, size: tuple[int, int] = LANDSCAPE, shown: str = "") -> None:
    """Write a video of 24 frames a second and its caption; that of another letter may be shown."""
    first = 20 * (ord(shown or name[0]) - ord("a"))
    make_video(folder / name, frames=frames, size=size, draw=lambda number, size: scene(first + number, size))
    (folder / name).with_suffix(".txt").write_text(f"Of {name[0]}.")


def write_videos(folder: Path) -> None:
    for name, frames, size in (("a", 20, LANDSCAPE), ("b", 12, LANDSCAPE), ("c", 18, PORTRAIT), ("d", 30, LANDSCAPE)):
        write_video(folder, f"{name}.mp4", frames, size)
    write_video(folder, "x.mp4", 18)
    (folder / "x.mp4").write_text("no video" * 100)


@dataclass(frozen=True, kw_only=True)
class Media:
    """A folder of files, and changes to it."""

    write: Callable[[Path], object]
    grow: Callable[[Path], object]
    """Add files."""
    change: Callable[[Path], object]
    """Write the file of `stays` again, with other contents."""
    mend: Callable[[Path], object]
    """Give the rejected sample what it lacked."""
    stays: str
    gone: str
    rejected: str
    grown: str
    """Ids of two cached samples, of the rejected one, and of one that `grow` adds."""


PICTURES = Media(
    write=write_pictures,
    grow=lambda folder: [write_picture(folder, number, size) for number, size in ((10, WIDE), (11, PORTRAIT))],
    change=lambda folder: write_picture(folder, 1, PORTRAIT, shown=90),
    mend=lambda folder: write_picture(folder, 3),
    stays="p01.png",
    gone="p02.png",
    rejected="p03.png",
    grown="p10.png",
)
VIDEOS = Media(
    write=write_videos,
    grow=lambda folder: [write_video(folder, "e.mp4", 12, WIDE), write_video(folder, "f.mp4", 18)],
    change=lambda folder: write_video(folder, "a.mp4", 20, shown="y"),
    mend=lambda folder: write_video(folder, "x.mp4", 18),
    stays="a.mp4@0",
    gone="b.mp4@0",
    rejected="x.mp4@0",
    grown="e.mp4@0",
)
CAPTIONS = replace(
    PICTURES,
    change=lambda folder: (folder / "p01.txt").write_text("Of another."),
    mend=lambda folder: write_picture(folder, 5),
    rejected="p05.png",
)

SQUASHED = {"image": {"height": 48, "width": 64}}
SQUARE = {"image": {"height": SIDE, "width": SIDE}}
BUCKETS = {"image": {"buckets": {"preset": "ours", "sizes": ["64x48", "48x64", "96x32"]}}}
CLIP = {"fps": 12, "pick": "chunk"}
NO_CHANNELS = {"uint8": "its 256 values are of each channel, and the sample has too few values of one"}
IN_THE_PLAN = {
    "a file alone": "a caption has no file of its own",
    "secret change": "captions are compared whenever the source is listed, whatever the dates of their files",
    "audit of a change": "an audit encodes the captions of the plan, and no build goes on with others",
    "retry": "texts are read again by `precompute captions`, whether they were rejected or not",
}


@dataclass(frozen=True)
class Kind:
    """A kind of sample."""

    media: Media
    model: str
    settings: Mapping[str, Any]
    other: str
    """The kind of another cache over the same samples."""
    told: Sequence[str]
    """What `info` tells of it."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Claims that the kind does not hold, and why; `REFUSED` in `test_every_kind.py` has what it says."""
    source: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "image": Kind(
        PICTURES, "vae", SQUASHED, "tower", ["64x48, squash", "[channel 16, latent_y, latent_x]", "images/s"]
    ),
    "sizes": Kind(
        PICTURES, "vae", BUCKETS, "image", ["buckets ours", "48x64 3 rows in 1 shard, [16, 8, 6], 1,536 bytes"]
    ),
    "clip": Kind(
        *(VIDEOS, "vae", {**SQUASHED, "clip": {**CLIP, "frames": 5}}, "text"),
        ["clip 5 frames at 12 fps, 64x48", "[channel 16, latent_t, latent_y, latent_x]", "clips/s a worker"],
    ),
    "clips of sizes": Kind(
        *(VIDEOS, "vae", {**BUCKETS, "clip": {**CLIP, "frames": [5, 9]}}, "clip"),
        ["clip 5 or 9 frames at 12 fps, buckets ours", "9x64x48 3 rows in 1 shard, [16, 3, 6, 8], 4,608 bytes"],
    ),
    "tower": Kind(
        PICTURES, "siglip", SQUARE, "vector", ["SiglipVision", "[token, feature 16]", "[16, 16]"], NO_CHANNELS
    ),
    "vector": Kind(PICTURES, "own", SQUARE, "sizes", ["MeanColour", "[feature 3]", "6 bytes a sample"], NO_CHANNELS),
    "text": Kind(
        *(CAPTIONS, "t5", {"encoder__max_tokens": 12}, "image"),
        ["text caption, 12 tokens", "T5EncoderModel", "[12, 16]", "1 cached text, cut", "texts/s a worker"],
        NO_CHANNELS | IN_THE_PLAN,
        {"text": "caption"},
    ),
}


def holding(*claims: str) -> Any:
    return pytest.mark.parametrize("kind", [name for name in KINDS if not {*claims} & KINDS[name].refuses.keys()])


class Sealed(Project):
    """A sealed cache of a kind, and other builds of it."""

    def __init__(self, folder: Path, capsys: Any, name: str, files: Path, model_of: Callable[[str], Path]) -> None:
        super().__init__(folder, model_of(KINDS[name].model), capsys)
        self.source, self.media, self._model_of = files, KINDS[name].media, model_of
        self.settings = self.settings_of(name, {"kind": "folder", "path": str(files)})

    def settings_of(self, name: str, source: dict[str, Any]) -> dict[str, Any]:
        kind = KINDS[name]
        settings = {"source": {**source, **kind.source}, "image": {}, "encoder__model": str(self._model_of(kind.model))}
        settings |= {"encoder__batch_size": 2, "store__samples_per_shard": 3, "run__max_reject_fraction": 0.5}
        return settings | {**kind.settings}

    def own_files(self) -> None:
        self.source = shutil.copytree(self.source, self.folder / "files")
        self.settings["source"] |= {"path": str(self.source)}
        self.build()

    def flip_in_secret(self, sample: str) -> None:
        """Flip a bit in the file of a sample, which keeps its size and time."""
        path = self.source / sample.partition("@")[0]
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        Folder(self.source).flip(path.name)
        os.utime(path, ns=times)


def is_near(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tolerance: float = 0) -> bool:
    return one.keys() == other.keys() and all(np.allclose(one[name], other[name], 0, tolerance) for name in one)


def ids_of(cache: Path) -> list[str]:
    opened = open_cache(cache)
    ids: list[str] = opened.samples(np.arange(len(opened)), ["id"])["id"].to_pylist()
    return ids


def samples_of(cache: Path) -> dict[str, np.ndarray]:
    opened = open_cache(cache)
    return {name: opened.read(np.array([number]))[0] for number, name in enumerate(ids_of(cache))}
