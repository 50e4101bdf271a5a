"""Command lines in this process, and small builds that are run from the same start and disturbed at every step."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import precompute.build.steps as build_module
from cache_store import open_cache
from cache_store.cache.metadata import read_commit, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.formats import shard_format
from cache_store.format.layout import SEAL_FILE
from cache_store.format.schema import StoreFormat
from cache_store.program.command_line import Parser, Program
from cache_store.verify.verify import verify
from precompute.cli import main as precompute
from precompute.encoders.registry import load_encoder
from tests.places import Folder, Place
from tests.precompute.conftest import config_values, image_bytes, write_config, write_source

PROGRAMS: dict[str, Callable[[list[str]], int]] = {"precompute": precompute, "cache-store": cache_store}
COMMANDS = {
    "build": "precompute build --config {scene}/short.yaml --cache {cache}",
    "extend": "precompute build --config {scene}/grown.yaml --cache {cache} --extend",
    "retry": "precompute build --config {scene}/mended.yaml --cache {cache} --retry-rejected",
    "repair": "precompute repair {cache} --shards 0",
    "withdraw": "cache-store withdraw {cache} --ids {scene}/ids.txt",
    "copy": "cache-store copy {scene}/before {cache} --format {other}",
}
BEFORE = {"extend": "before", "retry": "before", "repair": "damaged", "withdraw": "before"}
"""The cache from which each command starts."""
PLAIN = {"extend": "grown", "retry": "mended", "repair": "short", "withdraw": "short"}
"""The config that builds each command's cache without the command's flag."""


load_once = cache(load_encoder)


@pytest.fixture(autouse=True)
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let builds share loaded encoders, in the folders whose conftest imports this."""
    monkeypatch.setattr(build_module, "load_encoder", load_once)


@pytest.fixture(autouse=True)
def quick_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the parser of each program only once, in the modules that import this: it takes half of a tiny command."""
    make, made = Program.parser, dict[str, Parser]()

    def parser(program: Program) -> Parser:
        if program.name not in made:
            made[program.name] = make(program)
        return made[program.name]

    monkeypatch.setattr(Program, "parser", parser)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line, given whole or word by word; return its output, which has no traceback."""

    def output(line: str, *words: str, code: int = 0) -> str:
        capsys.readouterr()
        program, *arguments = line.split()
        ended = PROGRAMS[program]([*arguments, *words])
        text = "".join(capsys.readouterr())
        assert ended == code, text
        assert "Traceback" not in text
        return text

    return output


def make_scene(folder: Path, vae: Path, form: StoreFormat) -> Path:
    """Make configs and caches to start from: shards of three rows and two, one row rejected.

    The grown source adds a row to the second shard, and a third shard. A row of each shard is to be withdrawn.
    """
    small: dict[str, Any] = {"store__format": form, "store__samples_per_shard": 3, "encoder__batch_size": 2}
    small |= {"image__height": 16, "image__width": 16, "run__max_reject_fraction": 0.5}
    sources: dict[str, tuple[int, dict[str, bytes]]] = {
        "short": (5, {}),
        "grown": (7, {}),
        "mended": (5, {"sample_004": image_bytes(4)}),
    }
    for name, (count, replaced) in sources.items():
        source = write_source(folder / f"source-{name}", range(count), **replaced)
        write_config(folder / f"{name}.yaml", config_values(folder / "before", source, vae, **small))
    assert precompute(["build", "--config", f"{folder}/short.yaml"]) == 0
    (folder / "ids.txt").write_text("sample-001\nsample-003\n")
    damaged = shutil.copytree(folder / "before", folder / "damaged")
    shard = damaged / shard_format(read_spec(damaged)).shard_file(0)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    return folder


class Run:
    """A command on a cache at a place; `folder` gets its result without a disturbance."""

    def __init__(self, scene: Path, folder: Path, name: str, place: Place) -> None:
        self.scene, self.name, self.place = scene, name, place
        self.before = Folder(scene / BEFORE[name]) if name in BEFORE else None
        self.start()
        assert self() == 0
        self.whole = Folder(folder / "whole")
        self.whole.mirror(self.place)
        self.start()

    def start(self) -> None:
        self.place.mirror(self.before or Folder(self.scene / "nothing"))

    def line(self, scheme: str = "") -> list[str]:
        """Return the command line; `scheme` is put before the cache's address."""
        return self.words(COMMANDS[self.name], scheme)

    def words(self, line: str, scheme: str) -> list[str]:
        (other,) = set(get_args(StoreFormat)) - {read_spec(self.scene / "before").store_format}
        named = {"scene": self.scene, "cache": f"{scheme}{self.place.address}", "other": other}
        return [word.format(**named) for word in line.split()]

    def __call__(self, scheme: str = "") -> int:
        program, *arguments = self.line(scheme)
        return PROGRAMS[program](arguments)

    def assert_whole(self) -> None:
        """Check that every file is absent, or whole and as before or after the command; scratch of a killed program
        aside. If there is a seal, its shards and samples tables are all there; also its records, except during a
        repair.
        """
        wholes = [self.whole, self.before] if self.before else [self.whole]
        allowed, found = [each.timeless() for each in wholes], self.place.timeless()
        found = {name: data for name, data in found.items() if not name.endswith(".partial")}
        for name, data in found.items():
            assert any(data == each.get(name) for each in allowed), name
        if SEAL_FILE in found:
            assert sealed_files(found) in map(sealed_files, allowed)
            assert self.name == "repair" or records(self.place) in map(records, wholes)
        assert self.name != "repair" or found[SEAL_FILE] == allowed[0][SEAL_FILE]
        for shard in records(self.place) if "zarr.json" in found else ():
            held = read_commit(self.place.address, shard)
            assert any(held.content == getattr(read_commit(each.path, shard), "content", None) for each in wholes)

    def finish(self, scheme: str = "") -> None:
        assert self(scheme) == 0
        assert self.place.timeless() == self.whole.timeless()
        assert not verify(self.place.address, "full").findings


def sealed_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the seal, the shards and their samples tables."""
    folders = ("latents/", "shards/", "samples/")
    return {name: data for name, data in files.items() if name == SEAL_FILE or name.startswith(folders)}


def records(place: Place) -> list[int]:
    """List the committed shards."""
    names = [name for name in place.marks() if name.startswith("commits/") and name.endswith(".json")]
    return sorted(int(name.removeprefix("commits/").removesuffix(".json")) for name in names)


def values_of(cache: Path) -> dict[str, bytes]:
    """Read every sample of a cache, by its id."""
    opened = open_cache(cache)
    numbers = np.arange(len(opened))
    samples = zip(opened.samples(numbers, ["id"])["id"].to_pylist(), opened.read(numbers), strict=True)
    return {name: sample.tobytes() for name, sample in samples}
