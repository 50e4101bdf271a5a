"""Building one shard: samples stream in, files stream out, the commit record comes last.

Samples are written as they come, so a shard of any size takes the memory of one batch.
"""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.codec import encode_sample
from cache_store.formats import Location, shard_format
from cache_store.metadata import write_commit
from cache_store.plan import plan_digest
from cache_store.publish import clear_scratch, file_sha256, publish, withdraw
from cache_store.record import FORMAT_VERSION, signed
from cache_store.schema import (
    CACHED,
    REJECTED,
    SAMPLES_SCHEMA,
    CommitContent,
    CommitRecord,
    CommitRun,
    FileRecord,
    Spec,
    commit_file,
    reason_kind,
    rows_digest,
    samples_file,
)
from cache_store.statistics import RunningStatistics


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one planned sample on its way to a latent; a reason means that it is rejected."""

    content_sha256: str | None
    width: int | None
    height: int | None
    reason: str | None


class ShardBuilder:
    """A context manager: append every row of the shard in order, then commit; leaving it uncommitted undoes it.

    `planned` is the shard's row group of the plan.
    """

    def __init__(self, root: Path, spec: Spec, array: str, shard: int, planned: pa.Table) -> None:
        self._root, self._spec, self._array, self._shard, self._planned = root, spec, array, shard, planned
        self._format = shard_format(spec)
        self._shard_path = root / self._format.shard_file(array, shard)
        self._outcomes: list[Outcome] = []
        self._locations: list[Location | None] = []
        self._statistics = RunningStatistics()
        self._non_finite = 0
        self._files = ExitStack()

    def __enter__(self) -> Self:
        withdraw(self._root / commit_file(self._array, self._shard))  # it vouches for the files that are replaced now
        self.attempt = clear_scratch(self._shard_path)
        clear_scratch(self._root / samples_file(self._shard))
        stream = self._files.enter_context(publish(self._shard_path, self.attempt))
        self._writer = self._format.writer(stream, self._spec, self._array, self._planned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind or UncommittedError, error or UncommittedError(), trace)

    def append(self, latent_NCHW: np.ndarray, rgb_NHW3: np.ndarray, outcomes: Sequence[Outcome]) -> None:
        """Add the next rows: float32 latents, images at latent resolution (RGB in [0, 1]), what became of each."""
        array = self._spec.arrays[self._array]
        with np.errstate(over="ignore"):  # an overflow shows as infinity and rejects its sample below
            stored = np.ascontiguousarray(latent_NCHW.astype(array.numpy_dtype))
        outcomes = [self._judge(*each) for each in zip(latent_NCHW, stored, outcomes, strict=True)]
        keep = np.array([outcome.reason is None for outcome in outcomes])
        for values, outcome, kept in zip(stored, outcomes, keep, strict=True):
            payload = encode_sample(values, array.codec) if kept else None
            self._locations.append(self._writer.append(payload, outcome.content_sha256))
        self._statistics.add(stored[keep], rgb_NHW3[keep])
        self._outcomes.extend(outcomes)

    def _judge(self, latent_CHW: np.ndarray, stored_CHW: np.ndarray, outcome: Outcome) -> Outcome:
        """Reject what is not finite, before or after rounding to the stored dtype."""
        if outcome.reason is not None or np.isfinite(stored_CHW).all():
            return outcome
        non_finite = int(np.count_nonzero(~np.isfinite(latent_CHW)))
        self._non_finite += non_finite
        dtype = self._spec.arrays[self._array].dtype
        reason = (
            f"latent not finite: {non_finite} values"
            if non_finite
            else f"latent overflows {dtype}: largest magnitude {np.abs(latent_CHW).max():.6g}"
        )
        return Outcome(content_sha256=outcome.content_sha256, width=outcome.width, height=outcome.height, reason=reason)

    def commit(self, seconds: float, device: str, versions: dict[str, str]) -> CommitRecord:
        """Publish the shard's files, then its record."""
        count = self._planned.num_rows
        assert len(self._outcomes) == count, (len(self._outcomes), count)
        self._writer.finish()
        self._files.close()
        samples_path = self._root / samples_file(self._shard)
        write_samples(samples_path, self._samples())
        files = tuple(file_record(self._root, path) for path in (self._shard_path, samples_path))
        run = CommitRun(
            attempt=self.attempt,
            seconds=round(seconds, 3),
            images_per_s=round(count / max(seconds, 1e-9), 3),
            host=os.uname().nodename,
            device=device,
            versions=versions,
        )
        content = self._content(files)
        record = signed(CommitRecord(format_version=FORMAT_VERSION, content=content, run=run, sha256=""))
        write_commit(self._root, record)
        return record

    def _content(self, files: tuple[FileRecord, ...]) -> CommitContent:
        planned = self._planned
        reasons = [outcome.reason for outcome in self._outcomes if outcome.reason is not None]
        contents = [outcome.content_sha256 for outcome in self._outcomes]
        return CommitContent(
            array=self._array,
            shard=self._shard,
            recipe_digest=self._spec.recipe_digest,
            plan_digest=plan_digest([planned]),
            files=files,
            rows_digest=rows_digest(planned["row"].to_pylist(), planned["id"].to_pylist(), contents),
            cached=len(self._outcomes) - len(reasons),
            rejected=len(reasons),
            reasons=dict(Counter(reason_kind(reason) for reason in reasons)),
            non_finite=self._non_finite,
            statistics=self._statistics.statistics(),
            preview=self._statistics.preview(),
        )

    def _samples(self) -> pa.Table:
        planned, outcomes = self._planned, self._outcomes
        columns: dict[str, Any] = {
            "row": planned["row"],
            "id": planned["id"],
            "uri": planned["uri"],
            "content_sha256": [outcome.content_sha256 for outcome in outcomes],
            "width": [outcome.width for outcome in outcomes],
            "height": [outcome.height for outcome in outcomes],
            "status": [CACHED if outcome.reason is None else REJECTED for outcome in outcomes],
            "reason": [outcome.reason for outcome in outcomes],
            "conversations": planned["conversations"],
        }
        for field in Location._fields:
            columns[field] = [location and getattr(location, field) for location in self._locations]
        return pa.table(columns, schema=SAMPLES_SCHEMA)


class UncommittedError(Exception):
    """The block ended without a commit: the shard's files are withdrawn."""


def write_samples(path: Path, samples: pa.Table) -> None:
    """Equal tables give equal bytes, however they are held: a list's items have another name once read from Parquet."""
    samples = pa.table(samples.columns, schema=SAMPLES_SCHEMA).combine_chunks()
    with publish(path) as stream:
        pq.write_table(samples, stream, compression="zstd")


def file_record(root: Path, path: Path) -> FileRecord:
    return FileRecord(path=path.relative_to(root).as_posix(), bytes=path.stat().st_size, sha256=file_sha256(path))
