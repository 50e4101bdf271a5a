"""`cache-store copy`: into another form and back, into full shards, resumed after a stop; wrong places are refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import write_build
from cache_store.cli import main
from cache_store.storage.claim import claim_folder
from cache_store.verify.verify import verify
from tests.cache_store.conftest import REJECTED, ROWS, contents, flip, samples_of, shard_name
from tests.cache_store.format.test_shards import LENGTHS
from tests.cache_store.format.test_shards import REJECTED as GROWN_REJECTED
from tests.make_cache import caption, make_cache, text_recipe

OTHER = {"zarr": "webdataset", "webdataset": "zarr"}


def copy(cache: Path, out: Path, store_format: str, *options: str) -> int:
    return main(["copy", str(cache), str(out), "--format", store_format, *options])


ODD_TEXTS = [caption('ü\U0001f600\x00"\\' * (200 * row)) for row in range(ROWS)]
CLIPS = [samples_of((4, 5, 2, 3), 14), samples_of((4, 9, 2, 3), 16)]
TO_TARS = {"store_format": "webdataset", "codec": "none"}


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ({"store_format": "webdataset"}, {"store_format": "zarr"}),
        ({"latents": samples_of((12,)), "codec": "zstd"}, TO_TARS),
        ({"latents": CLIPS, "clips": True}, TO_TARS),
        ({"latents": CLIPS, "clips": True, "codec": "lz4", "dtype": "uint8"}, {"codec": "zstd"}),
        ({"conversations": ODD_TEXTS}, TO_TARS),
        ({"codec": "lz4", "dtype": "bfloat16"}, {"codec": "zstd"}),
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
    for damaged in (shard_name(out, 1), "commits/000001.json", "plan/000000.parquet", "seal.json"):
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
        ("link .", 2, "OUT"),
        ("cache thesis --format webdataset", 2, "thesis.tex"),
        ("cache thesis/thesis.tex/out --format webdataset", 2, "thesis.tex"),
        ("cache out --format webdataset --codec zstd", 2, "codec zstd"),
        ("bfloat16 out --format webdataset", 2, "--format webdataset"),
        ("cache larger --format webdataset", 1, "samples_per_shard"),
        ("cache moved --format webdataset", 1, "sums"),
        ("cache bfloat16", 1, "dtype"),
        ("tars moved", 1, "sums"),
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


# Packed into full shards: rows, samples and statistics stay, only the cuts change.

COLUMNS = ["row", "id", "uri", "conversations", "content_sha256"]
PACKED_FORMS = {"the same": [], "a codec": ["--codec", "lz4"], "tars": ["--format", "webdataset"]}


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    latents = np.random.default_rng(0).standard_normal((sum(LENGTHS), 2, 3, 4), np.float32)
    return make_cache(tmp_path / "grown", latents, rejected=GROWN_REJECTED, lengths=LENGTHS)


@pytest.mark.parametrize("form", PACKED_FORMS)
def test_a_packed_copy_has_the_same_samples_in_full_shards(grown, tmp_path, form):
    """A stopped copy goes on where it was."""
    out = tmp_path / "packed"
    command = ["copy", str(grown), str(out), "--reshard", *PACKED_FORMS[form]]
    assert main(command) == 0
    before, after = open_cache(grown), open_cache(out)
    assert after.spec.bounds.tolist() == [0, 8, 16, 22]
    everyone = np.arange(len(before))
    np.testing.assert_array_equal(after.read(everyone), before.read(everyone))
    assert after.samples(everyone, COLUMNS) == before.samples(everyone, COLUMNS)
    assert (after.seal.reasons, after.rejected_rows().tolist()) == (before.seal.reasons, [*GROWN_REJECTED])
    np.testing.assert_allclose(after.seal.array.mean, before.seal.array.mean)
    np.testing.assert_allclose(after.seal.array.preview.weight, before.seal.array.preview.weight, rtol=1e-9)
    assert not verify(out, "deep").findings
    whole = contents(out)
    for name in ("seal.json", "commits/000001.json"):
        (out / name).unlink()
    assert main(command) == 0
    assert contents(out) == whole


def test_texts_keep_their_null_prompt_and_sizes_their_arrays(tmp_path):
    texts = np.random.default_rng(0).standard_normal((6, 5, 3), np.float32)
    clips = [np.ones((6, 4, 5, 2, 3), np.float32), np.ones((6, 4, 9, 2, 3), np.float32)]
    sizes = [np.ones((5, 2, 2, 3), np.float32), np.ones((4, 2, 4, 1), np.float32)]
    for name, latents, options in (
        ("texts", texts, {"text": text_recipe(5), "lengths": (1, 2, 3)}),
        ("sizes", sizes, {"samples_per_shard": 2}),
        ("codes", clips[0][:, :, 0], {"dtype": "uint8", "lengths": (1, 2, 3)}),
        ("clips", clips, {"clips": True, "samples_per_shard": 4, "lengths": (2, 1, 1, 2)}),
    ):
        path, out = make_cache(tmp_path / name, latents, **options), tmp_path / f"{name}-packed"
        assert main(["copy", str(path), str(out), "--reshard"]) == 0
        assert not verify(out, "deep").findings
        assert len(open_cache(out)) == len(open_cache(path))
    np.testing.assert_array_equal(
        open_cache(tmp_path / "texts-packed").null_text(), open_cache(tmp_path / "texts").null_text()
    )
    assert open_cache(tmp_path / "sizes-packed").spec == open_cache(tmp_path / "sizes").spec
