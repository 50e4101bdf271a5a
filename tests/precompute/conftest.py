"""A small source and a small VAE, and builds of them."""

import io
import json
import shlex
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import Tensor

from cache_store.cache.metadata import read_build, write_build
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.build.planning import ListedParts
from precompute.cli import main
from precompute.config import BuildConfig
from precompute.encode.canary import Canary
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.vaes.vae import VaeEncoder
from precompute.sources.config import SourceConfig
from precompute.sources.images import ALL
from precompute.sources.listing import Samples
from precompute.sources.opening import open_source
from precompute.sources.tables import refuse_duplicates
from tests.places import Folder, Place

SAMPLES = 22
BROKEN = (4, 13)
"""Numbers of the samples whose image file is not an image."""
GOOD = [number for number in range(SAMPLES) if number not in BROKEN]


def plan_table(samples: Samples) -> pa.Table:
    """Return a source's samples as a plan has them."""
    encoder, source = EncoderConfig(model="M"), SourceConfig(kind="llava", path="the source")
    tables = [*ListedParts(lambda _: samples, [ALL], BuildConfig(cache="C", source=source, encoder=encoder))]
    refuse_duplicates(lambda: tables, "the source")
    return pa.concat_tables(tables).combine_chunks()


def make_vae(path: Path, seed: int = 0) -> Path:
    """Save a narrow Wan VAE with random weights."""
    torch.manual_seed(seed)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(path / "vae")
    return path


@pytest.fixture(scope="session")
def vae_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vae(tmp_path_factory.mktemp("vae"))


@cache
def image_bytes(number: int) -> bytes:
    """Make a small PNG that differs from those of other numbers."""
    rng = np.random.default_rng(number)
    picture = Image.fromarray(rng.integers(0, 255, (6, 5, 3), np.uint8)).resize((50, 40), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def sample_name(number: int) -> str:
    return f"sample-{number:03d}"


def write_source(folder: Path, numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> Path:
    """Write chat.json and images.zip; `replaced` gives other bytes for a sample by name (with _ for -)."""
    folder.mkdir(exist_ok=True)
    records = []
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number in numbers:
            name = sample_name(number)
            data = b"no image" if number in BROKEN else image_bytes(number)
            info = zipfile.ZipInfo(f"{name}.png")  # a fixed time
            archive.writestr(info, replaced.get(name.replace("-", "_"), data))
            turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"Picture {number}."}]
            records.append({"id": name, "image": f"{name}.png", "conversations": turns})
    (folder / "chat.json").write_text(json.dumps(records))
    return folder


def config_values(cache: Path | str, source: Path, vae: Path, **overrides: Any) -> dict[str, Any]:
    """Return a build's YAML as a dict; overrides are dotted names with __ for the dot."""
    values: dict[str, Any] = {
        "cache": str(cache),
        "source": {"kind": "llava", "path": str(source / "chat.json"), "images": str(source / "images.zip")},
        "image": {"height": 32, "width": 40},
        "encoder": {"model": str(vae), "compute_dtype": "float32", "batch_size": 3, "device": "cpu"},
        "store": {"samples_per_shard": 8},
        "run": {"max_reject_fraction": 0.2, "decode_threads": 2},
    }
    return override(values, overrides)


def override(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    for name, value in overrides.items():
        section, _, field = name.partition("__")
        (values[section] if field else values).update({field or section: value})
    return values


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def run_build(folder: Path, source: Path, vae: Path, *flags: str, code: int = 0, **overrides: Any) -> Path:
    """Build the cache in `folder`, with its config beside it, and check the exit code."""
    values = config_values(folder / "cache", source, vae, **overrides)
    assert main(["build", "--config", str(write_config(folder / "build.yaml", values)), *flags]) == code
    return folder / "cache"


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    Folder(path.parent).flip(path.name)


def timeless_files(cache: Path) -> dict[str, bytes]:
    """Read every file whose bytes do not depend on the time."""
    return Folder(cache).timeless()


class Project:
    """A source, a VAE and caches built of them, in a user's folder; the caches may lie elsewhere."""

    def __init__(
        self, folder: Path, vae: Path, capsys: pytest.CaptureFixture[str], caches: Place | None = None
    ) -> None:
        self.folder, self.vae, self._capsys, self.caches = folder, vae, capsys, caches or Folder(folder)
        self.source, self.cache = folder / "source", folder / "cache"
        self.images = self.source / "images.zip"
        self.settings: dict[str, Any] = {}
        """Overrides for every build: dotted names with __ for the dot."""

    @property
    def place(self) -> Place:
        return self.caches.below(self.cache.relative_to(self.folder).as_posix())

    def has(self, numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> None:
        """Give the source these samples."""
        write_source(self.source, numbers, **replaced)

    def edit(self, change: Callable[[int, dict[str, Any]], object]) -> None:
        """Change the records of the list, each given with its number."""
        path = self.source / "chat.json"
        records = json.loads(path.read_text())
        for number, record in enumerate(records):
            change(number, record)
        path.write_text(json.dumps(records))

    def unpack(self) -> None:
        """Unpack the images into a folder, which becomes the source."""
        self.images = self.source / "images"
        with zipfile.ZipFile(self.source / "images.zip") as archive:
            archive.extractall(self.images)

    def config(self, name: str | None = None, **overrides: Any) -> Path:
        """Write the YAML of a build of the cache of this name."""
        name = name or self.cache.name
        values = config_values(self.caches.below(name).address, self.source, self.vae)
        values["source"]["images"] = str(self.images)
        return write_config(self.folder / f"{name}.yaml", override(values, {**self.settings, **overrides}))

    def run(self, program: Callable[[list[str]], int], *arguments: object, code: int = 0) -> str:
        """Run a program and return its output; check the exit code, and that there is no traceback."""
        self._capsys.readouterr()
        ended = program([str(each) for each in arguments])
        said = "".join(self._capsys.readouterr())
        assert ended == code, said
        assert "Traceback" not in said
        return said

    def build(self, *flags: str, name: str | None = None, code: int = 0, **overrides: Any) -> str:
        return self.run(main, "build", "--config", self.config(name, **overrides), *flags, code=code)

    def step(self, command: str, *options: object, name: str | None = None, code: int = 0, **overrides: Any) -> str:
        """Run a `plan`, `seal` or `build`, as a rank does."""
        return self.run(main, command, "--config", self.config(name, **overrides), *options, code=code)

    def in_ranks(self, name: str | None = None, **overrides: Any) -> None:
        """Build the cache of this name by two ranks, one after the other."""
        for line in ("plan", "build --rank 1 --world-size 2", "build --rank 0 --world-size 2", "seal"):
            self.step(*line.split(), name=name, **overrides)

    def assert_as_built(self, **overrides: Any) -> None:
        """Check that the cache has the bytes of one build."""
        self.build(name="alone", **overrides)
        assert self.files() == self.caches.below("alone").timeless()

    def repair(self, *options: object, code: int = 0) -> str:
        return self.run(main, "repair", self.place.address, *options, code=code)

    def do(self, command: str, code: int = 0) -> str:
        """Run a `build` or `repair` of the cache, with options as typed."""
        name, *options = shlex.split(command)
        return {"build": self.build, "repair": self.repair}[name](*options, code=code)

    def report(self) -> Path:
        """Write the report of a full verification that finds damage."""
        path = self.folder / "my report.json"
        self.run(cache_store, "verify", self.place.address, "--level", "full", "--report", path, code=1)
        return path

    def files(self) -> dict[str, bytes]:
        return self.place.timeless()

    def lose(self, *names: str) -> None:
        self.place.lose(*names)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check that nothing changes, except the claim that ranks share, which stays until the seal."""
        before = self.place.marks()
        yield
        assert {name: mark for name, mark in self.place.marks().items() if name != ".claim"} == before

    def untouched(self) -> AbstractContextManager[None]:
        """Check that nothing in the cache is written, renamed or deleted inside the block."""
        return self.place.untouched()

    @contextmanager
    def same_in_the_end(self) -> Iterator[None]:
        """Check that the cache ends sound and with its present bytes, whatever happens inside the block."""
        before = self.files()
        yield
        assert self.files() == before
        assert not verify(self.place.address, "full").findings


@pytest.fixture
def project(tmp_path: Path, vae_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    write_source(tmp_path / "source")
    return Project(tmp_path, vae_path, capsys)


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """The cache that each `built` copies."""
    folder = tmp_path_factory.mktemp("built")
    return run_build(folder, write_source(folder / "source"), vae_path)


@pytest.fixture
def built(project: Project, built_once: Path) -> Project:
    """A project with its cache, as a build in this place would have left it."""
    project.place.mirror(Folder(built_once))
    build = read_build(built_once)
    config, listed = build.config, build.listed
    config["source"] |= {"path": str(project.source / "chat.json"), "images": str(project.images)}
    source = open_source(msgspec.convert(config["source"], SourceConfig))
    listed = listed and msgspec.structs.replace(listed, source=source.version())
    write_build(project.place.address, config, listed, spec_digest=build.spec_digest)
    return project


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of foreign caches: with another image in each shard, another recipe, and other texts."""
    folder = tmp_path_factory.mktemp("foreign")
    source = write_source(folder / "source", **{f"sample_{each:03d}": image_bytes(90 + each) for each in (1, 9, 17)})
    run_build(folder, source, vae_path).rename(folder / "images")
    run_build(folder, source, vae_path, image__resample="box").rename(folder / "recipe")
    chat = write_source(source) / "chat.json"
    chat.write_text(chat.read_text().replace("Picture", "Drawing"))
    run_build(folder, source, vae_path).rename(folder / "texts")
    return folder


Encode = Callable[[Tensor], Tensor]


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Encode, Tensor], Tensor]], None]:
    """Replace the encoder's `encode` by a function of the original `encode` and a batch."""
    encode = VaeEncoder.encode
    monkeypatch.setattr(Canary, "begin", lambda *arguments: None)  # it would notice

    def stand_in(function: Callable[[Encode, Tensor], Tensor]) -> None:
        monkeypatch.setattr(VaeEncoder, "encode", lambda self, image: function(partial(encode, self), image))

    return stand_in
