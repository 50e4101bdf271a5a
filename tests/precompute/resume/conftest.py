"""What may happen to a cache and its source between two builds, as functions of their project."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.precompute.conftest import SAMPLES, Project, flip, image_bytes, run_build, sample_name, write_source

Act = Callable[[Project], object]

SHARD, TABLE, RECORD = "latents/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"
"""Files of shard 1."""


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of caches: of another image in each shard, of another recipe, and of other texts."""
    folder = tmp_path_factory.mktemp("foreign")
    source = write_source(folder / "source", **{f"sample_{each:03d}": image_bytes(90 + each) for each in (1, 9, 17)})
    run_build(folder, source, vae_path).rename(folder / "images")
    run_build(folder, source, vae_path, image__height=40).rename(folder / "recipe")
    rewrite(write_source(source) / "chat.json", "Picture", "Drawing")
    run_build(folder, source, vae_path).rename(folder / "texts")
    return folder


@pytest.fixture
def built(built: Project, foreign: Path) -> Project:
    """With other caches in its folder."""
    (built.folder / "foreign").symlink_to(foreign)
    return built


def rewrite(path: Path, before: str, now: str) -> None:
    path.write_text(path.read_text().replace(before, now))


def lost(*names: str) -> Act:
    return lambda project: project.lose(*names)


def flipped(name: str) -> Act:
    return lambda project: flip(project.cache / name)


def copied(kind: str, *names: str) -> Act:
    """Files of a foreign cache lie in place of the cache's own."""
    return lambda project: [
        shutil.copy(project.folder / "foreign" / kind / name, project.cache / name) for name in names
    ]


def source(numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> Act:
    """The source holds these samples now."""
    return lambda project: project.has(numbers, **replaced)


def other_image(number: int, numbers: range = range(SAMPLES)) -> Act:
    return source(numbers, **{sample_name(number).replace("-", "_"): image_bytes(99)})


def together(*acts: Act) -> Act:
    return lambda project: [act(project) for act in acts]
