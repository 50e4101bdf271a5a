"""A small source and a small VAE, made here, loaded the ordinary way."""

import io
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan
from PIL import Image

from precompute.cli import main
from precompute.encoders.encoder import Encoder

SAMPLES = 22
BROKEN = (4, 13)
"""Places of the samples whose image is no image."""


def make_vae(path: Path, seed: int = 0) -> Path:
    """A narrow Wan VAE with random weights."""
    torch.manual_seed(seed)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(path / "vae")
    return path


@pytest.fixture(scope="session")
def vae_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vae(tmp_path_factory.mktemp("vae"))


def image_bytes(number: int) -> bytes:
    """A small picture that differs from all others."""
    rng = np.random.default_rng(number)
    picture = Image.fromarray(rng.integers(0, 255, (6, 5, 3), np.uint8)).resize((50, 40), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def sample_name(number: int) -> str:
    return f"sample-{number:03d}"


def write_source(folder: Path, numbers: range | list[int] = range(SAMPLES), **replaced: bytes) -> Path:
    """chat.json and images.zip; `replaced` gives other bytes for a sample by name (with _ for -)."""
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


@pytest.fixture
def source_path(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def config_values(cache: Path, source: Path, vae: Path, **overrides: Any) -> dict[str, Any]:
    """A build's YAML as a dict; overrides by dotted name with __ for the dot."""
    values: dict[str, Any] = {
        "cache": str(cache),
        "source": {"kind": "llava", "path": str(source / "chat.json"), "images": str(source / "images.zip")},
        "image": {"height": 32, "width": 40},
        "encoder": {"model": str(vae), "compute_dtype": "float32", "batch_size": 3, "device": "cpu"},
        "store": {"samples_per_shard": 8},
        "run": {"max_reject_fraction": 0.2, "decode_threads": 2},
    }
    for name, value in overrides.items():
        section, _, field = name.partition("__")
        values[section][field] = value
    return values


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def run_build(folder: Path, source: Path, vae: Path, *flags: str, code: int = 0, **overrides: Any) -> Path:
    """Build the cache in `folder`, whose config lies beside it; ends with that exit code."""
    values = config_values(folder / "cache", source, vae, **overrides)
    assert main(["build", "--config", str(write_config(folder / "build.yaml", values)), *flags]) == code
    return folder / "cache"


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def timeless_files(cache: Path) -> dict[str, bytes]:
    """Every file that has no clock in it: all but the commit records and the claim."""
    return {
        path.relative_to(cache).as_posix(): path.read_bytes()
        for path in sorted(cache.rglob("*"))
        if path.is_file() and path.parts[len(cache.parts)] not in ("commits", ".claim")
    }


def assert_same_as_undisturbed(folder: Path, values: dict[str, Any]) -> None:
    """The cache of `values` has the bytes of a build of them that nothing came between."""
    cache = Path(values["cache"])
    run = {name: value for name, value in values["run"].items() if name != "workers"}
    other = write_config(folder / "undisturbed.yaml", {**values, "run": run, "cache": str(folder / "undisturbed")})
    assert main(["build", "--config", str(other)]) == 0
    assert timeless_files(cache) == timeless_files(folder / "undisturbed")


@pytest.fixture
def at_second_batch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions put into this list are called once, when the second batch is to be encoded."""
    acts: list[Any] = []
    encode, calls = Encoder.encode, Counter[str]()

    def encode_and_act(self: Encoder, image_NYX3: Any) -> Any:
        calls["encode"] += 1
        if calls["encode"] == 2:
            for act in acts:
                act()
        return encode(self, image_NYX3)

    monkeypatch.setattr(Encoder, "encode", encode_and_act)
    return acts
