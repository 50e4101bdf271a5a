"""What dead builds left is told from what is a user's own, and cleared."""

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.verify.leftovers import LEFTOVER, STRAY, clear_leftovers, stray_findings
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name


def scratch_of_every_kind(cache) -> set[str]:
    shard_folder, _, shard = shard_name(cache, 2).rpartition("/")
    return {
        ".plan.parquet.1.partial",
        ".seal.json.1.partial",
        f"{shard_folder}/.{shard}.1.partial",
        f"{shard_folder}/.{shard}.12.partial",
        "samples/.000002.parquet.1.partial",
        "commits/.000002.json.1.partial",
    }


LOOKALIKES = {
    "samples/.000099.parquet.1.partial",
    "samples/.000002.parquet.partial",
    "samples/.000002.parquet.x.partial",
    "samples/000002.parquet.1.partial",
    "samples/.notes.1.partial",
    "samples/mine.partial",
    "commits/.000002.parquet.1.partial",
}


def test_scratch_is_cleared_and_what_looks_alike_is_not(cache):
    leftovers = scratch_of_every_kind(cache)
    for name in leftovers | LOOKALIKES:
        (cache / name).write_bytes(b"half")
    found = {finding.file: finding.problem for finding in stray_findings(cache, read_spec(cache))}
    assert found == dict.fromkeys(leftovers, LEFTOVER) | dict.fromkeys(LOOKALIKES, STRAY)
    clear_leftovers(cache, read_spec(cache))
    assert {finding.file for finding in verify(cache, "full").findings} == LOOKALIKES


@pytest.mark.parametrize("name", ["samples/.000002.parquet.1.partial", ".seal.json.1.partial"])
def test_a_folder_or_a_link_named_like_scratch_stays(cache, tmp_path, name):
    (tmp_path / "precious").touch()
    (cache / name).symlink_to(tmp_path / "precious")
    (cache / name.replace(".1.", ".2.")).mkdir()
    clear_leftovers(cache, read_spec(cache))
    assert (tmp_path / "precious").exists()
    assert (cache / name).is_symlink()
    assert (cache / name.replace(".1.", ".2.")).is_dir()


def test_a_cache_on_several_disks_is_cleared_where_its_files_are(cache, tmp_path):
    """Its folders may be links to others."""
    (cache / "samples").rename(tmp_path / "elsewhere")
    (cache / "samples").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/.000002.parquet.1.partial").touch()
    clear_leftovers(cache, read_spec(cache))
    assert not verify(cache, "full").findings
