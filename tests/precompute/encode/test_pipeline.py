"""What the encoder is given, what the pipeline holds at a time, and what its figures mean."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import precompute.encode.pipeline as pipeline
from cache_store.cache.metadata import read_spec
from cache_store.cache.writer import ShardBuilder
from cache_store.format.schema import CommitRecord, Spec
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig
from precompute.encode.batches import BATCHES_AHEAD, Batch, decoded_batches, planned_batches
from precompute.encode.job import EncodeJob
from precompute.encode.pipeline import WRITES_BEHIND, Progress, ShardSink, encode_shards
from precompute.encode.progress import BuildProgress
from precompute.images.decode import MID_GREY, decode_image, fit_image, to_pixels
from precompute.sources import Source, open_source
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes
from tests.precompute.images.hostile_images import png, save


class Planned(NamedTuple):
    root: Path
    spec: Spec
    source: Source

    @property
    def job(self) -> EncodeJob:
        return EncodeJob(config=BuildConfig.of_cache(self.root), store=LocalStore(self.root), spec=self.spec)

    def batches(self, shards: Sequence[int] = range(3)) -> Iterator[Batch]:
        return planned_batches(self.job.store, self.spec, shards)


@pytest.fixture
def planned(project: Project) -> Planned:
    """A built cache's root, spec and source: 22 samples in batches of 1."""
    project.build(encoder__batch_size=1)
    return Planned(project.cache, read_spec(project.cache), open_source(BuildConfig.of_cache(project.cache).source))


FAILURES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "no image": b"no image",
    "too large": png(20_000, 20_000, data=b""),
    "cut after some rows": image_bytes(4)[:-200],
    "floating-point pixels": save(Image.new("F", (50, 40), 0.5), "TIFF"),
}
"""A sample's image, whose place in its batch is the fifth of the cache."""


@pytest.fixture
def encoded(encoding: Any) -> list[np.ndarray]:
    """The batches that the encoder is given, which encodes them all the same."""
    batches: list[np.ndarray] = []
    encoding(lambda encode, image: batches.append(image.numpy().copy()) or encode(image))
    return batches


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rejected_image_is_grey_in_its_batch(project, encoded, failure):
    """So its neighbours do not move where a batch is encoded at once; here it is not, so its pixels are looked at."""
    project.has(sample_004=FAILURES[failure] or b"")
    if FAILURES[failure] is None:
        chat = project.source / "chat.json"
        chat.write_text(chat.read_text().replace('"sample-004.png"', '"nowhere.png"'))
    project.build()
    assert [len(batch) for batch in encoded] == [3, 3, 2, 3, 3, 2, 3, 3]  # of shards of 8, 8 and 6
    recipe = read_spec(project.cache).array.image
    for number, pixels_YX3 in enumerate(np.concatenate(encoded)):
        expected = np.full((32, 40, 3), 128)
        if number not in BROKEN:
            expected = to_pixels(fit_image(decode_image(image_bytes(number), recipe.max_pixels), recipe))
        np.testing.assert_array_equal(pixels_YX3, expected)


class CountingEncoder:
    """Gives latents of zeros, and calls `work` for each batch."""

    device = torch.device("cpu")

    def __init__(self, spec: Spec, work: Callable[[], None]) -> None:
        self.shape, self.work = spec.array.shape, work

    def encode(self, image_NYX3: torch.Tensor) -> torch.Tensor:
        self.work()
        return torch.zeros(len(image_NYX3), *self.shape)


def encode_all(planned: Planned, encoder: CountingEncoder, on_progress: Any) -> None:
    encode_shards(
        planned.job, planned.source, encoder, range(planned.spec.num_shards),
        decode_threads=2, stop=threading.Event(), on_progress=on_progress,
    )  # fmt: skip


def test_decoding_runs_a_few_batches_ahead_and_no_further(planned):
    """So memory does not grow with the data set, however slow the encoder is."""
    started = []

    def counted() -> Iterator[Batch]:
        for batch in planned.batches():
            started.append(batch.shard)
            yield batch

    with ThreadPoolExecutor(2) as pool:
        batches = decoded_batches(counted(), pool, planned.source, planned.spec.array.image)
        for taken in range(1, 10):
            next(batches).wait()
            assert len(started) == taken + BATCHES_AHEAD


class LazyDisk:
    """A writer that does nothing before it is waited for: no disk is slower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of the pipeline's own writer."""
        self.owed = self.most_owed = 0
        pools = {"decode": ThreadPoolExecutor, "write": lambda count: self}
        monkeypatch.setattr(
            pipeline, "ThreadPoolExecutor", lambda threads, thread_name_prefix: pools[thread_name_prefix](threads)
        )

    def submit(self, write: Callable[..., None], *arguments: Any) -> "Future[None]":
        self.owed += 1
        self.most_owed = max(self.most_owed, self.owed)
        owed: Future[None] = Future()
        owed.result = partial(self._write, write, *arguments)  # type: ignore[method-assign]
        return owed

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        self.owed -= 1
        write(*arguments)

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert self.owed == 0


def test_encoding_runs_a_few_writes_ahead_and_no_further(planned, monkeypatch):
    """So memory does not grow with the data set, however slow the disk is."""
    disk, owed_at_encode = LazyDisk(monkeypatch), list[int]()
    encode_all(planned, CountingEncoder(planned.spec, lambda: owed_at_encode.append(disk.owed)), lambda _: None)
    assert len(owed_at_encode) == SAMPLES
    assert max(owed_at_encode) == WRITES_BEHIND
    assert disk.most_owed == WRITES_BEHIND + 1


def test_the_small_image_is_the_mean_of_a_latents_cells(planned):
    """The preview is fitted to these; of a rejected image they are grey."""
    batches = list(planned.batches())
    with ThreadPoolExecutor(1) as pool:
        for number, batch in enumerate(batches):
            is_rejected = batch.decode(pool, planned.source, planned.spec.array.image).wait()[0].reason is not None
            assert is_rejected == (number in BROKEN)
            assert (set(batch.rgb_Nhw3.flat) == {MID_GREY}) == is_rejected
            count, latent_height, latent_width, _ = batch.rgb_Nhw3.shape
            cells = batch.pixels_NYX3.reshape(count, latent_height, 8, latent_width, 8, 3)
            np.testing.assert_allclose(batch.rgb_Nhw3, cells.mean(axis=(2, 4)), atol=0.5)


def test_after_a_failed_write_no_more_of_the_shard_is_written(planned, monkeypatch):
    """Batches that were queued behind it find a shard with a hole."""
    done: list[Progress] = []
    sink = ShardSink(planned.job, "cpu", done.append)
    batches = list(planned.batches([0]))
    latent_NCHW = torch.zeros(1, *planned.spec.array.shape)
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            batch.decode(pool, planned.source, planned.spec.array.image)
    sink.write(batches[0], latent_NCHW)
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(ShardBuilder, "append", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        sink.write(batches[1], latent_NCHW)
    for batch in batches[2:]:
        sink.write(batch, latent_NCHW)
    sink.close()
    assert not done


def test_a_shards_seconds_count_from_its_first_batch(planned, monkeypatch):
    """Batches of one image take 30 s each; with two writes behind, a shard is committed two batches later."""
    clock, done = SimpleNamespace(now=0.0), list[CommitRecord]()
    LazyDisk(monkeypatch)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def work() -> None:
        clock.now += 30.0

    def on_progress(progress: Progress) -> None:
        done.extend([progress.committed] if progress.committed else [])

    encode_all(planned, CountingEncoder(planned.spec, work), on_progress)
    assert [record.run.seconds for record in done] == [10 * 30.0, 10 * 30.0, 6 * 30.0]


class HeldBackSource:
    """Images that come only once the encoder waits for them, and then let its clock go on by `seconds`.

    Batches hold one image each. The main thread reads the clock once at first and three times a batch: before it waits,
    after that, and before it encodes.
    """

    def __init__(self, planned: Planned, seconds: float) -> None:
        batches = planned.batches()
        self.batch_of = {batch.planned["uri"][batch.start].as_py(): number for number, batch in enumerate(batches)}
        self.source, self.seconds = planned.source, seconds
        self.now, self.readings = 0.0, 0
        self.changed = threading.Condition()

    def monotonic(self) -> float:
        with self.changed:
            self.readings += threading.current_thread() is threading.main_thread()
            self.changed.notify_all()
            return self.now

    def read(self, uri: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: self.readings >= 3 * self.batch_of[uri] + 2, timeout=300)
            self.now += self.seconds
        return self.source.read(uri)

    def fingerprint(self, uri: str) -> str:
        return self.source.fingerprint(uri)


@pytest.mark.parametrize("seconds", [0.0, 10.0, 90.0])
def test_the_waiting_share_is_that_in_which_images_are_held_back(planned, monkeypatch, capsys, seconds):
    """Each image is held back for so long, and each batch is encoded for 30 s."""
    source = HeldBackSource(planned, seconds)
    monkeypatch.setattr(pipeline, "time", source)

    def work() -> None:
        source.now += 30.0

    with closing(BuildProgress(SAMPLES, [], max_reject_fraction=1.0)) as progress:
        encode_all(planned._replace(source=source), CountingEncoder(planned.spec, work), progress)
    # The first batch's time begins when its image is asked for, not with the encoding of one before it.
    waited, worked = SAMPLES * seconds, (SAMPLES - 1) * 30.0
    assert progress.waiting_share == pytest.approx(waited / (waited + worked))
    assert f"encoder waits {progress.waiting_share:.0%}" in capsys.readouterr().err
