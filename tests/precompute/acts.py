"""What may happen to a cache and its source between two builds, as functions of their project."""

from collections.abc import Callable
from pathlib import Path

from tests.precompute.conftest import SAMPLES, Project, image_bytes, run_build, sample_name, write_source

Act = Callable[[Project], object]

SHARD, TABLE, RECORD = "latents/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"
"""Files of shard 1."""


def make_foreign(folder: Path, vae: Path) -> Path:
    """A folder of caches: of another image in each shard, of another recipe, and of other texts."""
    source = write_source(folder / "source", **{f"sample_{each:03d}": image_bytes(90 + each) for each in (1, 9, 17)})
    run_build(folder, source, vae).rename(folder / "images")
    run_build(folder, source, vae, image__height=40).rename(folder / "recipe")
    rewrite(write_source(source) / "chat.json", "Picture", "Drawing")
    run_build(folder, source, vae).rename(folder / "texts")
    return folder


def rewrite(path: Path, before: str, now: str) -> None:
    path.write_text(path.read_text().replace(before, now))


def lost(*names: str) -> Act:
    return lambda project: project.lose(*names)


def flipped(name: str) -> Act:
    return lambda project: project.place.flip(name)


def copied(kind: str, *names: str) -> Act:
    """Files of a foreign cache lie in place of the cache's own."""

    def act(project: Project) -> None:
        for name in names:
            project.place.put(name, (project.folder / "foreign" / kind / name).read_bytes())

    return act


def source(numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> Act:
    """The source holds these samples now."""
    return lambda project: project.has(numbers, **replaced)


def other_image(number: int, numbers: range = range(SAMPLES)) -> Act:
    return source(numbers, **{sample_name(number).replace("-", "_"): image_bytes(99)})


def together(*acts: Act) -> Act:
    return lambda project: [act(project) for act in acts]


NOT_ENCODED = "1 of 22 images changed since they were encoded: "
"""Said of images that changed."""

MISSING = 18
"""A sample of the last shard; the broken ones lie in the others."""


def build_with_a_missing_image(project: Project) -> Project:
    """From a folder of images."""
    project.unpack()
    image(project, MISSING).unlink()
    project.build()
    return project


def image(project: Project, number: int) -> Path:
    return project.images / f"{sample_name(number)}.png"


def mend(project: Project, *numbers: int) -> None:
    for number in numbers:
        image(project, number).write_bytes(image_bytes(number))
