"""Sound caches are read by everything that reads one; tables and shard files of other shapes are named errors."""

import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.errors import CacheError
from cache_store.reader import open_cache
from cache_store.tables import read_table
from cache_store.verify import verify
from tests.cache_store.hostile.conftest import SHARD, TABLES, data_or_named_error, form_of
from tests.cache_store.signing import resign


def test_a_sound_cache_is_read_by_all_of_it(sound):
    data_or_named_error(sound)
    assert len(open_cache(sound)) == 6
    assert verify(sound, "full").findings == ()


def test_what_is_signed_anew_is_as_sound_as_it_was(damaged):
    root = damaged()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    resign(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_shapes_give_named_errors(root, name):
    table = pq.read_table(root / name, partitioning=None)
    others = [
        table.drop_columns(["id"]),
        table.set_column(1, "id", pa.array([1] * table.num_rows)),
        table.append_column("more", pa.array([1] * table.num_rows)),
        table.slice(0, 0),
        pa.concat_tables([table] * 3),
        pa.table({}),
        pa.table({"row": pa.nulls(4)}),
        pa.table({"row": pa.array([[[{"x": [1]}]]] * 4)}),
    ]
    for other in others:
        pq.write_table(other, root / name)
        resign(root)
        data_or_named_error(root)
        assert verify(root, "full").findings


@pytest.mark.parametrize("column", ["id", "conversations"])
def test_a_small_table_that_holds_gigabytes_of_text_is_refused(root, column):
    """Parquet keeps a value that repeats once: 5 MB, four thousand times, in a file of a few hundred bytes."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4_096, pa.int32()), pa.array(["x" * 5_000_000]))
    if column == "conversations":
        turns = pa.StructArray.from_arrays([texts, texts], ["from", "value"])
        texts = pa.ListArray.from_arrays(pa.array(range(4_097), pa.int32()), turns)
    table = pa.table({column: texts})
    with pq.ParquetWriter(root / TABLES[1], table.schema, store_schema=False, compression="zstd") as writer:
        writer.write_table(table)
    assert (root / TABLES[1]).stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CacheError, match="a row group holds [0-9,]+ bytes of text"):
        read_table(root / TABLES[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    data_or_named_error(root)


def test_an_empty_shard_file_gives_a_named_error(damaged):
    root = damaged()
    (root / SHARD[form_of(root)]).write_bytes(b"")
    with pytest.raises(CacheError, match="is shorter than its samples table says"):
        open_cache(root).read(np.arange(3))
