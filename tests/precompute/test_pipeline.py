"""What the pipeline holds at a time, and what its figures mean."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import precompute.pipeline as pipeline
from cache_store.metadata import read_spec
from cache_store.schema import Spec
from precompute.batches import BATCHES_AHEAD, Batch, decoded_batches, planned_batches
from precompute.cli import main
from precompute.pipeline import WRITES_BEHIND, encode_shards
from precompute.progress import BuildProgress
from precompute.sources import Source, SourceConfig, open_source
from tests.precompute.conftest import SAMPLES, config_values, write_config


class Planned(NamedTuple):
    root: Path
    spec: Spec
    source: Source


@pytest.fixture
def planned(tmp_path, source_path, vae_path) -> Planned:
    """A built cache's root, spec and source: 22 samples in batches of 1."""
    values = config_values(tmp_path / "cache", source_path, vae_path, encoder__batch_size=1)
    assert main(["build", "--config", str(write_config(tmp_path / "b.yaml", values))]) == 0
    config = SourceConfig(kind="llava", path=str(source_path / "chat.json"), images=str(source_path / "images.zip"))
    return Planned(tmp_path / "cache", read_spec(tmp_path / "cache"), open_source(config))


class CountingEncoder:
    """Gives latents of zeros, and calls `work` for each batch."""

    device = torch.device("cpu")

    def __init__(self, spec: Spec, work: Callable[[], None]) -> None:
        self.shape, self.work = spec.arrays["latents"].shape, work

    def encode(self, image_NYX3: torch.Tensor) -> torch.Tensor:
        self.work()
        return torch.zeros(len(image_NYX3), *self.shape)


def encode_all(planned: Planned, encoder: CountingEncoder, on_progress: Any) -> None:
    encode_shards(
        *planned, encoder, range(planned.spec.num_shards), {},
        decode_threads=2, stop=threading.Event(), on_progress=on_progress,
    )  # fmt: skip


def test_decoding_runs_a_few_batches_ahead_and_no_further(planned):
    """So memory does not grow with the data set, however slow the encoder is."""
    started = []

    def counted() -> Iterator[Batch]:
        for batch in planned_batches(planned.root, planned.spec, range(planned.spec.num_shards)):
            started.append(batch.shard)
            yield batch

    with ThreadPoolExecutor(2) as pool:
        batches = decoded_batches(counted(), pool, planned.source, planned.spec.arrays["latents"].image)
        for taken in range(1, 10):
            next(batches).wait()
            assert len(started) == taken + BATCHES_AHEAD


class LazyDisk:
    """A writer that does nothing before it is waited for: no disk is slower."""

    def __init__(self) -> None:
        self.owed = self.most_owed = 0

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


def test_encoding_runs_a_few_writes_ahead_of_the_disk_and_no_further(planned, monkeypatch):
    """So memory does not grow with the data set, however slow the disk is."""
    disk, owed_at_encode = LazyDisk(), []
    pools = {"decode": ThreadPoolExecutor, "write": lambda *_, **__: disk}
    monkeypatch.setattr(
        pipeline,
        "ThreadPoolExecutor",
        lambda threads, thread_name_prefix: pools[thread_name_prefix](threads, thread_name_prefix=thread_name_prefix),
    )
    encode_all(planned, CountingEncoder(planned.spec, lambda: owed_at_encode.append(disk.owed)), lambda _: None)
    assert len(owed_at_encode) == SAMPLES
    assert max(owed_at_encode) == WRITES_BEHIND
    assert disk.most_owed == WRITES_BEHIND + 1


class HeldBackSource:
    """Images that come only once the encoder waits for them, and then let its clock go on by `seconds`.

    Batches hold one image each. The main thread reads the clock once at first and three times a batch: before it waits,
    after that, and before it encodes.
    """

    def __init__(self, planned: Planned, seconds: float) -> None:
        batches = planned_batches(planned.root, planned.spec, range(planned.spec.num_shards))
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
            assert self.changed.wait_for(lambda: self.readings >= 3 * self.batch_of[uri] + 2, timeout=60)
            self.now += self.seconds
        return self.source.read(uri)

    def fingerprint(self, uri: str) -> str:
        return self.source.fingerprint(uri)


@pytest.mark.parametrize("seconds", [0.0, 10.0, 90.0])
def test_the_share_of_time_that_the_encoder_waits_is_that_in_which_images_are_held_back(
    planned, monkeypatch, capsys, seconds
):
    """Each image is held back for so long, and each batch is encoded for 30 s."""
    source = HeldBackSource(planned, seconds)
    monkeypatch.setattr(pipeline, "time", source)

    def work() -> None:
        source.now += 30.0

    with BuildProgress(SAMPLES, [], max_reject_fraction=1.0) as progress:
        encode_all(planned._replace(source=source), CountingEncoder(planned.spec, work), progress)
    # The first batch's time begins when its image is asked for, not with the encoding of one before it.
    waited, worked = SAMPLES * seconds, (SAMPLES - 1) * 30.0
    assert progress.waiting_share == pytest.approx(waited / (waited + worked))
    assert f"encoder waits {progress.waiting_share:.0%}" in capsys.readouterr().err
