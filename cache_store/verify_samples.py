"""Checking a samples table against its commit record and the plan."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.findings import Finding
from cache_store.formats import Location
from cache_store.schema import CACHED, REJECTED, SAMPLES_SCHEMA, CommitContent, reason_kind, rows_digest, samples_file


def table_problem(samples: pa.Table, planned: int) -> str | None:
    """Why a samples table cannot be the shard's."""
    if samples.schema != SAMPLES_SCHEMA:
        return "has other columns than the format's"
    if samples.num_rows != planned:
        return f"has {samples.num_rows} rows, {planned} are planned"
    return None


def table_findings(shard: int, content: CommitContent, samples: pa.Table) -> Iterator[Finding]:
    """Whether the samples table is the one that the record was made with."""
    name = samples_file(shard)
    digest = rows_digest(*(samples[column].to_pylist() for column in ("row", "id", "content_sha256")))
    if digest != content.rows_digest:
        yield Finding(shard=shard, file=name, problem="ids or contents do not match the commit record")
    counts = {each["values"]: each["counts"] for each in pc.value_counts(samples["status"]).to_pylist()}
    expected = {CACHED: content.cached, REJECTED: content.rejected}
    if counts != {status: count for status, count in expected.items() if count}:
        yield Finding(shard=shard, file=name, problem=f"counts {counts}, the commit record {expected}")
    reasons = Counter(reason_kind(reason) for reason in samples["reason"].drop_null().to_pylist())
    if reasons != content.reasons:
        problem = f"rejects {dict(reasons)}, the commit record {content.reasons}"
        yield Finding(shard=shard, file=name, problem=problem)
    yield from status_findings(shard, samples)


def status_findings(shard: int, samples: pa.Table) -> Iterator[Finding]:
    """Rows that are cached without bytes, or rejected with some or without a reason."""
    cached = pc.equal(samples["status"], CACHED).fill_null(False).to_numpy()
    placed = [samples[name].is_valid().to_numpy() for name in Location._fields]
    agree = np.all([cached == each for each in placed], axis=0) & (cached == samples["reason"].is_null().to_numpy())
    for slot in np.flatnonzero(~agree).tolist():
        status = samples["status"][slot].as_py()
        problem = f"is {status}, which its reason or place in the shard file contradicts"
        row, name = samples["row"][slot].as_py(), samples_file(shard)
        yield Finding(shard=shard, row=row, file=name, problem=problem)


def other_rows(shard: int, rows: range, samples: pa.Table, planned: pa.Table) -> Iterator[Finding]:
    """Rows of the samples table that are not the plan's; one finding where none is."""
    found = samples.select(planned.column_names)
    if found.equals(planned):
        return
    name, problem = samples_file(shard), "row, id, uri or text is not the plan's"
    if planned.num_rows != len(rows):
        return  # the plan is not this cache's, which is a finding of its own
    pairs = zip(found.to_pylist(), planned.to_pylist(), strict=True)
    differing = [row for row, (mine, theirs) in zip(rows, pairs, strict=True) if mine != theirs]
    if len(differing) == len(rows) > 1:
        yield Finding(shard=shard, file=name, problem=f"{problem}, in every row")
        return
    for row in differing:
        yield Finding(shard=shard, row=row, file=name, problem=problem)


def read_locations(samples: pa.Table) -> list[Location | None]:
    columns = [samples[name].to_pylist() for name in Location._fields]
    return [None if None in values else Location(*values) for values in zip(*columns, strict=True)]
