"""What dead builds left is told from what is a user's own, and cleared."""

from typing import get_args

import pytest

from cache_store import open_cache
from cache_store.storage.local import LocalStore
from cache_store.verify.findings import Level
from cache_store.verify.leftovers import LEFTOVER, STRAY, clear_leftovers
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name

LOOKALIKES = {
    *("samples/.000099.parquet.1.partial", "samples/.000002.parquet.partial", "samples/.000002.parquet.x.partial"),
    *("samples/000002.parquet.1.partial", "samples/.notes.1.partial", "samples/mine.partial", ".000001.1.partial"),
    *("commits/.000002.parquet.1.partial", "commits/notes.txt", "commits/features/", "samples/000099.parquet"),
}


def test_scratch_is_cleared_and_what_looks_alike_is_not(cache):
    shard_folder, _, shard = shard_name(cache, 2).rpartition("/")
    leftovers = {".plan.parquet.1.partial", ".seal.json.1.partial"}
    leftovers |= {"samples/.000002.parquet.1.partial", "commits/.000002.json.1.partial"}
    leftovers |= {f"{shard_folder}/.{shard}.{number}.partial" for number in (1, 12)}
    strangers = LOOKALIKES | {f"{shard_folder}/.000001.1.partial", f"{shard_folder.partition('/')[0]}/extra/"}
    for name in leftovers | strangers:
        (cache / name).mkdir() if name.endswith("/") else (cache / name).write_bytes(b"half")
    strangers = {name.rstrip("/") for name in strangers}
    for level in get_args(Level):
        found = {finding.file: finding.problem for finding in verify(cache, level).findings}
        assert found == dict.fromkeys(leftovers, LEFTOVER) | dict.fromkeys(strangers, STRAY)
    clear_leftovers(LocalStore(cache), open_cache(cache).spec)
    assert {finding.file for finding in verify(cache, "full").findings} == strangers


@pytest.mark.parametrize("name", ["samples/.000002.parquet.1.partial", ".seal.json.1.partial"])
def test_nothing_behind_a_link_named_like_scratch_goes(cache, tmp_path, name):
    (tmp_path / "precious").touch()
    (cache / name).symlink_to(tmp_path / "precious")
    (cache / name.replace(".1.", ".2.")).mkdir()
    clear_leftovers(LocalStore(cache), open_cache(cache).spec)
    assert (tmp_path / "precious").exists()
    assert not (cache / name).is_symlink()
    assert (cache / name.replace(".1.", ".2.")).is_dir()


def test_a_cache_on_several_disks_is_cleared_where_its_files_are(cache, tmp_path):
    """Its folders may be links to others."""
    (cache / "samples").rename(tmp_path / "elsewhere")
    (cache / "samples").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/.000002.parquet.1.partial").touch()
    clear_leftovers(LocalStore(cache), open_cache(cache).spec)
    assert not verify(cache, "full").findings
