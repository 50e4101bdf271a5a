"""Checking a samples table against its commit record and the plan."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from cache_store.format.layout import Location, ShardSamples
from cache_store.format.names import samples_file
from cache_store.format.schema import CommitContent
from cache_store.format.tables import CACHED, REJECTED, SAMPLES_SCHEMA, reason_kind, rows_digest
from cache_store.verify.findings import Finding


def table_problem(samples: ShardSamples) -> str | None:
    """Why a samples table cannot be the shard's."""
    if samples.table.schema != SAMPLES_SCHEMA:
        return "has other columns than the format's"
    if samples.table.num_rows != len(samples.rows):
        return f"has {samples.table.num_rows} rows, {len(samples.rows)} are planned"
    return None


def table_findings(samples: ShardSamples, content: CommitContent) -> Iterator[Finding]:
    """Whether the samples table is the one that the record was made with."""
    shard, table, name = samples.shard, samples.table, samples_file(samples.shard)
    digest = rows_digest(*(table[column].to_pylist() for column in ("row", "id", "content_sha256")))
    if digest != content.rows_digest:
        yield Finding(shard=shard, file=name, problem="ids or contents do not match the commit record")
    counts = {each["values"]: each["counts"] for each in pc.value_counts(table["status"]).to_pylist()}
    expected = {CACHED: content.cached, REJECTED: content.rejected}
    if counts != {status: count for status, count in expected.items() if count}:
        yield Finding(shard=shard, file=name, problem=f"counts {counts}, the commit record {expected}")
    reasons = Counter(reason_kind(reason) for reason in table["reason"].drop_null().to_pylist())
    if reasons != content.reasons:
        problem = f"rejects {dict(reasons)}, the commit record {content.reasons}"
        yield Finding(shard=shard, file=name, problem=problem)
    yield from status_findings(samples)


def status_findings(samples: ShardSamples) -> Iterator[Finding]:
    """Rows that are cached without bytes, or rejected with some or without a reason."""
    shard, table, name = samples.shard, samples.table, samples_file(samples.shard)
    cached = pc.equal(table["status"], CACHED).fill_null(False).to_numpy()
    placed = [table[column].is_valid().to_numpy() for column in Location._fields]
    agree = np.all([cached == each for each in placed], axis=0) & (cached == table["reason"].is_null().to_numpy())
    for slot in np.flatnonzero(~agree).tolist():
        problem = f"is {table['status'][slot].as_py()}, which its reason or place in the shard file contradicts"
        yield Finding(shard=shard, row=table["row"][slot].as_py(), file=name, problem=problem)


def other_rows(samples: ShardSamples) -> Iterator[Finding]:
    """Rows of the samples table that are not the plan's; one finding where none is."""
    if samples.planned is None:
        return
    found, planned = (table.select(["row", "id"]) for table in (samples.table, samples.planned))
    if found.equals(planned):
        return
    shard, rows, name = samples.shard, samples.rows, samples_file(samples.shard)
    problem = "row or id is not the plan's"
    pairs = zip(found.to_pylist(), planned.to_pylist(), strict=True)
    differing = [row for row, (mine, theirs) in zip(rows, pairs, strict=True) if mine != theirs]
    if len(differing) == len(rows) > 1:
        yield Finding(shard=shard, file=name, problem=f"{problem}, in every row")
        return
    for row in differing:
        yield Finding(shard=shard, row=row, file=name, problem=problem)
