"""Building one shard: samples stream in, files stream out, the commit record comes last.

Samples are written as they come, so a shard of any size takes the memory of one batch. What was there before is
replaced only when the new files are whole on disk and are what they are expected to be.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from cache_store.cache.writing.shard_files import ShardFiles
from cache_store.errors import CacheError
from cache_store.format.codec import crc32c, encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.layout import EncodedRows, Location
from cache_store.format.plan import plan_digest
from cache_store.format.record import FORMAT_VERSION, signed
from cache_store.format.schema import ArraySpec, CommitContent, CommitRecord, CommitRun, FileRecord, Spec
from cache_store.format.sums import RunningSums
from cache_store.format.tables import CACHED, REJECTED, cut_texts, reason_kind, rows_digest, samples_schema
from cache_store.storage.store import Store


class Outcome(NamedTuple):
    """What became of one planned sample on its way to a latent; a reason means that it is rejected."""

    content_sha256: str | None
    width: int | None = None
    height: int | None = None
    reason: str | None = None
    exif_is_readable: bool = True
    tokens: int | None = None
    """Of a text, before it is cut."""


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
        self._places: list[np.ndarray] = []
        self._sums = RunningSums(spec.array, spec.array.dtype)
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
        wanted = np.array([outcome.reason is None for outcome in outcomes], np.bool_)
        stored, kept, checksums = self._sums.round_and_add(samples, wanted, rgb_NHW3)
        outcomes = [*outcomes]
        for number in np.flatnonzero(wanted & ~kept).tolist():
            outcomes[number] = self._rejected(samples[number], outcomes[number])
        rows = encoded_rows(self._spec.array, stored, kept, checksums, outcomes)
        with self._files.writing():
            self._places.append(self._writer.append(rows))
        self._outcomes.extend(outcomes)

    def _rejected(self, sample: np.ndarray, outcome: Outcome) -> Outcome:
        """Why a sample is rejected that is not finite, before or after rounding to the stored dtype."""
        non_finite = int(np.count_nonzero(~np.isfinite(sample)))
        self._non_finite += non_finite
        dtype = self._spec.array.dtype
        reason = (
            f"latent not finite: {non_finite} values"
            if non_finite
            else f"latent overflows {dtype}: largest magnitude {np.abs(sample).max():.6g}"
        )
        return outcome._replace(reason=reason)

    def commit(
        self, seconds: float, device: str, versions: dict[str, str], hardware: dict[str, str] | None = None
    ) -> CommitRecord:
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
            hardware=hardware or {},
        )
        with self._files.writing():
            self._writer.finish()
        samples = samples_table(self._spec.array, self._planned, self._outcomes, np.concatenate(self._places))
        content = self._content(self._files.finish(samples), samples)
        if self._allowed_digests and content.digest not in self._allowed_digests:
            raise MismatchedShardError(self._shard, content.digest, samples)
        record = signed(CommitRecord(format_version=FORMAT_VERSION, content=content, run=run, sha256=""))
        return self._files.commit(record)

    def _content(self, files: tuple[FileRecord, ...], samples: pa.Table) -> CommitContent:
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
            cut_texts=cut_texts(self._spec.array, samples),
            statistics=self._sums.statistics(),
            preview=self._sums.preview(),
        )


def encoded_rows(
    array: ArraySpec, stored: np.ndarray, kept: np.ndarray, checksums: np.ndarray, outcomes: Sequence[Outcome]
) -> EncodedRows:
    """Rows of a shard, of which `stored` are the plain bytes, uint8 [N, bytes of a sample], and their crc32c."""
    payloads, checksums = (stored, checksums) if kept.all() else (stored[kept], checksums[kept])
    encoded: list[bytes | memoryview] = [each.data for each in payloads]
    if array.codec != "none":
        values = payloads.view(f"<u{array.numpy_dtype.itemsize}")
        encoded = [encode_sample(each, array.codec) for each in values]
        checksums = np.array([*map(crc32c, encoded)], np.uint32)
    contents = [outcome.content_sha256 for outcome in outcomes]
    tokens = [] if array.text is None else [outcome.tokens for outcome in outcomes]
    return EncodedRows(kept=kept, payloads=encoded, checksums=checksums, contents=contents, tokens=tokens)


def samples_table(array: ArraySpec, planned: pa.Table, outcomes: Sequence[Outcome], places: np.ndarray) -> pa.Table:
    """What became of each planned sample, and where its bytes lie: [rows, 3], -1 where nowhere."""
    became = dict(zip(Outcome._fields, zip(*outcomes, strict=True), strict=True))
    schema = samples_schema(array)
    columns: dict[str, Any] = {
        "row": planned["row"],
        "id": planned["id"],
        "status": [CACHED if reason is None else REJECTED for reason in became["reason"]],
        **{name: values for name, values in became.items() if name in schema.names},
    }
    for field, values in zip(Location._fields, places.T, strict=True):
        columns[field] = pa.array(values, schema.field(field).type, mask=values < 0, safe=False)
    return pa.table(columns, schema=schema)
