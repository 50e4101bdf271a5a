"""A cache of clips, of one length and of two: verified, copied, withdrawn from and joined as a cache of images is."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import write_build
from cache_store.cli import main
from cache_store.format.quantized import as_read
from cache_store.format.tables import CLIP_START
from cache_store.verify.verify import Level, verify
from tests.cache_store.conftest import contents
from tests.make_cache import make_cache

ROWS, REJECTED = 6, 2
FORMS: list[dict[str, Any]] = [
    {"store_format": "zarr", "codec": "none"},
    {"store_format": "zarr", "codec": "zstd", "dtype": "uint8"},
    {"store_format": "webdataset", "codec": "none"},
]
LENGTHS = {"17": (5,), "17 and 33": (5, 9)}
"""Latent frames of each array, by the clips' frames."""


def latents_of(lengths: tuple[int, ...], channels: int = 4) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((ROWS, channels, frames, 2, 3), np.float32) for frames in lengths]


@pytest.fixture(params=LENGTHS)
def lengths(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return LENGTHS[request.param]


@pytest.fixture(params=FORMS, ids=lambda form: ", ".join(map(str, form.values())))
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def write_clips(path: Path, lengths: tuple[int, ...], form: dict[str, Any]) -> Path:
    settings = {"clips": True, "rejected": [REJECTED], "samples_per_shard": 4, **form}
    make_cache(path, latents_of(lengths), **settings)
    store = {"format": form["store_format"], "codec": form["codec"]}
    write_build(path, {"source": {"kind": "llava"}, "store": store})
    return path


def assert_sound(path: Path, lengths: tuple[int, ...], dtype: str, missing: tuple[int, ...] = (REJECTED,)) -> None:
    """Check every level of verification, every sample and where each clip begins."""
    assert [verify(path, level).findings for level in get_args(Level)] == [()] * len(get_args(Level))
    cache, number = open_cache(path), 0
    for array, latents in enumerate(latents_of(lengths)):
        for row, sample in enumerate(latents, array * ROWS):
            if row in missing:
                continue
            np.testing.assert_array_equal(cache.read(np.array([number]))[0], as_read(sample[None], dtype)[0])
            found = cache.samples(np.array([number]), ["row", CLIP_START]).to_pylist()
            assert found == [{"row": row, CLIP_START: 0.5 * row}]
            number += 1
    assert len(cache) == number


def test_clips_are_verified_copied_resharded_and_withdrawn(tmp_path, monkeypatch, lengths, form):
    monkeypatch.setattr("cache_store.cache.writer.utc_time", lambda: "2026-01-31T23:59:59.123Z")
    cache, dtype = write_clips(tmp_path / "cache", lengths, form), form.get("dtype", "float16")
    assert_sound(cache, lengths, dtype)
    other = FORMS[0] if form["store_format"] == "webdataset" else {"store_format": "zarr", "codec": "lz4"}
    options = ["--format", other["store_format"], "--codec", other["codec"]]
    assert main(["copy", str(cache), str(tmp_path / "other"), *options]) == 0
    assert contents(tmp_path / "other") == contents(write_clips(tmp_path / "direct", lengths, {**form, **other}))
    short = write_clips(tmp_path / "short", lengths, {**form, "lengths": (2, 1, 1, 2)})
    assert main(["copy", str(short), str(tmp_path / "packed"), "--reshard"]) == 0
    assert open_cache(tmp_path / "packed").spec == open_cache(cache).spec
    assert_sound(tmp_path / "packed", lengths, dtype)
    (tmp_path / "ids").write_text("sample-000004\n")
    assert main(["withdraw", str(cache), "--ids", str(tmp_path / "ids")]) == 0
    assert_sound(cache, lengths, dtype, missing=(REJECTED, 4))


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ((5,), ("clip 17 frames at 16 fps, 24x16, squash", "[channel 4, latent_t, latent_y, latent_x]")),
        ((5, 9), ("clip 17 or 33 frames at 16 fps", "33x24x16 6 rows in 2 shards, [4, 9, 2, 3], 432 bytes a sample")),
    ],
)
def test_info_tells_frames_and_rate(tmp_path, capsys, lengths, told):
    assert main(["info", str(write_clips(tmp_path / "cache", lengths, FORMS[0]))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for each in (*told, "clips/s a worker"):
        assert each in shown


def test_clips_are_joined_and_normalised_per_channel(tmp_path, lengths):
    """With as many latent frames as channels, too."""
    paths = {}
    for name, channels in (("a", 4), ("b", 5)):
        latents, mean = latents_of(lengths, channels), [0.5 * channel for channel in range(channels)]
        std = [2.0] * channels
        paths[name] = make_cache(tmp_path / name, latents, clips=True, latents_mean=mean, latents_std=std)
    joined = open_joined(paths)
    for name, channels in (("a", 4), ("b", 5)):
        stored = latents_of(lengths, channels)[0][[5, 0]].astype(np.float16).astype(np.float32)
        expected = (stored - 0.5 * np.arange(channels, dtype=np.float32)[:, None, None, None]) / 2
        np.testing.assert_array_equal(joined.read(np.array([5, 0]), normalize=True)[name], expected)
