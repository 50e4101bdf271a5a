"""The batches that the encoder gets, the memory that the pipeline holds, and the meaning of its figures."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import precompute.encode.device_feed as device_feed
import precompute.encode.pipeline as pipeline
from cache_store.cache.metadata import read_spec
from cache_store.cache.writer import ShardBuilder
from cache_store.format.schema import CommitRecord
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig
from precompute.encode.batches import Batch, Decoders, decoded_batches, make_buffer, planned_batches
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import WRITES_BEHIND, encode_shards
from precompute.encode.progress import ADVISED_S, BuildProgress
from precompute.inputs import make_reader
from precompute.sources.images import Source
from precompute.sources.opening import open_source
from tests.precompute.acts import rewrite
from tests.precompute.conftest import BROKEN, GOOD, SAMPLES, image_bytes, run_build, write_source
from tests.precompute.images.fitting import decoded, fitted
from tests.precompute.images.hostile_images import png, save


class Planned(NamedTuple):
    job: EncodeJob
    source: Source

    def batches(self) -> Iterator[Batch]:
        reader = make_reader(self.source, self.job.spec.array)
        return planned_batches(reader, self.job.store, self.job.spec, range(3), make_buffer)

    def encode(self, work: Callable[[], object], on_progress: Callable[[Progress], object]) -> None:
        """Encode every shard with an encoder that calls `work` for each batch and gives zeros."""
        shape = self.job.spec.arrays[0].shape

        def encode(pixels_NTYX3: torch.Tensor) -> torch.Tensor:
            work()
            return torch.zeros(len(pixels_NTYX3), *shape)

        encoder: Any = SimpleNamespace(device=torch.device("cpu"), encode=encode, texts=None)
        encode_shards(self.job, self.source, encoder, [range(3)], decode_threads=2, on_progress=on_progress)


@pytest.fixture(scope="module")
def built_by_ones(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A cache of 22 samples in shards of 8 and batches of 1."""
    folder = tmp_path_factory.mktemp("built")
    return run_build(folder, write_source(folder / "source"), vae_path, encoder__batch_size=1)


@pytest.fixture
def planned(built_by_ones: Path, tmp_path: Path) -> Planned:
    """The job and source of a copy of that cache."""
    cache = shutil.copytree(built_by_ones, tmp_path / "cache")
    config = BuildConfig.of_cache(cache)
    return Planned(EncodeJob(config=config, store=LocalStore(cache), spec=read_spec(cache)), open_source(config.source))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock of the pipeline and its device; a test sets its `now`."""
    clock = SimpleNamespace(now=0.0)
    for module in (pipeline, device_feed):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


REJECTED = {
    0: b"",
    4: b"no image",
    7: png(20_000, 20_000, data=b""),
    13: image_bytes(13)[:-200],
    20: save(Image.new("F", (50, 40), 0.5), "TIFF"),
}
"""Numbers of samples, and bytes that are no image, too large, cut after some rows, or of no agreed range."""


def test_a_rejected_image_is_grey_in_its_batch(project, encoding):
    """So the bits of its neighbours do not change. This looks at the pixels that enter the encoder."""
    encoded = list[np.ndarray]()
    encoding(lambda encode, image: encoded.append(image.numpy().copy()) or encode(image))
    project.has(**{f"sample_{number:03d}": data for number, data in REJECTED.items()})
    rewrite(project.source / "chat.json", '"sample-016.png"', '"nowhere.png"')
    project.build(run__max_reject_fraction=0.5, image__flip=True)
    assert [len(batch) for batch in encoded] == [3, 3, 2, 3, 3, 2, 3, 3]  # of shards of 8, 8 and 6
    recipe = read_spec(project.cache).array.images
    for number, pixels_TYX3 in enumerate(np.concatenate(encoded)):
        expected = np.full((32, 40, 3), 128)
        if number not in (*REJECTED, 16):
            expected = np.asarray(fitted(decoded(image_bytes(number), recipe), recipe))
        np.testing.assert_array_equal(pixels_TYX3, expected[None], f"sample {number}")


def test_the_small_image_is_the_mean_of_a_latents_cells(planned):
    """The preview is fitted to these values, of sound images."""
    with Decoders(2) as pool:
        batches = [batch.decode(pool) for batch in planned.batches()]
    for number, batch in enumerate(batches):
        count, latent_height, latent_width, _ = batch.rgb_Nhw3.shape
        cells = batch.inputs.reshape(count, latent_height, 8, latent_width, 8, 3)
        expected = np.zeros(batch.rgb_Nhw3.shape) if number in BROKEN else cells.mean(axis=(2, 4))
        np.testing.assert_allclose(batch.rgb_Nhw3, expected, atol=0.5)


def test_decoding_runs_a_few_batches_ahead_and_no_further(planned):
    """So memory does not grow with the data set, however slow the encoder is."""
    started = []

    def counted() -> Iterator[Batch]:
        for batch in planned.batches():
            started.append(batch.shard)
            yield batch

    with Decoders(2) as pool:
        batches, ahead = decoded_batches(counted(), pool), pool.batches_ahead(planned.job.spec)
        for taken in range(1, 10):
            next(batches).wait()
            assert len(started) == taken + ahead


class LazyDisk:
    """A writer that writes only when it is waited for, as the slowest disk."""

    def __init__(self) -> None:
        self.owed = self.most_owed = 0

    def submit(self, write: Callable[..., None], *arguments: Any) -> "Future[None]":
        self.owed += 1
        self.most_owed = max(self.most_owed, self.owed)
        owed: Future[None] = Future()
        owed.result = cache(partial(self._write, write, *arguments))  # type: ignore[method-assign]
        return owed

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        self.owed -= 1
        write(*arguments)

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert self.owed == 0


def test_encoding_runs_a_few_writes_ahead_and_no_further(planned, clock, monkeypatch):
    """So memory does not grow with the data set, however slow the disk is; a shard's seconds end with its last write.

    A batch, of one image, takes 30 s, one of a rejected image none; with two writes behind, a shard is committed two
    batches later, while the next one is encoded.
    """
    disk, owed, done = LazyDisk(), list[int](), list[CommitRecord]()

    def pool(threads: int, thread_name_prefix: str) -> Any:
        return disk if thread_name_prefix == "write" else ThreadPoolExecutor(threads)

    monkeypatch.setattr(pipeline, "ThreadPoolExecutor", pool)

    def work() -> None:
        owed.append(disk.owed)
        clock.now += 30.0

    planned.encode(work, lambda progress: done.extend([progress.committed] if progress.committed else []))
    assert (len(owed), max(owed), disk.most_owed) == (len(GOOD), WRITES_BEHIND, WRITES_BEHIND + 1)
    assert [record.run.seconds for record in done] == [9 * 30.0, 9 * 30.0, 6 * 30.0]


def test_after_a_failed_write_there_is_no_other(planned, monkeypatch):
    """Batches that are queued already must not be added to an incomplete shard."""
    calls, begun, queued = list[Any](), list[Progress](), threading.Event()

    def fill_the_disk(builder: ShardBuilder, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            assert queued.wait(10), "other writes wait behind this one"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_progress(progress: Progress) -> None:
        begun.append(progress)
        if len(begun) == 4:
            queued.set()

    monkeypatch.setattr(ShardBuilder, "append", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        planned.encode(lambda: None, on_progress)
    assert len(calls) == 2


def test_the_encoders_working_share_leaves_out_the_time_it_waits(planned, clock, monkeypatch):
    """Each image arrives 10 s after the encoder first waits for it; a sound one is encoded for 30 s."""
    wait, waited_for = Batch.wait, set[Batch]()

    def held_back(batch: Batch) -> Any:
        clock.now += 0.0 if batch in waited_for else 10.0
        waited_for.add(batch)
        return wait(batch)

    def work() -> None:
        clock.now += 30.0

    monkeypatch.setattr(Batch, "wait", held_back)
    with closing(BuildProgress(SAMPLES, [], max_reject_fraction=1.0)) as progress:
        planned.encode(work, progress)
    waited, worked = SAMPLES * 10.0, len(GOOD) * 30.0
    assert progress.working_share == pytest.approx(worked / (waited + worked))
    encoded = progress.encoded
    assert encoded.slowest == "encoding", "no decode thread was busy while images were held back"
    assert "a GPU helps" not in str(encoded), "a short build gets no advice"
    assert "; encoding was slowest: a GPU helps" in str(replace(encoded, images_per_s=encoded.images / ADVISED_S))


def test_a_build_that_is_not_alone_says_so_once(planned, caplog):
    """As in a bucket, where no lock keeps a second build out; ranks expect each other."""
    committed: list[Progress] = []
    planned.encode(lambda: None, committed.append)
    for shared, told in ((False, 1), (True, 0)):
        with closing(BuildProgress(SAMPLES, [], max_reject_fraction=1.0, shared=shared)) as progress:
            for each in committed:
                progress(replace(each, is_others=True))
        assert caplog.text.count("another build of this cache seems to run") == told
        caplog.clear()
