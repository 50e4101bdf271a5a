"""Commands that write a small cache, each run from the same start again and again: to be disturbed at every step."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from cache_store.cache.metadata import read_commit, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.formats import shard_format
from cache_store.format.layout import SEAL_FILE
from cache_store.format.schema import StoreFormat
from cache_store.verify.verify import verify
from precompute.cli import main as precompute
from tests.places import Folder, Place
from tests.precompute.conftest import config_values, image_bytes, write_config, write_source

PROGRAMS: dict[str, Callable[[list[str]], int]] = {"precompute": precompute, "cache-store": cache_store}
COMMANDS = {
    "build": "precompute build --config {scene}/short.yaml --cache {cache}",
    "extend": "precompute build --config {scene}/grown.yaml --cache {cache} --extend",
    "retry": "precompute build --config {scene}/mended.yaml --cache {cache} --retry-rejected",
    "repair": "precompute repair {cache} --shards 0",
    "convert": "cache-store convert {scene}/before {cache} --format {other}",
}
BEFORE = {"extend": "before", "retry": "before", "repair": "damaged"}
"""The cache that a command starts from."""
PLAIN = {"extend": "grown", "retry": "mended", "repair": "short"}
"""The config by which its cache is built again without its flag."""


def make_scene(folder: Path, vae: Path, form: StoreFormat) -> Path:
    """A folder of configs and of caches to start from: two shards, of three rows and two, of which one is rejected.

    The grown source adds a row to the second shard, and a third.
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
    damaged = shutil.copytree(folder / "before", folder / "damaged")
    shard = damaged / shard_format(read_spec(damaged)).shard_file(0)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    return folder


class Run:
    """A command on a cache at a place, and in `folder` what it ends in undisturbed."""

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
        """As it is typed, for the cache or for `scheme` and its address."""
        (other,) = set(get_args(StoreFormat)) - {read_spec(self.scene / "before").store_format}
        named = {"scene": self.scene, "cache": f"{scheme}{self.place.address}", "other": other}
        return [word.format(**named) for word in COMMANDS[self.name].split()]

    def __call__(self, scheme: str = "") -> int:
        program, *arguments = self.line(scheme)
        return PROGRAMS[program](arguments)

    def assert_whole(self) -> None:
        """Every file is whole, as it was or as it is to be, or absent; but for the scratch of what was killed.

        Where there is a seal, shards and samples tables are all there, and those that it was made of; records too, but
        for a repair, which forgets nothing of what was sealed.
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
    """The seal, the shards, and their samples tables."""
    folders = ("latents/c/", "shards/", "samples/")
    return {name: data for name, data in files.items() if name == SEAL_FILE or name.startswith(folders)}


def records(place: Place) -> list[int]:
    """Shards that are committed."""
    names = [name for name in place.marks() if name.startswith("commits/") and name.endswith(".json")]
    return sorted(int(name.removeprefix("commits/").removesuffix(".json")) for name in names)
