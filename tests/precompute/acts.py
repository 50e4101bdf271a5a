"""Changes to a cache or its source between two builds, as functions of the project."""

from collections.abc import Callable
from pathlib import Path

from tests.precompute.conftest import SAMPLES, Project, image_bytes, sample_name

Act = Callable[[Project], object]

SHARD, TABLE, RECORD = "latents/40x32/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"
"""Files of shard 1."""


def rewrite(path: Path, before: str, now: str) -> None:
    path.write_text(path.read_text().replace(before, now))


def lost(*names: str) -> Act:
    return lambda project: project.lose(*names)


def flipped(name: str) -> Act:
    return lambda project: project.place.flip(name)


def copied(kind: str, *names: str) -> Act:
    """Replace files of the cache by a foreign cache's."""

    def act(project: Project) -> None:
        for name in names:
            project.place.put(name, (project.folder / "foreign" / kind / name).read_bytes())

    return act


def source(numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> Act:
    """Give the source these samples."""
    return lambda project: project.has(numbers, **replaced)


def other_image(number: int, numbers: range = range(SAMPLES)) -> Act:
    return source(numbers, **{sample_name(number).replace("-", "_"): image_bytes(99)})


def together(*acts: Act) -> Act:
    return lambda project: [act(project) for act in acts]


NOT_ENCODED = "1 of 22 images changed since they were encoded: "
"""The message about a changed image."""


def image(project: Project, number: int) -> Path:
    return project.images / f"{sample_name(number)}.png"
