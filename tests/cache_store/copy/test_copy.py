"""`cache-store copy`: into another form and back to equal bytes, resumed after a stop; wrong places are refused."""

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import write_build
from cache_store.cli import main
from cache_store.copy.copy import refuse_overlap
from cache_store.errors import ConfigError
from cache_store.storage.claim import claim_folder
from cache_store.storage.store import open_store
from tests.cache_store.conftest import REJECTED, ROWS, SHAPES, contents, flip, samples_of, shard_name
from tests.make_cache import caption, make_cache

OTHER = {"zarr": "webdataset", "webdataset": "zarr"}


def copy(cache: Path, out: Path, store_format: str, *options: str) -> int:
    return main(["copy", str(cache), str(out), "--format", store_format, *options])


ODD_TEXTS = [caption('ü\U0001f600\x00"\\' * (200 * row)) for row in range(ROWS)]
CLIPS = [samples_of((4, 5, 2, 3), 14), samples_of((4, 9, 2, 3), 16)]
TO_TARS = {"store_format": "webdataset", "codec": "none"}


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ({}, TO_TARS),
        ({"store_format": "webdataset"}, {"store_format": "zarr"}),
        *(({"latents": samples_of(shape)}, TO_TARS) for shape in SHAPES),
        ({"latents": CLIPS, "clips": True}, TO_TARS),
        ({"latents": CLIPS, "clips": True, "codec": "lz4", "dtype": "uint8"}, {"codec": "zstd"}),
        ({"conversations": ODD_TEXTS}, TO_TARS),
        ({"codec": "lz4", "dtype": "bfloat16"}, {"codec": "zstd"}),
        ({"codec": "zstd"}, TO_TARS),
    ],
    ids=lambda value: ", ".join(f"{name} {each}"[:20] for name, each in value.items()),
)
def test_a_copy_in_another_form_is_as_built_and_back_as_it_was(
    tmp_path, latents, capsys, monkeypatch, written, changed
):
    monkeypatch.setattr("cache_store.cache.writer.utc_time", lambda: "2026-01-31T23:59:59.123Z")
    written = {"latents": latents, "rejected": REJECTED, "store_format": "zarr", "codec": "none"} | written
    cache, direct, there, back = (tmp_path / name for name in ("cache", "direct", "there", "back"))
    wanted = written | changed
    for path, form in ((cache, written), (direct, wanted)):
        store = {"format": form["store_format"], "codec": form["codec"]}
        write_build(make_cache(path, **form), {"source": {"kind": "llava"}, "store": store})
    asked = ["--codec", changed["codec"]] if "dtype" in written else ["--format", wanted["store_format"]]
    assert main(["copy", str(cache), str(there), *asked]) == 0
    assert "copied 4 shards" in capsys.readouterr().out
    assert contents(there) == contents(direct)
    assert copy(there, back, written["store_format"], "--codec", written["codec"]) == 0
    assert contents(back) == contents(cache)


def test_run_again_it_mends_damage_and_touches_nothing_else(cache, tmp_path, store_format, capsys):
    out = tmp_path / "out"
    assert copy(cache, out, OTHER[store_format]) == 0
    whole, before = contents(out), {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert copy(cache, out, OTHER[store_format]) == 0
    assert "copied 0 shards" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    for damaged in (
        shard_name(out, 1),
        "samples/000001.parquet",
        "commits/000001.json",
        "plan/000000.parquet",
        "seal.json",
    ):
        path = out / damaged
        for scratch in (path, out / "samples/000003.parquet"):
            scratch.with_name(f".{scratch.name}.1.partial").write_bytes(b"half")
        path.unlink() if damaged == "seal.json" else path.write_bytes(path.read_bytes()[:-1])
        assert copy(cache, out, OTHER[store_format]) == 0
        assert contents(out) == whole, damaged


def flip_a_latent(cache: Path) -> None:
    flip(cache / shard_name(cache, 1), open_cache(cache).samples(np.array([10]))["offset"][0].as_py() + 7)


def flip_unseen(table: Path) -> None:
    """Flip a bit that Parquet does not check."""
    flip(table, table.read_bytes().index(b"parquet-cpp"))


@pytest.mark.parametrize(
    ("damage", "named", "withdrawn"),
    [
        (flip_a_latent, "row 12 in shard 1", "*000001*"),
        (lambda cache: flip_unseen(cache / "samples/000002.parquet"), "samples/000002.parquet", "*000002*"),
        (lambda cache: flip_unseen(cache / "plan/000000.parquet"), "plan/000000.parquet", "plan/000000.parquet"),
        (lambda cache: (cache / shard_name(cache, 3)).unlink(), "shard 3", "*"),
        (lambda cache: (cache / "seal.json").unlink(), "seal", "*"),
    ],
)
def test_damage_is_never_copied_and_is_named(cache, tmp_path, store_format, capsys, damage, named, withdrawn):
    damage(cache)
    assert copy(cache, tmp_path / "out", OTHER[store_format]) == 1
    assert named in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob(withdrawn))


@pytest.mark.parametrize(
    ("cache", "out", "overlap"),
    [
        ("s3://b/cache", "s3://b/cache/tars", True),
        ("s3://b/a/cache", "s3://b/a", True),
        ("s3://b/cache", "s3://b/cache-tars", False),
        ("s3://b/cache", "gs://b/cache", False),
        ("/", "s3://b/cache", False),
    ],
)
def test_places_that_overlap_are_named_as_typed(cache, out, overlap):
    with pytest.raises(ConfigError, match=f"{out} .* {cache}") if overlap else nullcontext():
        refuse_overlap(open_store(cache), open_store(out))


def test_what_cannot_be_is_refused_and_touches_nothing(tmp_path, latents, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(make_cache(tmp_path / "cache", latents))
    make_cache(tmp_path / "tars", latents, store_format="webdataset")
    make_cache(tmp_path / "bfloat16", latents, dtype="bfloat16")
    make_cache(tmp_path / "larger", latents, samples_per_shard=16, store_format="webdataset")
    make_cache(tmp_path / "moved", latents + 1, store_format="webdataset")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("precious")
    before = contents(tmp_path)
    for typed, code, named in (
        ("cache cache", 2, "OUT"),
        ("cache cache/latents/tars", 2, "OUT"),
        ("cache link", 2, "OUT"),
        ("cache .", 2, "OUT"),
        ("cache thesis --format webdataset", 2, "thesis.tex"),
        ("cache thesis/thesis.tex --format webdataset", 2, "thesis.tex"),
        ("cache thesis/thesis.tex/out --format webdataset", 2, "thesis.tex"),
        ("cache out --format webdataset --codec zstd", 2, "codec zstd"),
        ("bfloat16 out --format webdataset", 2, "--format webdataset"),
        ("cache larger --format webdataset", 1, "samples_per_shard"),
        ("cache moved --format webdataset", 1, "sums"),
        ("cache bfloat16", 1, "dtype"),
        ("tars moved", 1, "cache identity"),
        ("cache tars/latents --codec zstd", 2, "OUT"),
        ("tars out --codec zstd", 2, "--codec zstd"),
    ):
        assert main(["copy", *typed.split()]) == code, typed
        error = capsys.readouterr().err
        assert named in error, typed
        assert code == 1 or error.count("\n") == 1, error
        assert contents(tmp_path) == before
    with claim_folder(tmp_path / "out"):
        assert copy(tmp_path / "cache", tmp_path / "out", "webdataset") == 1
    assert f"process {os.getpid()} on {os.uname().nodename}" in capsys.readouterr().err
