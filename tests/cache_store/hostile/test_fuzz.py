"""Whatever lies in a cache's files, a reader gets data or a named error: no crash, no hang, no large allocation."""

import copy
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.format.checksum import crc32c
from tests.cache_store.conftest import shard_name
from tests.cache_store.hostile.conftest import RECORDS, TABLES, afresh, data_or_named_error
from tests.cache_store.signing import edited_rows, resign, save

# Derandomised: the same cases every time. Longer runs: FUZZ_FACTOR=100 pytest tests/cache_store/hostile/test_fuzz.py
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))


def fuzz(examples: int) -> Callable[..., Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    options = {"derandomize": FACTOR == 1, "deadline": None, "database": None, "suppress_health_check": checks}
    return settings(max_examples=examples * FACTOR, **options)


@given(data=st.data())
@fuzz(30)
def test_bytes_changed_in_any_file_give_data_or_a_named_error(sound, tmp_path, data):
    root = afresh(sound, tmp_path)
    name = data.draw(st.sampled_from([*RECORDS, *TABLES, shard_name(root, 0)]))
    (root / name).write_bytes(mutated_bytes(data, (root / name).read_bytes()))
    if data.draw(st.booleans()):
        resign(root)
    data_or_named_error(root)


JUNK = st.one_of(st.binary(max_size=9), st.sampled_from([b"\xff" * 8, bytes(8), b"\x80" * 5, b"\x7f"]))


def mutated_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Some bytes overwritten, put in, taken out or cut off; mostly where headers, footers and indexes are."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed)))
        place = place if data.draw(st.booleans()) else max(0, len(changed) - 1 - place % 300)
        junk = data.draw(JUNK)
        width = data.draw(st.sampled_from([0, len(junk), 1, 20]))
        changed[place : place + width] = junk
        if data.draw(st.integers(0, 9)) == 0:
            del changed[place:]
    return bytes(changed)


ODD_VALUES = st.sampled_from(
    [
        *(-1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**18, -(2**63), 10**30),
        *(0.5, -0.0, 1e-320, 1e99, 1e308, -1e308, None, True, False, "", "0", "none", "zarr", "float32", "bfloat16"),
        *("../secret", "/etc/passwd", "latents/../../secret", "nul\0", "x" * 5_000, "\U0001f600", "line\nbreak\x1b[2J"),
        *([], {}, [[]], [1], [1, 2, 3], [2**31, 2**31, 1], [10**18] * 3, {"a": 1}, [1e308] * 3),
    ]
)


@given(data=st.data())
@fuzz(50)
def test_signed_records_of_odd_values_give_data_or_a_named_error(sound, tmp_path, data):
    """The value goes in and every digest over it is made anew, so that nothing but its own bounds can stop it."""
    root = afresh(sound, tmp_path)
    name = data.draw(st.sampled_from(RECORDS))
    record = msgspec.json.decode((root / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([*places(record)]))
        change(data, record, place)
    save(root / name, record)
    resign(root)
    data_or_named_error(root)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a record."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, child in children:
        yield from places(child, (*path, name))


def change(data: st.DataObject, record: Any, place: tuple[Any, ...]) -> None:
    """Replace, remove, double or rename what lies at `place`."""
    holder = record
    for step in place[:-1]:
        holder = holder[step] if isinstance(holder, dict | list) and has(holder, step) else {}
    if not has(holder, place[-1]):
        return
    action = data.draw(st.integers(0, 9))
    if action == 0:
        del holder[place[-1]]
    elif action == 1 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[place[-1]]))
    elif action == 1:
        holder[data.draw(st.sampled_from(["../x", "more", "", "a/b"]))] = copy.deepcopy(holder[place[-1]])
    else:
        holder[place[-1]] = copy.deepcopy(data.draw(ODD_VALUES))  # one that is changed in turn must not be shared


def has(holder: Any, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


@given(entries=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8), data=st.data())
@fuzz(20)
def test_a_shard_index_of_any_numbers_gives_data_or_a_named_error(sound_zarr, tmp_path, entries, data):
    """Its own crc32c, the file's digest and the seal made anew."""
    root = afresh(sound_zarr, tmp_path)
    path = root / shard_name(root, 0)
    content = path.read_bytes()
    near = st.integers(0, len(content) + 8)
    entries = [data.draw(near) if data.draw(st.booleans()) else entry for entry in entries]
    index = struct.pack("<8Q", *entries)
    path.write_bytes(content[: -len(index) - 4] + index + struct.pack("<I", crc32c(index)))
    resign(root)
    data_or_named_error(root)


INTEGERS = st.integers(-(2**63), 2**63 - 1)
PLACES = st.one_of(st.none(), INTEGERS, st.integers(-1, 300))
TABLE_CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "row": INTEGERS,
    "id": st.one_of(st.none(), st.text(max_size=3)),
    "status": st.sampled_from(["cached", "rejected", "", None, "other"]),
    "reason": st.sampled_from([None, "", ":", "missing: no", "x" * 1_000]),
    "offset": PLACES,
    "length": PLACES,
    "crc32c": st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    "content_sha256": st.one_of(st.none(), st.text(max_size=3)),
}


@given(data=st.data())
@fuzz(25)
def test_samples_tables_of_odd_values_give_data_or_a_named_error(sound, tmp_path, data):
    root = afresh(sound, tmp_path)
    with edited_rows(root / TABLES[1]) as rows:
        for _ in range(data.draw(st.integers(1, 3))):
            column = data.draw(st.sampled_from([*TABLE_CHANGES]))
            rows[data.draw(st.integers(0, len(rows) - 1))][column] = data.draw(TABLE_CHANGES[column])
        del rows[data.draw(st.sampled_from([4, 4, 4, 3, 0])) :]
    resign(root)
    data_or_named_error(root)
