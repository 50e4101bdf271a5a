"""Building one shard: samples stream in, files stream out, the commit record comes last.

Samples are written as they come, so a shard of any size takes the memory of one batch. What was there before is
replaced only when the new files are whole on disk and are what they are expected to be.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from cache_store.cache.writing.shard_files import ShardFiles
from cache_store.errors import CacheError
from cache_store.format.codec import encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.layout import Location
from cache_store.format.plan import plan_digest
from cache_store.format.record import FORMAT_VERSION, signed
from cache_store.format.schema import CommitContent, CommitRecord, CommitRun, FileRecord, Spec
from cache_store.format.statistics import RunningStatistics
from cache_store.format.tables import CACHED, REJECTED, SAMPLES_SCHEMA, reason_kind, rows_digest
from cache_store.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one planned sample on its way to a latent; a reason means that it is rejected."""

    content_sha256: str | None
    width: int | None
    height: int | None
    reason: str | None
    exif_is_readable: bool = True


class MismatchedShardError(CacheError):
    """A shard did not come out as it was, so that the one that was there stays."""

    def __init__(self, shard: int, digest: str, samples: pa.Table) -> None:
        super().__init__(f"shard {shard} did not come out as it was; nothing of it was replaced")
        self.shard, self.digest, self.samples = shard, digest, samples
        """Of the content that it would have had, and its samples table."""


class ShardBuilder:
    """A context manager: append every row of the shard in order, then commit; uncommitted, it leaves what was there.

    `planned` is the shard's row group of the plan; where there are `allowed_digests`, the shard's content must have one
    of them. Other programs may be building a `shared` shard too.
    """

    def __init__(
        self,
        store: Store,
        spec: Spec,
        shard: int,
        planned: pa.Table,
        allowed_digests: Collection[str] = (),
        *,
        shared: bool = False,
    ) -> None:
        self._spec, self._shard, self._planned = spec, shard, planned
        self._allowed_digests = allowed_digests
        self._files = ShardFiles(store, spec, shard, shared=shared)
        self._outcomes: list[Outcome] = []
        self._locations: list[Location | None] = []
        self._statistics = RunningStatistics(spec.array)
        self._non_finite = 0

    def __enter__(self) -> Self:
        self._files.__enter__()
        with self._files.writing() as stream:
            self._writer = shard_format(self._spec).writer(stream, self._planned)
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def append(self, samples: np.ndarray, rgb_NHW3: np.ndarray | None, outcomes: Sequence[Outcome]) -> None:
        """Add the next rows: float32 [N, *shape] and what became of each.

        Where the array has a preview, also the images at its resolution, RGB in [0, 1].
        """
        array = self._spec.array
        with np.errstate(over="ignore"):  # an overflow shows as infinity and rejects its sample below
            stored = np.ascontiguousarray(samples.astype(array.numpy_dtype))
        outcomes = [self._judge(*each) for each in zip(samples, stored, outcomes, strict=True)]
        keep = np.array([outcome.reason is None for outcome in outcomes])
        with self._files.writing():
            for values, outcome, kept in zip(stored, outcomes, keep, strict=True):
                payload = encode_sample(values, array.codec) if kept else None
                self._locations.append(self._writer.append(payload, outcome.content_sha256))
        self._statistics.add(stored[keep], rgb_NHW3 if rgb_NHW3 is None else rgb_NHW3[keep])
        self._outcomes.extend(outcomes)

    def _judge(self, sample: np.ndarray, stored: np.ndarray, outcome: Outcome) -> Outcome:
        """Reject what is not finite, before or after rounding to the stored dtype."""
        if outcome.reason is not None or np.isfinite(stored).all():
            return outcome
        non_finite = int(np.count_nonzero(~np.isfinite(sample)))
        self._non_finite += non_finite
        dtype = self._spec.array.dtype
        reason = (
            f"latent not finite: {non_finite} values"
            if non_finite
            else f"latent overflows {dtype}: largest magnitude {np.abs(sample).max():.6g}"
        )
        return Outcome(content_sha256=outcome.content_sha256, width=outcome.width, height=outcome.height, reason=reason)

    def commit(self, seconds: float, device: str, versions: dict[str, str]) -> CommitRecord:
        """Publish the shard's files, then its record; the record that stands, if another program's of the same content.

        MismatchedShardError where the shard is not the one expected.
        """
        count = self._planned.num_rows
        assert len(self._outcomes) == count, (len(self._outcomes), count)
        run = CommitRun(
            attempt=self._files.attempt,
            seconds=round(seconds, 3),
            images_per_s=round(count / max(seconds, 1e-9), 3),
            host=os.uname().nodename,
            device=device,
            versions=versions,
        )
        with self._files.writing():
            self._writer.finish()
        samples = samples_table(self._planned, self._outcomes, self._locations)
        content = self._content(self._files.finish(samples))
        if self._allowed_digests and content.digest not in self._allowed_digests:
            raise MismatchedShardError(self._shard, content.digest, samples)
        record = signed(CommitRecord(format_version=FORMAT_VERSION, content=content, run=run, sha256=""))
        return self._files.commit(record)

    def _content(self, files: tuple[FileRecord, ...]) -> CommitContent:
        planned = self._planned
        reasons = [outcome.reason for outcome in self._outcomes if outcome.reason is not None]
        contents = [outcome.content_sha256 for outcome in self._outcomes]
        return CommitContent(
            shard=self._shard,
            recipe=self._spec.recipe,
            plan_digest=plan_digest(planned),
            files=files,
            rows_digest=rows_digest(planned["row"].to_pylist(), planned["id"].to_pylist(), contents),
            cached=len(self._outcomes) - len(reasons),
            rejected=len(reasons),
            reasons=dict(Counter(reason_kind(reason) for reason in reasons)),
            non_finite=self._non_finite,
            unreadable_exif=sum(each.reason is None and not each.exif_is_readable for each in self._outcomes),
            statistics=self._statistics.statistics(),
            preview=self._statistics.preview(),
        )


def samples_table(planned: pa.Table, outcomes: Sequence[Outcome], locations: Sequence[Location | None]) -> pa.Table:
    """What became of each planned sample, and where its bytes lie."""
    columns: dict[str, Any] = {
        "row": planned["row"],
        "id": planned["id"],
        "status": [CACHED if outcome.reason is None else REJECTED for outcome in outcomes],
        "reason": [outcome.reason for outcome in outcomes],
        "content_sha256": [outcome.content_sha256 for outcome in outcomes],
        "width": [outcome.width for outcome in outcomes],
        "height": [outcome.height for outcome in outcomes],
    }
    for field in Location._fields:
        columns[field] = [location and getattr(location, field) for location in locations]
    return pa.table(columns, schema=SAMPLES_SCHEMA)
