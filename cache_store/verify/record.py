"""Check a commit record against its shard, its files and the samples table."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.metadata import stored_sha256
from cache_store.cache.survey import ShardOnDisk
from cache_store.errors import DAMAGE, CacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import commit_file, samples_file
from cache_store.format.plan import KEPT_OF_WITHDRAWN, is_withdrawn
from cache_store.format.schema import CommitContent, CommitRecord, FileRecord, Spec
from cache_store.format.shards import Location, ShardSamples
from cache_store.format.sums import ShardSums, equal_but_for_rounding
from cache_store.format.tables import (
    CACHED,
    MAX_ROW_GROUP_BYTES,
    PLAN_SCHEMA,
    REJECTED,
    SCALE_COLUMNS,
    WITHDRAWN,
    cut_texts,
    parse_table,
    reason_kind,
    rows_digest,
    samples_schema,
)
from cache_store.messages import recipe_differences
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding, damage_finding


def file_finding(store: Store, file: FileRecord, shard: int | None = None) -> Finding | None:
    try:
        found = stored_sha256(store, file.path)
    except DAMAGE as error:
        return damage_finding(error, store, file.path, shard)
    if found == file.sha256:
        return None
    problem = f"sha256 is {found[:12]}…, expected {file.sha256[:12]}…"
    return Finding(shard=shard, file=file.path, problem=problem)


def usable_record(spec: Spec, shard: int, on_disk: ShardOnDisk) -> tuple[CommitRecord | None, str | None]:
    """Return the record if it fits the spec, and why the shard cannot be kept, which may be its files' sizes only."""
    record = on_disk.record.value
    if record is None:
        return None, str(on_disk.record.problem)
    if finding := next(content_findings(spec, shard, record.content), None):
        return None, str(finding)
    return record, next(map(str, on_disk.file_problems.values()), None)


def content_findings(spec: Spec, shard: int, content: CommitContent) -> Iterator[Finding]:
    name = commit_file(shard)
    claims = {
        "shard": (content.shard, shard),
        "files": (tuple(file.path for file in content.files), files_of_shard(spec, shard)),
        "first row": (content.first_row, spec.shard_rows(shard).start),
        "array": (content.array, spec.array_of(shard).size.name),
        "planned samples": (content.cached + content.rejected, len(spec.shard_rows(shard))),
        "reasons": (sum(content.reasons.values()), content.rejected),
        "withdrawn": (content.withdrawn, content.reasons.get(WITHDRAWN, 0)),
        "texts": (content.texts is None, spec.array.text is None),
        "sums": (content.sums is None, content.cached == 0),
    }
    for field, found_text, expected_text in recipe_differences(content.recipe, spec.recipe):
        problem = f"recipe: {field}: expected {expected_text}, found {found_text}"
        yield Finding(shard=shard, file=name, problem=problem)
    for claim, (found, expected) in claims.items():
        if found != expected:
            yield Finding(shard=shard, file=name, problem=f"{claim}: expected {expected}, found {found}")


def sums_findings(shard: int, recorded: ShardSums, found: ShardSums, *, has_preview: bool) -> Iterator[Finding]:
    if not equal_but_for_rounding(found, recorded) or has_preview != (recorded.preview is not None):
        problem = "its sums do not follow from the shard's samples"
        yield Finding(shard=shard, file=samples_file(shard), problem=problem)


def table_problem(samples: ShardSamples) -> str | None:
    if samples.table.schema != samples_schema(samples.array):
        return "does not have the columns of the format"
    if samples.table.num_rows != len(samples.rows):
        return f"has {samples.table.num_rows} rows, {len(samples.rows)} are planned"
    return None


def table_findings(samples: ShardSamples, content: CommitContent) -> Iterator[Finding]:
    shard, table, name = samples.shard, samples.table, samples_file(samples.shard)
    if rows_digest(*(table[column].to_pylist() for column in ("row", "id", "content_sha256"))) != content.rows_digest:
        yield Finding(shard=shard, file=name, problem="ids or contents do not match the commit record")
    counts = {each["values"]: each["counts"] for each in pc.value_counts(table["status"]).to_pylist()}
    reasons = Counter(reason_kind(reason) for reason in table["reason"].drop_null().to_pylist())
    claims = {
        "cached": (counts.get(CACHED, 0), content.cached),
        "rejected": (counts.get(REJECTED, 0), content.rejected),
        "cut texts": (cut_texts(samples.array, table), content.cut_texts),
        "reasons": (dict(reasons), content.reasons),
    }
    for claim, (found, recorded) in claims.items():
        if found != recorded:
            yield Finding(shard=shard, file=name, problem=f"{claim}: {found}, the commit record says {recorded}")
    yield from status_findings(samples)


def status_findings(samples: ShardSamples) -> Iterator[Finding]:
    """Yield cached rows without bytes or with a reason, and rejected rows with bytes or without a reason."""
    shard, table, name = samples.shard, samples.table, samples_file(samples.shard)
    cached = pc.equal(table["status"], CACHED).fill_null(False).to_numpy()
    columns = [*Location._fields, *(SCALE_COLUMNS if samples.array.is_quantized else [])]
    placed = [table[column].is_valid().to_numpy() for column in columns]
    agree = np.all([cached == each for each in placed], axis=0) & (cached == table["reason"].is_null().to_numpy())
    for slot in np.flatnonzero(~agree).tolist():
        problem = f"is {table['status'][slot].as_py()}, but its reason or its place in the shard file says otherwise"
        yield Finding(shard=shard, row=table["row"][slot].as_py(), file=name, problem=problem)


def withdrawn_findings(samples: ShardSamples, files: Sequence[str]) -> Iterator[Finding]:
    """Yield rows that only the plan or only the table calls withdrawn, and what is left of withdrawn ones."""
    if samples.planned is None:
        return
    shard, table, planned = samples.shard, samples.table, samples.planned
    rejected = pc.equal(table["reason"], WITHDRAWN).fill_null(False).to_numpy()
    gone = is_withdrawn(planned)
    for slot in np.flatnonzero(rejected != gone).tolist():
        problem = f"{'is' if rejected[slot] else 'is not'} withdrawn, the plan says otherwise"
        yield Finding(shard=shard, row=samples.rows[slot], file=samples_file(shard), problem=problem)
    own = [name for name in PLAN_SCHEMA.names if name in planned.column_names]
    for file, held, kept in (
        (samples_file(shard), table, ("row", "id", "status", "reason")),
        (files[0], planned.select(own), KEPT_OF_WITHDRAWN),
        (files[1], planned.drop_columns(own), ()),
    ):
        for name in (each for each in held.column_names if each not in kept):
            for slot in np.flatnonzero(gone & held[name].is_valid().to_numpy()).tolist():
                problem = f"is withdrawn, but its {name} is still there"
                yield Finding(shard=shard, row=samples.rows[slot], file=file, problem=problem)


def mismatched_rows(samples: ShardSamples) -> Iterator[Finding]:
    """Yield rows that differ from the plan; one finding if every row does."""
    if samples.planned is None:
        return
    shard, rows, name = samples.shard, samples.rows, samples_file(samples.shard)
    problem = "row or id is not the plan's"
    found = zip(samples.table["row"].to_pylist(), samples.table["id"].to_pylist(), strict=True)
    planned = zip(rows, samples.planned["id"].to_pylist(), strict=True)
    differing = [row for row, mine, theirs in zip(rows, found, planned, strict=True) if mine != theirs]
    if len(differing) == len(rows) > 1:
        yield Finding(shard=shard, file=name, problem=f"{problem}, in every row")
        return
    for row in differing:
        yield Finding(shard=shard, row=row, file=name, problem=problem)


def recorded_samples(store: Store, record: CommitRecord, columns: list[str]) -> pa.Table | None:
    """Read a shard's samples table; None unless it is, byte for byte, the one that the record names."""
    name = samples_file(record.content.shard)
    try:
        for file in (each for each in record.content.files if each.path == name):
            data = store.read(name, min(file.bytes, MAX_ROW_GROUP_BYTES))
            if hashlib.sha256(data).hexdigest() == file.sha256:
                return parse_table(data, store.where(name), columns)
    except (CacheError, FileNotFoundError):
        pass
    return None
