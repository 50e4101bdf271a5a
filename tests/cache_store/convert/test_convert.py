"""`cache-store convert`: there and back to the same bytes, from any stop, and never from or into the wrong folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main
from cache_store.storage.claim import claim
from tests.cache_store.conftest import REJECTED, ROWS, SHAPES, contents, flip, samples_of, shard_name
from tests.cache_store.signing import edited, load, resign, save_signed
from tests.make_cache import caption, make_cache

OTHER = {"zarr": "webdataset", "webdataset": "zarr"}


def convert(cache: Path, out: Path, store_format: str, *options: str) -> int:
    return main(["convert", str(cache), str(out), "--format", store_format, *options])


ODD_TEXTS = [caption('ü\U0001f600\x00"\\' * (200 * row)) for row in range(ROWS)]
TO_TARS = {"store_format": "webdataset", "codec": "none"}


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ({}, TO_TARS),
        ({"store_format": "webdataset"}, {"store_format": "zarr"}),
        *(({"codec": codec}, TO_TARS) for codec in ("lz4", "zstd")),
        *(({"latents": samples_of(shape)}, TO_TARS) for shape in SHAPES),
        ({"conversations": ODD_TEXTS}, TO_TARS),
        *(({"codec": "lz4", "dtype": dtype}, {"codec": "zstd"}) for dtype in ("float16", "bfloat16", "float32")),
        ({"codec": "zstd"}, {}),
    ],
    ids=lambda value: ", ".join(f"{name} {each}"[:20] for name, each in value.items()),
)
def test_there_it_is_what_a_build_would_write_and_back_what_it_was(tmp_path, latents, capsys, written, changed):
    written = {"latents": latents, "rejected": REJECTED, "store_format": "zarr", "codec": "none"} | written
    there, back, wanted = tmp_path / "there", tmp_path / "back", written | changed
    cache, direct = make_cache(tmp_path / "cache", **written), make_cache(tmp_path / "direct", **wanted)
    asked = ["--codec", changed["codec"]] if changed.get("codec", "none") != "none" else []
    assert convert(cache, there, wanted["store_format"], *asked) == 0
    assert "converted 4 shards, every latent checked" in capsys.readouterr().out
    assert contents(there) == contents(direct)
    assert convert(there, back, written["store_format"], "--codec", written["codec"]) == 0
    assert contents(back) == contents(cache)


def test_what_a_repair_of_the_copy_would_build_is_the_copys_form(cache, tmp_path, store_format):
    with edited(cache / "build.json") as record:
        record["config"] = {"source": {"kind": "llava"}, "store": {"format": store_format, "codec": "none"}}
    resign(cache)
    expected = load(cache / "build.json")
    assert convert(cache, tmp_path / "out", OTHER[store_format]) == 0
    expected["config"]["store"]["format"] = OTHER[store_format]
    save_signed(cache / "build.json", expected)
    assert (tmp_path / "out/build.json").read_bytes() == (cache / "build.json").read_bytes()


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `cache` of many shards, so that a signal comes in between, and `undisturbed`, its conversion."""
    folder = tmp_path_factory.mktemp("many")
    rows = np.random.default_rng(0).standard_normal((300, 4, 6, 5)).astype(np.float32)
    assert convert(make_cache(folder / "cache", rows, samples_per_shard=2), folder / "undisturbed", "webdataset") == 0
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 3), (signal.SIGINT, 3)])
def test_a_stopped_conversion_goes_on_to_the_same_bytes(many_shards, tmp_path, number, code):
    arguments = ["convert", str(many_shards / "cache"), str(tmp_path / "out"), "--format", "webdataset"]
    process = subprocess.Popen([sys.executable, "-m", "cache_store", *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (done := times(tmp_path / "out")):
        assert time.monotonic() < deadline, "no shard was converted"
        time.sleep(0.002)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert "Traceback" not in error
    if number != signal.SIGKILL:
        assert not list((tmp_path / "out").rglob("*.partial"))
    assert not (tmp_path / "out/seal.json").exists()
    assert main(arguments) == 0
    assert {name: times(tmp_path / "out")[name] for name in done} == done, "committed shards are kept"
    assert contents(tmp_path / "out") == contents(many_shards / "undisturbed")


def times(out: Path) -> dict[str, int]:
    """When each committed shard was written."""
    return {path.stem: (out / f"shards/{path.stem}.tar").stat().st_mtime_ns for path in out.glob("commits/*.json")}


def test_a_finished_conversion_run_again_touches_nothing(cache, tmp_path, store_format, capsys):
    out = tmp_path / "out"
    assert convert(cache, out, OTHER[store_format]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert convert(cache, out, OTHER[store_format]) == 0
    assert "converted 0 shards; 4 were there, their records fit" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "damaged", ["SHARD", "samples/000001.parquet", "commits/000001.json", "plan.parquet", "seal.json"]
)
def test_what_the_copy_lost_is_converted_again_and_scratch_goes(cache, tmp_path, store_format, damaged):
    out = tmp_path / "out"
    assert convert(cache, out, OTHER[store_format]) == 0
    before, shard = contents(out), shard_name(out, 1)
    folder, _, name = shard.rpartition("/")
    for scratch in (f"{folder}/.{name}", "samples/.000002.parquet", "commits/.000001.json", ".seal.json"):
        (out / f"{scratch}.1.partial").write_bytes(b"half")
    path = out / damaged.replace("SHARD", shard)
    path.unlink() if damaged == "seal.json" else path.write_bytes(path.read_bytes()[:-1])
    assert convert(cache, out, OTHER[store_format]) == 0
    assert contents(out) == before


def test_a_damaged_latent_is_never_copied_and_names_its_row(cache, tmp_path, store_format, capsys):
    sample = open_cache(cache).samples(np.array([10])).to_pylist()[0]
    flip(cache / shard_name(cache, 1), sample["offset"] + 7)
    assert convert(cache, tmp_path / "out", OTHER[store_format]) == 1
    place = f"row {sample['row']} in shard 1 ({shard_name(cache, 1)}) does not match its crc32c"
    assert place in capsys.readouterr().err
    assert [path.stem for path in (tmp_path / "out").glob("commits/*")] == ["000000"]
    assert not list((tmp_path / "out").rglob("*000001*")), "the shard in hand is withdrawn"


@pytest.mark.parametrize("name", ["samples/000002.parquet", "plan.parquet"])
def test_a_damaged_table_is_never_copied(cache, tmp_path, store_format, capsys, name):
    flip(cache / name, 200)
    assert convert(cache, tmp_path / "out", OTHER[store_format]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out" / name).exists()


@pytest.mark.parametrize(("lost", "message"), [("SHARD", "is damaged"), ("seal.json", "not sealed")])
def test_a_cache_that_is_damaged_or_unfinished_is_refused(cache, tmp_path, store_format, capsys, lost, message):
    (cache / lost.replace("SHARD", shard_name(cache, 3))).unlink()
    assert convert(cache, tmp_path / "out", OTHER[store_format]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("cache", "lies in the cache"),
        ("cache/latents/tars", "lies in the cache"),
        ("link", "lies in the cache"),
        (".", "holds the cache"),
        ("thesis", "holds 'thesis.tex' but no cache"),
        ("thesis/thesis.tex", "is not a folder"),
        ("thesis/thesis.tex/out", "thesis.tex is not a folder"),
    ],
)
def test_a_folder_that_is_not_for_it_is_refused_untouched(tmp_path, latents, capsys, out, message):
    cache = make_cache(tmp_path / "cache", latents)
    (tmp_path / "link").symlink_to(cache)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("precious")
    before = contents(tmp_path)
    assert convert(cache, tmp_path / out, "webdataset") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert contents(tmp_path) == before


def test_another_cache_in_the_way_is_refused_untouched(tmp_path, latents, capsys):
    cache = make_cache(tmp_path / "cache", latents)
    larger = make_cache(tmp_path / "larger", latents, samples_per_shard=16, store_format="webdataset")
    moved = make_cache(tmp_path / "moved", latents + 1, store_format="webdataset")
    before = contents(tmp_path)
    for out, field in ((larger, "samples_per_shard"), (moved, "statistics")):
        assert convert(cache, out, "webdataset") == 1
        error = capsys.readouterr().err
        assert "another cache" in error
        assert field in error
    assert contents(tmp_path) == before


def test_one_converter_at_a_time(cache, tmp_path, store_format, capsys):
    out = tmp_path / "out"
    with claim(out):
        assert convert(cache, out, OTHER[store_format]) == 1
    assert f"by process {os.getpid()} on {os.uname().nodename}" in capsys.readouterr().err
    assert convert(cache, out, OTHER[store_format]) == 0


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("bfloat16", [], "tars hold dtype float16 or float32"),
        ("float16", ["--codec", "zstd"], "codec zstd needs format zarr"),
    ],
)
def test_what_tars_cannot_hold_is_refused_in_one_line(tmp_path, latents, capsys, dtype, options, message):
    cache = make_cache(tmp_path / "cache", latents, dtype=dtype)
    assert convert(cache, tmp_path / "out", "webdataset", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
