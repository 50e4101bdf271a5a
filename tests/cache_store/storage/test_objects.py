"""An `ObjectStore` before a real server: drafts, who is first, what is said of what is refused, forks, copies."""

import copy
import errno
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.survey import survey_records
from cache_store.cli import main as cache_store
from cache_store.errors import CacheError
from cache_store.storage import kept as kept_blocks
from cache_store.storage.kept import KeptBlocks
from cache_store.storage.local import LocalStore
from cache_store.storage.object_errors import explain, has_status
from cache_store.storage.store import open_store
from cache_store.storage.verbs import Ranges
from cache_store.verify.verify import clear_leftovers, verify
from tests.full_disk import mounted_disk
from tests.make_cache import make_cache
from tests.object_stores.server import EVERY_STORE, environment
from tests.places import Folder

ROWS = 30


@pytest.fixture
def store(bucket):
    return open_store(f"{bucket}/a/cache")


@EVERY_STORE
def test_a_file_is_one_request_and_drafts_leave_nothing(store, proxy, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store.put_whole("zarr.json", b"spec")
    with store.draft("latents/c/0/0/0/0") as draft:
        draft.stream.write(b"samples")
        draft.finish()
        draft.publish()
    assert bytes(store.map("latents/c/0/0/0/0")) == b"samples"
    for name, found in (("zarr.json", b"spec"), ("none", None)):
        proxy.mend()
        with suppress(FileNotFoundError):
            assert store.read(name) == found
        assert len(proxy.requests) == 1
    assert not [*tmp_path.iterdir()]


def test_a_draft_is_refused_by_the_disk_of_temporary_files(bucket, monkeypatch, tmp_path):
    """Not by the store, as which it would be named: a shard's writer has only the file's name there."""
    store = open_store(bucket)
    with mounted_disk(tmp_path / "scratch", "64k") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        with suppress(OSError), store.draft("latents/c/0") as draft:
            with pytest.raises(OSError, match="No space left on device") as refused, draft.writing() as stream:
                stream.write(bytes(2**23))
            assert refused.value.filename == f"{disk} (TMPDIR names another folder)"


@EVERY_STORE
def test_large_files_are_put_in_parts_also_by_a_busy_store(store, proxy, impatient, monkeypatch):
    monkeypatch.setattr("cache_store.storage.objects.MULTIPART_BYTES", 6 << 20)
    monkeypatch.setattr("cache_store.storage.objects.COPIED_BYTES", 5 << 20)
    data = np.random.default_rng(0).bytes(11 << 20)
    proxy.fail("503", "PUT", "large?", times=4)
    with store.draft("large") as draft:
        draft.stream.write(data)
        draft.finish()
        draft.publish()
    with store.open("large") as stream:
        assert stream.read() == data


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("NoSuchBucket", 404, "there is no bucket"),
        ("ExpiredToken", 400, "the token has expired"),
        ("InvalidAccessKeyId", 403, "refuses these credentials"),
        ("PermanentRedirect", 301, "another region"),
        ("SlowDown", 503, "also when asked again"),
    ],
)
def test_what_a_store_refuses_is_one_line_with_what_to_check(code, status, said):
    from obstore.exceptions import GenericError

    answer = f"Generic S3 error: status code: {status} Some Words: <Error><Code>{code}</Code></Error>\nDebug source:"
    refused = explain(GenericError(answer), "s3://bucket/cache/seal.json")
    assert said in str(refused)
    assert refused.filename == "s3://bucket/cache/seal.json"
    assert "\n" not in str(refused)
    assert refused.errno != errno.ENOENT  # which would say that there is no such file


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's names of open files")
def test_what_is_not_uploaded_yet_goes_with_its_process(store, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with store.draft("latents/c/0/0/0/0") as draft:
        draft.stream.write(b"samples")
        assert list(tmp_path.iterdir()) == []
        draft.finish()
        assert draft.publish_if_absent()
    assert store.read("latents/c/0/0/0/0") == b"samples"


def test_what_no_store_takes_in_one_request_is_refused_before_it_is_sent(store, proxy, monkeypatch):
    monkeypatch.setattr("cache_store.storage.objects.MOST_CREATED_BYTES", 3)
    assert store.put_if_absent("small", b"abc")
    before = len(proxy.requests)
    with pytest.raises(OSError, match="4 bytes exceed an object store's limit per request; lower samples_per_shard"):
        store.put_if_absent("large", b"abcd")
    assert len(proxy.requests) == before


def test_a_deletion_that_azure_refuses_is_no_silence():
    """As a SAS token without the right to delete is answered: once for all that was to be deleted."""
    from obstore.exceptions import GenericError

    said = "Generic MicrosoftAzure error: Bulk delete request failed for key cache/seal.json: "
    error = GenericError(f"{said}This request is not authorized to perform this operation. (code: 403)\nDebug source:")
    assert has_status(error)
    assert "refuses these credentials (403): check AZURE_" in str(explain(error, "az://container/cache/seal.json"))


def test_a_wrong_bucket_is_an_error_and_no_absent_cache(bucket, capsys):
    assert cache_store(["info", f"{bucket}-not/cache"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("cache-store: error: there is no bucket")
    assert said.count("\n") == 1


@pytest.fixture
def copied(bucket, tmp_path):
    """A cache, and its copy in the bucket."""
    latents = np.random.default_rng(7).standard_normal((ROWS, 4, 6, 5)).astype(np.float16).astype(np.float32)
    cache = make_cache(tmp_path / "cache", latents, rejected=(3, 9, 29))
    assert cache_store(["copy", str(cache), f"{bucket}/copy"]) == 0
    return cache, f"{bucket}/copy"


def test_more_samples_than_are_asked_for_at_once_are_read(copied):
    cache, url = copied
    here, there = open_cache(cache), open_cache(url)
    numbers = np.random.default_rng(0).permutation(len(here)).repeat(12)
    assert np.array_equal(here.read(numbers), there.read(numbers))
    assert here.samples(numbers).equals(there.samples(numbers))


@EVERY_STORE
def test_a_shard_that_lost_what_it_had_is_no_cut_answer(copied, server, tmp_path):
    """Gone, emptied, or cut in its third sample; also where blocks are kept."""
    from tests.object_stores.objects import Objects

    objects, shard = Objects(copied[1], server.endpoint), "latents/c/1/0/0/0"
    data = objects.read(shard)
    for length, problem in ((None, "is missing"), (0, "is 0 bytes, expected {}"), (700, "is 700 bytes, expected {}")):
        there = [open_cache(copied[1]), open_cache(copied[1], cache_dir=tmp_path / "kept")]
        objects.lose(shard) if length is None else objects.put(shard, data[:length])
        for cache, numbers in itertools.product(there, ([*range(27)], [9], [13])):
            with pytest.raises(CacheError) as caught:
                cache.read(numbers)
            said = f"{copied[1]}/{shard} {problem.format(len(data))}; run `cache-store verify {copied[1]}`"
            assert str(caught.value) == said


def test_a_copy_refuses_another_cache_and_damage(copied, tmp_path, capsys):
    cache, url = copied
    other = make_cache(tmp_path / "other", np.zeros((ROWS, 4, 6, 5), np.float32))
    assert cache_store(["copy", str(other), url]) == 1
    assert "holds another cache" in capsys.readouterr().err
    assert cache_store(["copy", str(other), f"{url}/in/side"]) == 2
    assert f"OUT: {url}/in/side lies inside the cache {url}; name a place" in capsys.readouterr().err
    source = LocalStore(cache)
    source.put_whole("latents/c/1/0/0/0", bytes(source.size("latents/c/1/0/0/0")))
    assert cache_store(["copy", str(cache), f"{url}-of-damage"]) == 1
    assert "is damaged: its sha256 is not as recorded" in capsys.readouterr().err


def test_a_forked_process_reads_as_its_parent_does(copied):
    cache = open_cache(copied[1])
    expected = cache.read(np.arange(len(cache)))
    queue = multiprocessing.get_context("fork").SimpleQueue()

    def read() -> None:
        try:
            replace(cache.store).read("no such file")
        except FileNotFoundError:
            queue.put(cache.read(np.arange(len(cache))))

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    assert np.array_equal(queue.get(), expected)
    process.join()


def test_what_is_kept_is_bounded_and_fetched_again_if_damaged(copied, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr("cache_store.cache.reader.LEAST_BYTES", 1)
    monkeypatch.setattr("cache_store.storage.kept.BLOCK_BYTES", 1_000)  # samples of 240 bytes straddle two
    cache, kept = open_cache(copied[0]), tmp_path / "kept"
    numbers = np.arange(len(cache))

    def requests() -> int:
        before = len(proxy.requests)
        assert np.array_equal(there.read(numbers), cache.read(numbers))
        return len(proxy.requests) - before

    there = open_cache(copied[1], cache_dir=kept)
    assert requests() > 0
    assert requests() == 0
    there = copy.copy(there)  # opened anew, as in another process
    blocks = sorted(path for path in kept.rglob("*") if path.is_file())
    blocks[1].write_bytes(bytes(len(blocks[1].read_bytes())))
    blocks[2].write_bytes(b"")
    assert requests() == 2 * 4 + 2  # a record and a table of each shard
    assert requests() == 0
    there = open_cache(copied[1], cache_dir=kept, cache_bytes=3_000)
    requests()
    blocks[0].unlink(missing_ok=True)
    requests()
    assert sum(path.stat().st_size for path in kept.rglob("*") if path.is_file()) <= 3_000


def test_a_bound_holds_while_it_is_passed_and_for_blocks_alone(tmp_path, monkeypatch):
    """In a folder that others use, and in one read of more than the bound."""
    monkeypatch.setattr(kept_blocks, "BLOCK_BYTES", 1_000)
    others = [tmp_path / name for name in ("ab/model.bin", "runs/old/weights.bin", f"{'a' * 64}.0x1000", "notes.txt")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9_000))
        os.utime(path, (0, 0))
    blocks, held = KeptBlocks(tmp_path, 20_000), list[int]()

    def keep(self: KeptBlocks, *block: Any) -> None:
        keep_one(self, *block)
        held.append(sum(path.stat().st_size for path in tmp_path.glob("*/*.*x1000")))

    keep_one = KeptBlocks._keep
    monkeypatch.setattr(KeptBlocks, "_keep", keep)
    wanted = [Ranges(name, [0], [30_000], 30_000, name * 64) for name in "ab"]
    fetched = lambda asked: [[memoryview(bytes(each.lengths[0]))] for each in asked]  # noqa: E731
    assert [bytes(part) for (part,) in blocks.fetch(wanted, fetched)] == [bytes(30_000)] * 2
    assert len(held) == 60
    assert max(held) <= 20_000 * 1.02 + 1_004
    assert all(path.stat().st_size == 9_000 for path in others)


@contextmanager
def full_disk():
    """No file may have more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder):
    """To others than root."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)


def flip(data):
    return data[:9] + bytes([data[9] ^ 1]) + data[10:]


HARM = {"flipped": flip, "cut": lambda data: data[:-5], "emptied": lambda data: b"", "zeros": lambda data: bytes(4)}


@pytest.mark.parametrize("harm", [*HARM, "a folder", "gone", "read-only", "full disk", "no folder"])
def test_what_happens_to_kept_blocks_changes_nothing_read(copied, tmp_path, caplog, harm):
    expected, kept = open_cache(copied[0]).read(np.arange(27)), tmp_path / "kept"

    def read() -> str:
        assert np.array_equal(open_cache(copied[1], cache_dir=kept).read(np.arange(27)), expected)
        return "".join(caplog.messages)

    assert read() == ""
    blocks = [path for path in kept.rglob("*") if path.is_file()]
    assert blocks
    for block in blocks if harm != "read-only" else ():
        data = block.read_bytes()
        block.unlink()
        if harm in HARM:
            block.write_bytes(HARM[harm](data))
        if harm == "a folder":
            block.mkdir()
    if harm == "no folder":
        shutil.rmtree(kept)
        kept.write_bytes(b"")
    with {"read-only": lambda: read_only(kept), "full disk": full_disk}.get(harm, nullcontext)():
        said = read()
    assert said.startswith("nothing more is kept, ") == (harm in ("a folder", "full disk", "no folder"))
    assert not [*tmp_path.rglob("*.partial")]


def test_readers_at_once_share_what_is_kept_and_may_be_killed(copied, tmp_path, monkeypatch):
    """Of less room than all of it takes, so that each deletes what another needs."""
    cache, kept = open_cache(copied[0]), tmp_path / "kept"
    monkeypatch.setattr("cache_store.cache.reader.LEAST_BYTES", 1)
    code = "import sys; from cache_store.cache import reader; reader.LEAST_BYTES = 1\n"
    code += "cache = reader.open_cache(sys.argv[1], cache_dir=sys.argv[2], cache_bytes=3000)\n"
    code += "while True: cache.read(range(27))"
    other = subprocess.Popen([sys.executable, "-c", code, copied[1], str(kept)])
    there, numbers = open_cache(copied[1], cache_dir=kept, cache_bytes=3_000), np.arange(27)
    while not [*kept.rglob("*x131072")]:
        assert other.poll() is None
        time.sleep(0.01)
    for _ in range(20):
        assert np.array_equal(there.read(numbers), cache.read(numbers))
    other.kill()
    assert other.wait() == -signal.SIGKILL
    for block in [*kept.rglob("*x131072")]:
        block.with_name(f".{block.name}.7.partial").write_bytes(block.read_bytes()[:500])  # as a kill may leave
    assert np.array_equal(there.read(numbers), cache.read(numbers))


def test_another_server_takes_a_build(scene, witness, run, monkeypatch):
    """Moto's idea of S3."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    from tests.object_stores.objects import Objects

    for name, value in environment(witness.endpoint).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{witness.new_bucket()}/cache"
    run(f"precompute build --config {scene}/build.yaml --cache {url}")
    assert Objects(url, witness.endpoint).timeless() == Folder(scene / "cache").timeless()
    run(f"cache-store verify {url} --level full")


SHARDS = 40


def test_what_looks_at_all_shards_asks_once_for_each_record(bucket, proxy, tmp_path, capsys):
    latents = np.zeros((SHARDS, 4, 2, 2), np.float32)
    cache = make_cache(tmp_path / "cache", latents, rejected=[*range(0, SHARDS, 2)], samples_per_shard=2)
    url, shards = f"{bucket}/many", SHARDS // 2

    def requests(action) -> int:
        proxy.mend()
        action()
        return len(proxy.requests)

    looks = {
        "survey": lambda: survey_records(url),
        "verify": lambda: verify(url),
        "info": lambda: cache_store(["info", url]),
        "leftovers": lambda: clear_leftovers(open_store(url), survey_records(url).spec.value),
    }
    assert requests(lambda: cache_store(["copy", str(cache), url])) <= 12 * shards + 20
    assert {name: count for name, look in looks.items() if (count := requests(look)) > shards + 20} == {}
    opened = open_cache(url)
    assert requests(opened.rejected_rows) == 2 * shards  # a record and a table each
    assert np.array_equal(opened.rejected_rows(), np.arange(0, SHARDS, 2))
    assert requests(lambda: open_cache(url)) <= 6
