"""Build one shard: samples stream in, files stream out, and the commit record is written last.

Samples are written as they arrive, so that a shard of any size needs the memory of one batch. Existing files are
replaced only when the new ones are whole on disk and have the digest that is asked for, if one is.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from cache_store.cache.commit import ShardFiles
from cache_store.errors import CacheError
from cache_store.format.array import ArrayRecipe, ArraySpec
from cache_store.format.codec import crc32c, encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.plan import encoded_texts_digest, samples_digest
from cache_store.format.record import FORMAT_VERSION, sign
from cache_store.format.schema import CommitContent, CommitRecord, CommitRun, FileRecord, Spec
from cache_store.format.shards import EncodedRows, Location, ShardSamples
from cache_store.format.sums import Rounded, RunningSums, ShardSums
from cache_store.format.tables import CACHED, REJECTED, WITHDRAWN, cut_texts, reason_kind, rows_digest, samples_schema
from cache_store.log import utc_time
from cache_store.storage.store import Store


class Outcome(NamedTuple):
    """The result of encoding one planned sample; it is rejected if there is a reason."""

    content_sha256: str | None
    width: int | None = None
    height: int | None = None
    reason: str | None = None
    remarks: Sequence[str] = ()
    """Each says what is odd about the file and, after a comma, what was done; the shard's record counts them."""
    tokens: int | None = None
    """Number of the text's tokens before it is cut; None for an image."""
    resized_width: int | None = None
    resized_height: int | None = None
    crop_left: int | None = None
    crop_top: int | None = None
    """How the image was scaled and cut; None for a text."""
    uint8_low: Sequence[float] | None = None
    uint8_step: Sequence[float] | None = None
    """The scale of a quantized sample, by channel."""


NOT_FINITE = re.compile(r"latent not finite: (\d+) values")
"""The reason of a sample that has values that are not finite, with their number."""

WITHDRAWN_SAMPLE = Outcome(content_sha256=None, reason=WITHDRAWN)


class MismatchedShardError(CacheError):
    """A rebuilt shard differs from the recorded one, which stays."""

    def __init__(self, shard: int, digest: str, samples: pa.Table) -> None:
        super().__init__(f"shard {shard} came out different when built again; nothing of it was replaced")
        self.shard, self.digest, self.samples = shard, digest, samples
        """Shard number, digest of the rebuilt content, and the rebuilt samples table."""


class ShardBuilder:
    """A context manager: append every row of the shard in order, then commit; without commit, existing files stay.

    `planned` has the shard's rows of the plan. If a `digest` is given, the content must have it. Other
    programs may be building a `shared` shard too; a `rewritten` one keeps its old record until the new one.
    """

    def __init__(
        self,
        store: Store,
        spec: Spec,
        shard: int,
        planned: pa.Table,
        digest: str = "",
        *,
        shared: bool = False,
        rewritten: bool = False,
    ) -> None:
        self._spec, self._array, self._shard, self._planned = spec, spec.array_of(shard), shard, planned
        self._digest = digest
        self._files = ShardFiles(store, spec, shard, shared=shared, rewritten=rewritten)
        self._outcomes: list[Outcome] = []
        self._places: list[np.ndarray] = []
        self._sums = RunningSums(self._array)
        self._remarks, self._is_copy = Counter[str](), False
        self._null_text: bytes | None = None
        self.is_others = False
        """Whether another program had committed the shard meanwhile."""

    def __enter__(self) -> Self:
        self._files.__enter__()
        self._writer = shard_format(self._spec).writer(self._files.stream, self._shard, self._planned)
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def append(
        self,
        samples: np.ndarray,
        rgb_NHW3: np.ndarray | None,
        outcomes: Sequence[Outcome],
    ) -> None:
        """Add the next rows: float32 [N, *shape] and the outcome of each.

        If the array has a preview, `rgb_NHW3` has the images at the latents' resolution, RGB in [0, 1].
        """
        wanted = np.array([outcome.reason is None for outcome in outcomes], np.bool_)
        rounded = self._sums.round_and_add(samples, wanted, rgb_NHW3)
        outcomes = scaled(outcomes, rounded)
        for number in np.flatnonzero(wanted & ~rounded.kept).tolist():
            outcomes[number] = self._rejected(samples[number], outcomes[number])
        rows = encoded_rows(self._array, rounded, outcomes)
        self._places.append(self._writer.append(rows))
        self._outcomes.extend(outcomes)
        self._remarks.update(name for each in outcomes if each.reason is None for name in each.remarks)

    def append_encoded(
        self, payloads: Sequence[bytes | memoryview], values: np.ndarray, outcomes: Sequence[Outcome]
    ) -> None:
        """Add the next rows; cached ones come encoded and decoded. The file is read back before it is committed."""
        self._is_copy = True
        if payloads:
            self._sums.add(values)
        kept = np.array([outcome.reason is None for outcome in outcomes], np.bool_)
        checksums = np.array([*map(crc32c, payloads)], np.uint32)
        self._places.append(self._writer.append(rows_of(payloads, kept, checksums, outcomes)))
        self._outcomes.extend(outcomes)

    def inherit(self, content: CommitContent, sums: ShardSums | None) -> None:
        """Copy the facts that do not follow from a shard's samples: remarks, the preview's equations."""
        self._remarks.update(content.remarks)
        self._sums.add_preview(sums)

    def add_null_text(self, sample: np.ndarray) -> None:
        """Keep the null prompt's sample, float32 [*shape], in the first shard of texts; CacheError if it overflows."""
        with np.errstate(over="ignore"):
            stored = sample.astype(self._spec.array.numpy_dtype)
        if not np.isfinite(stored).all():
            raise CacheError(
                f"the null prompt's sample is not finite in {self._spec.array.dtype}; take a larger store.dtype"
            )
        self._null_text = stored.tobytes()

    def _rejected(self, sample: np.ndarray, outcome: Outcome) -> Outcome:
        """Reject a sample that is not finite, before or after rounding to the stored dtype."""
        non_finite = int(np.count_nonzero(~np.isfinite(sample)))
        dtype = self._array.dtype
        reason = (
            f"latent not finite: {non_finite} values"
            if non_finite
            else f"latent overflows {dtype}: largest magnitude {np.abs(sample).max():.6g}"
        )
        return outcome._replace(reason=reason)

    def commit(
        self, seconds: float, device: str, versions: dict[str, str], hardware: dict[str, str] | None = None
    ) -> CommitRecord:
        """Publish the files, then the record; return the committed one. MismatchedShardError for another digest."""
        count = self._planned.num_rows
        run = CommitRun(
            attempt=self._files.attempt,
            seconds=round(seconds, 3),
            images_per_s=round(count / max(seconds, 1e-9), 3),
            host=os.uname().nodename,
            device=device,
            versions=versions,
            hardware=hardware or {},
            committed_at=utc_time(),
        )
        return self.commit_run(run)

    def commit_run(self, run: CommitRun) -> CommitRecord:
        """Commit with this run, such as that of a copied shard."""
        assert len(self._outcomes) == self._planned.num_rows, (len(self._outcomes), self._planned.num_rows)
        self._writer.finish()
        rows = self._spec.shard_rows(self._shard)
        samples = samples_table(self._array, rows, self._planned, self._outcomes, np.concatenate(self._places))
        written = ShardSamples(self._spec, self._shard, samples, self._planned)
        if self._is_copy:
            self._read_back(written)
        proof = shard_format(self._spec).proof(self._files.read_back(), written.locations)
        sums = self._sums.sums()
        if sums and any(each.reason == WITHDRAWN for each in self._outcomes):
            sums = sums._replace(preview=None)  # it cannot be taken apart, and a build must give the same record again
        data = sums.data if sums else None
        content = self._content(self._files.finish(samples, data, self._null_text), samples, data, proof)
        if self._digest not in ("", content.digest):
            raise MismatchedShardError(self._shard, content.digest, samples)
        record = sign(CommitRecord(format_version=FORMAT_VERSION, content=content, run=run, sha256=""))
        committed = self._files.commit(record)
        self.is_others = committed is not record
        return committed

    def _read_back(self, samples: ShardSamples) -> None:
        """Raise CacheError if the shard file does not read back as it was written."""
        form, data = shard_format(self._spec), self._files.read_back()
        places = filter(None, samples.locations)
        problems = ["a sample" for at in places if crc32c(data[at.offset : at.offset + at.length]) != at.crc32c]
        problems += [problem for _, problem in form.structure_problems(data, samples)]
        if problems:
            file = form.shard_file(self._shard)
            raise CacheError(f"{file} does not read back as it was written: {problems[0]}; is the disk failing?")

    def _content(
        self, files: tuple[FileRecord, ...], samples: pa.Table, sums: bytes | None, proof: int
    ) -> CommitContent:
        planned, text = self._planned, self._spec.array.text
        reasons = [outcome.reason for outcome in self._outcomes if outcome.reason is not None]
        contents = [outcome.content_sha256 for outcome in self._outcomes]
        cached = len(self._outcomes) - len(reasons)
        return CommitContent(
            shard=self._shard,
            first_row=self._spec.shard_rows(self._shard).start,
            array=self._array.size.name,
            recipe=self._spec.recipe,
            samples=samples_digest(planned),
            texts=encoded_texts_digest(text, planned) if text else None,
            files=files,
            rows_digest=rows_digest(samples["row"].to_pylist(), planned["id"].to_pylist(), contents),
            cached=cached,
            rejected=len(reasons),
            withdrawn=reasons.count(WITHDRAWN),
            reasons=dict(Counter(reason_kind(reason) for reason in reasons)),
            non_finite=sum(map(non_finite_values, self._outcomes)),
            # nothing tells which samples a copied shard's remarks were about
            remarks={name: min(number, cached) for name, number in self._remarks.items() if cached},
            cut_texts=cut_texts(self._array, samples),
            sums=None if sums is None else hashlib.sha256(sums).hexdigest(),
            proof=proof,
        )


def scaled(outcomes: Sequence[Outcome], rounded: Rounded) -> list[Outcome]:
    outcomes = [*outcomes]
    if rounded.scale is not None:
        low_NC, step_NC = (column.tolist() for column in rounded.scale)
        for number in np.flatnonzero(rounded.kept).tolist():
            outcomes[number] = outcomes[number]._replace(uint8_low=low_NC[number], uint8_step=step_NC[number])
    return outcomes


def encoded_rows(array: ArraySpec, rounded: Rounded, outcomes: Sequence[Outcome]) -> EncodedRows:
    """Encode the kept rows."""
    stored, kept, checksums, _ = rounded
    payloads, checksums = (stored, checksums) if kept.all() else (stored[kept], checksums[kept])
    encoded: list[bytes | memoryview] = [each.data for each in payloads]
    if array.codec != "none":
        values = payloads.view(f"<u{array.numpy_dtype.itemsize}")
        encoded = [encode_sample(each, array.codec) for each in values]
        checksums = np.array([*map(crc32c, encoded)], np.uint32)
    return rows_of(encoded, kept, checksums, outcomes)


def rows_of(
    payloads: Sequence[bytes | memoryview], kept: np.ndarray, checksums: np.ndarray, outcomes: Sequence[Outcome]
) -> EncodedRows:
    """Make rows of a shard, of which those `kept` have encoded samples with these checksums."""
    return EncodedRows(
        kept=kept,
        payloads=payloads,
        checksums=checksums,
        contents=[outcome.content_sha256 for outcome in outcomes],
        tokens=[outcome.tokens for outcome in outcomes],
    )


def non_finite_values(outcome: Outcome) -> int:
    found = NOT_FINITE.fullmatch(outcome.reason or "")
    return int(found[1]) if found else 0


def samples_table(
    array: ArrayRecipe, rows: range, planned: pa.Table, outcomes: Sequence[Outcome], places: np.ndarray
) -> pa.Table:
    """Make the samples table: each planned sample's outcome and place; `places` [rows, 3] has -1 for absent rows."""
    schema = samples_schema(array)
    fields = dict(zip(Outcome._fields, zip(*outcomes, strict=True), strict=True))
    columns: dict[str, Any] = {
        "row": np.arange(rows.start, rows.stop),
        "id": planned["id"],
        "status": [CACHED if reason is None else REJECTED for reason in fields["reason"]],
        **{name: values for name, values in fields.items() if name in schema.names},
    }
    for field, values in zip(Location._fields, places.T, strict=True):
        columns[field] = pa.array(values, schema.field(field).type, mask=values < 0, safe=False)
    return pa.table(columns, schema=schema)
