"""Samples tables of committed shards, as far as their records vouch for them: what was encoded, and as what."""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from cache_store.cache.metadata import read_commit
from cache_store.errors import CacheError
from cache_store.format.record import record_digest
from cache_store.format.schema import samples_file
from cache_store.format.tables import read_table
from cache_store.verify.file import file_finding


def remembered_samples(
    root: Path, shard: int, columns: Sequence[str], expected: Container[str] | None = None
) -> pa.Table | None:
    """A committed shard's samples; None where its record or its table is lost or cannot be trusted.

    `expected` are the digests of the contents that the record may have, where anything says it.
    """
    try:
        record = read_commit(root, shard)
        if record is None or (expected is not None and record_digest(record.content) not in expected):
            return None
        files = [file for file in record.content.files if file.path == samples_file(shard)]
        if not files or file_finding(root, files[0], "full") is not None:
            return None
        return read_table(root / samples_file(shard), list(columns))
    except CacheError:
        return None


def shards_with_tables(root: Path) -> Iterator[int]:
    """Whatever the spec says of their number, which may be lost."""
    for path in sorted((root / samples_file(0)).parent.glob("*.parquet")):
        if path.stem.isdecimal() and path == root / samples_file(int(path.stem)):
            yield int(path.stem)
