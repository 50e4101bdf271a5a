"""Short shards are packed by copying samples: rows, samples and statistics stay, only the cuts change."""

from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.format.test_shards import LENGTHS, REJECTED
from tests.make_cache import make_cache, text_recipe

COLUMNS = ["row", "id", "uri", "conversations", "content_sha256"]
FORMS = {"the same": [], "a codec": ["--codec", "lz4"], "tars": ["--format", "webdataset"]}


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    latents = np.random.default_rng(0).standard_normal((sum(LENGTHS), 2, 3, 4), np.float32)
    return make_cache(tmp_path / "grown", latents, rejected=REJECTED, lengths=LENGTHS)


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_copy_has_the_same_samples_in_full_shards(grown, tmp_path, form):
    """A stopped copy goes on where it was."""
    out = tmp_path / "packed"
    command = ["copy", str(grown), str(out), "--reshard", *FORMS[form]]
    assert main(command) == 0
    before, after = open_cache(grown), open_cache(out)
    assert after.spec.bounds.tolist() == [0, 8, 16, 22]
    everyone = np.arange(len(before))
    np.testing.assert_array_equal(after.read(everyone), before.read(everyone))
    assert after.samples(everyone, COLUMNS) == before.samples(everyone, COLUMNS)
    assert (after.seal.reasons, after.rejected_rows().tolist()) == (before.seal.reasons, [*REJECTED])
    np.testing.assert_allclose(after.seal.array.mean, before.seal.array.mean)
    np.testing.assert_allclose(after.seal.array.preview.weight, before.seal.array.preview.weight, rtol=1e-9)
    assert not verify(out, "deep").findings
    whole = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for name in ("seal.json", "commits/000001.json"):
        (out / name).unlink()
    assert main(command) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == whole


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


def test_a_damaged_sample_ends_the_copy_and_is_named(grown, tmp_path, capsys):
    flip(grown / shard_name(grown, 2), 0)
    assert main(["copy", str(grown), str(tmp_path / "packed"), "--reshard"]) == 1
    assert "row 4 in shard 2" in capsys.readouterr().err
    assert not (tmp_path / "packed/seal.json").exists()
