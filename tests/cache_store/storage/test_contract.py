"""The contract of every store: folders, memory, servers of S3, GCS and Azure, the Hub, and stores that wrap a store."""

import errno
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main as cache_store
from cache_store.errors import CacheError, ChangedError, ConfigError, NotAFileError, TooLargeError
from cache_store.storage import retry
from cache_store.storage.claim import CLAIM_FILE
from cache_store.storage.kept_blocks import KeptStore
from cache_store.storage.local import LocalStore
from cache_store.storage.protocol import Ranges, Version
from cache_store.storage.store import Store, open_store
from cache_store.storage.wrapped import ListedStore
from tests.hub import DATA_SET
from tests.make_cache import make_cache
from tests.memory_store import MemoryStore
from tests.named import assert_names


class Handles(NamedTuple):
    """A store to write to, and to read from."""

    store: Store
    reopen: Callable[[], Store]
    """Opens the store again, as it is now."""


def one_store(store: Store) -> Handles:
    return Handles(store, lambda: store)


@dataclass(frozen=True)
class NoLinks(LocalStore):
    """A folder on a file system without hard links, such as FAT."""

    def link(self, path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))


MADE: dict[str, Callable[[Path], Handles]] = {
    "folder": lambda folder: one_store(LocalStore(folder / "store")),
    "no links": lambda folder: one_store(NoLinks(folder / "store")),
    "memory": lambda folder: one_store(MemoryStore()),
    "kept": lambda folder: one_store(KeptStore(MemoryStore(), folder / "kept", 2 << 20)),
    "listed": lambda folder: Handles(store := MemoryStore(), lambda: ListedStore(store)),
}
SERVED = ("s3", "gs", "az")


@pytest.fixture(params=[*MADE, *SERVED, "hub"])
def handles(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handles]:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    if request.param in MADE:
        yield MADE[request.param](tmp_path)
        return
    if request.param == "hub":
        yield Handles(LocalStore(request.getfixturevalue("hub_files")), lambda: open_store(DATA_SET))  # past the Hub
        return
    yield one_store(open_store(f"{request.getfixturevalue('bucket')}/a/store"))


@pytest.fixture
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["handles"])


@pytest.fixture
def store(handles: Handles) -> Store:
    return handles.store


@pytest.fixture
def reopen(handles: Handles) -> Callable[[], Store]:
    return handles.reopen


READS: dict[str, Callable[[Store, str], object]] = {
    "stat": lambda store, name: store.stat(name),
    "size": lambda store, name: store.size(name),
    "read": lambda store, name: store.read(name),
    "fetch": lambda store, name: store.fetch([Ranges(name, [0], [1])]),
    "open": lambda store, name: store.open(name).read(),
    "map": lambda store, name: store.map(name),
}


def test_a_file_is_what_was_put_last_and_then_gone(store, reopen):
    for data in (b"first", b"", b"second, longer"):
        store.put_whole("in/a folder/file", data)
        now = reopen()
        assert now.read("in/a folder/file") == bytes(now.map("in/a folder/file")) == data
        assert now.size("in/a folder/file") == now.stat("in/a folder/file").size == len(data)
    for _ in range(2):
        store.delete("in/a folder/file")
        assert not reopen().has("in/a folder/file")
    for read in READS.values():
        with pytest.raises(FileNotFoundError) as gone:
            read(reopen(), "in/a folder/file")
        assert str(gone.value.filename) == reopen().where("in/a folder/file")


def test_folders_list_what_is_directly_in_them(store, reopen):
    for name in ("b", "a/x", "a/y/z", "a.json", "é #%20"):
        store.put_whole(name, b"")
    now = reopen()
    assert now.list() == ["a.json", "a/", "b", "é #%20"]
    assert (now.list("a"), now.list("a/y"), now.list("none")) == (["x", "y/"], ["z"], [])
    assert (now.has("a"), now.has("a/y"), now.has("c"), now.has("a/z")) == (True, True, False, False)
    walked = dict(now.walk())
    assert sorted(walked) == ["a.json", "a/x", "a/y/z", "b", "é #%20"]
    assert all(version in (None, now.stat(name)) for name, version in walked.items())
    if now.is_remote:
        assert [name for name, _ in now.walk("a/x")] == ["a/y/z", "b", "é #%20"]


def test_a_name_is_taken_once_and_equal_bytes_count_as_ones_own(store, reopen):
    """A repeated request finds its own first success, which looks like another program's."""
    assert store.put_if_absent("file", b"first")
    assert store.put_if_absent("file", b"first")
    for other in (b"other", b"longer than the first", b""):
        assert not store.put_if_absent("file", other)
    for data, is_there in ((b"first", True), (b"third", False), (b"no", False)):
        with store.draft("file", 7) as draft:
            draft.stream.write(data)
            draft.finish()
            assert draft.publish_if_absent() == is_there
    assert reopen().read("file") == b"first"
    with store.draft("other") as draft:
        draft.stream.write(b"mine")
        draft.finish()
        assert draft.publish_if_absent()
    assert reopen().read("other") == b"mine"


def test_a_draft_is_nothing_until_it_is_published_whole(store, reopen):
    store.put_whole("a/file", b"old")
    with store.draft("a/file") as draft:
        draft.stream.write(b"new")
        draft.finish()
        assert (reopen().read("a/file"), bytes(draft.map())) == (b"old", b"new")
    with suppress(RuntimeError), store.draft("a/file") as draft:
        draft.stream.write(b"half")
        raise RuntimeError
    assert (reopen().list("a"), reopen().read("a/file")) == (["file"], b"old")
    with store.draft("a/file") as draft:
        draft.stream.write(b"new")
        draft.finish()
        draft.publish()
    assert (reopen().list("a"), reopen().read("a/file")) == (["file"], b"new")
    assert store.clear_drafts("a/file") == 1


def test_a_file_that_is_too_large_is_not_read(store, reopen):
    store.put_whole("file", b"four")
    assert reopen().read("file", at_most=4) == b"four"
    with pytest.raises(TooLargeError, match=r"file is 4 bytes, at most 3 can be") as refused:
        reopen().read("file", at_most=3)
    assert refused.value.size == 4


def test_ranges_are_whole_in_any_order_or_an_error(store, reopen):
    data = bytes(range(256)) * 2_000
    store.put_whole("a", data)
    store.put_whole("b", b"short")
    starts, lengths = [500_000, 0, 7, 499_990], [1_000, 5, 0, 20]
    wanted = [Ranges("a", starts, lengths), Ranges("b", [0], [5]), Ranges("a", [1], [1], len(data), "0" * 64)]
    now = reopen()
    for _ in range(2):
        found = [[bytes(part) for part in parts] for parts in now.fetch(wanted)]
        parts_of_a = [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        assert found == [parts_of_a, [b"short"], [b"\1"]]
    assert bytes(now.fetch([Ranges("b", [1], [4], version=now.stat("b"))])[0][0]) == b"hort"
    for start, length in ((0, 6), (4, 2), (9, 1)):
        with pytest.raises(OSError, match=r"cut short|416|\[Errno 61\]") as short:
            now.fetch([Ranges("b", [start], [length])])
        assert (short.value.errno, short.value.filename) == (errno.ENODATA, now.where("b"))


def test_another_version_is_told_from_the_one_that_was_opened(store, reopen):
    store.put_whole("file", b"first")
    before = reopen().stat("file")
    assert before == Version(5, before.mark, "later")
    assert str(before) == f"5:{before.mark}"
    file = reopen().open("file")
    again = file.reopen()
    store.put_whole("file", b"other bytes")
    assert reopen().stat("file") != before
    with pytest.raises(ChangedError, match=r"file was changed while it was read; restore it"):
        reopen().open("file", before).read()
    if reopen().is_remote:  # a file of this machine stays what it was, for whoever has it open
        with pytest.raises(ChangedError):
            again.read()
        with pytest.raises(ChangedError):
            file.part(0, 1)
    else:
        assert (file.part(0, 9), again.read()) == (b"first", b"first")


def test_an_open_file_is_a_stream_and_parts_for_threads(store, reopen):
    data = bytes(range(251)) * 40_000  # 10 MB
    with store.draft("file") as draft:
        draft.stream.write(data)
        draft.finish()
        draft.publish()
    with reopen().open("file") as file:
        assert (str(file), file.version.size) == (reopen().where("file"), len(data))
        assert (file.read(3), file.seek(-4, 2), file.read()) == (data[:3], len(data) - 4, data[-4:])
        with ThreadPoolExecutor(4) as pool:
            parts = [*pool.map(lambda start: file.part(start, 99_000), range(0, len(data), 100_000))]
        assert parts == [data[start : start + 99_000] for start in range(0, len(data), 100_000)]
        assert (file.part(0, len(data) + 9), file.part(len(data), 5)) == (data, b"")
        with file.reopen() as whole:
            assert whole.read() == data
        file.refuse_changed()


def test_whoever_claims_a_store_keeps_others_out_if_it_says_so(store):
    store.refuse_foreign_names(set(), "cache", "cache")
    store.put_whole("other/file", b"")
    with pytest.raises(ConfigError, match="cache: .* holds 'other' but no cache; name an empty or a new folder"):
        store.refuse_foreign_names({"plan/000000.parquet"}, "cache", "cache")
    store.refuse_foreign_names({"other"}, "cache", "cache")
    refused = pytest.raises(CacheError, match="is being written by")
    with store.claim(), refused if store.has_exclusive_claims else nullcontext(), store.claim():
        pass


def test_a_store_knows_its_place_and_is_sent_to_workers(store):
    assert store.where("a/b") == f"{store}/a/b"
    assert store.contains(store.absolute())
    assert (store.free_bytes() or 1) > 0
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 (our own)
    assert (str(copy), copy.is_remote) == (str(store), store.is_remote)


def test_a_place_lies_in_another_also_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LocalStore(Path("a"))
    assert store.absolute().where("b") == f"{tmp_path}/a/b"
    assert LocalStore(tmp_path).contains(store)
    assert not store.contains(LocalStore(tmp_path))
    assert not LocalStore(Path("/")).contains(open_store("s3://bucket"))
    assert open_store("s3://bucket/a").contains(open_store("s3://bucket/a/b"))
    assert not open_store("s3://bucket/a").contains(open_store("s3://bucket/ab"))


# A folder of this machine.


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path, make):
    store = LocalStore(tmp_path)
    make(tmp_path / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="/name"):
            use("name")


def test_a_disk_without_locks_is_told_and_written_all_the_same(tmp_path, monkeypatch, caplog):
    store = LocalStore(tmp_path)

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING, "encode_once"), store.claim(), store.claim(shared=True):
        store.put_whole("a", b"b")
    assert "without locks (Function not implemented), so nothing keeps a second writer out" in caplog.messages[0]
    assert not store.has(CLAIM_FILE)


# Addresses.


@pytest.mark.parametrize("address", ["ftp://host/cache", "s3://", "s3:/bucket/cache", "gs:///folder"])
def test_an_address_that_can_hold_no_cache_is_refused(address):
    with pytest.raises(ConfigError, match=f"^{address} .*{address[:2].replace('ft', 's3')}://"):
        open_store(address)


def test_an_object_store_is_named_by_its_url_without_a_slash():
    assert str(open_store("s3://bucket/a/cache/")) == "s3://bucket/a/cache"
    assert open_store("s3://bucket/a/cache/") == open_store("s3://bucket/a/cache") != open_store("s3://bucket/a")
    assert open_store("az://container/cache").where("seal.json") == "az://container/cache/seal.json"


def test_without_obstore_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"`pip install 'encode-once\[object-stores\]'`"):
        open_store("s3://without-obstore/cache").list()


# The Hub: caches are read and verified in place, and never written.


def test_a_cache_on_the_hub_is_read_and_verified_in_place(hub_files, capsys):
    make_cache(hub_files / "cache", np.random.default_rng(0).standard_normal((9, 2, 3, 4), np.float32))
    here, there = open_cache(hub_files / "cache"), open_cache(f"{DATA_SET}/cache")
    numbers = np.array([8, 0, 3])
    assert np.array_equal(here.read(numbers), there.read(numbers))
    assert here.samples(numbers).equals(there.samples(numbers))
    assert cache_store(["verify", f"{DATA_SET}/cache", "--level", "full"]) == 0
    assert cache_store(["copy", str(hub_files / "cache"), f"{DATA_SET}/copy"]) == 2
    assert_names(capsys.readouterr().err, f"OUT: {DATA_SET}/copy")


def test_every_write_to_the_hub_is_refused(hub_files):
    store = open_store(DATA_SET)
    for write in (store.put_whole, store.put_if_absent, lambda name, _: store.delete(name)):
        with pytest.raises(ConfigError, match=f"^{DATA_SET}/file"):
            write("file", b"")
    assert not [*hub_files.iterdir()]


def test_an_address_without_a_data_set_is_told_from_a_failing_network(hub_files):
    for name, error, said in (
        ("me", ConfigError, "hf://datasets/OWNER/NAME/"),
        ("me/pictures@", ConfigError, "hf://datasets/OWNER/NAME/"),
        ("me/others", OSError, "^((?!network).)*$"),
        ("me/portal", OSError, "network.*HF_TOKEN"),
    ):
        with pytest.raises(error, match=said) as caught:
            [*open_store(f"hf://datasets/{name}").walk()]
        assert "\n" not in str(caught.value)
