"""Records in files: their one canonical form, which is recognised without writing it, and messages about misfits."""

import hashlib
from typing import Any, Literal

import msgspec
import pytest

from cache_store.format.record import Record, canonical_json, describe_mismatch, parse_record
from tests.named import assert_names


class Numbers(Record, frozen=True, kw_only=True):
    numbers: tuple[float, ...]
    names: dict[str, int]


CANONICAL = [
    b'{"names":{},"numbers":[]}',
    b'{"names":{"a":1,"b":2},"numbers":[0,1,-3,0.1,-17.25,0.000001,1e-7,5e-324,123456789012345680,1e+21,1e+300]}',
    '{"names":{"\\"\\\\\\n":1,"1e5":2,"[1.0,":3,"é":4},"numbers":[1]}'.encode(),
]
OTHERS = [
    b'{"names":{},"numbers": []}',
    b'{"numbers":[],"names":{}}',
    b'{"names":{"b":1,"a":2},"numbers":[]}',
    b'{"names":{"a":1,"a":2},"numbers":[]}',
    b'{"names":{"\\u00e9":1},"numbers":[]}',
    *(b'{"names":{},"numbers":[%b]}' % each for each in b"1.0 -0 -0.0 1.50 1e5 1E-7 1e-07 1e21 0.0000001".split()),
]


@pytest.mark.parametrize("data", [*CANONICAL, *OTHERS], ids=bytes.decode)
def test_bytes_that_are_not_the_canonical_form_are_told(data):
    record = parse_record(Numbers, data, "a record")
    vars(record)["digest"] = hashlib.sha256(data).hexdigest()
    assert record.is_canonical == (canonical_json(record) == data) == (data in CANONICAL)


class Inner(Record, frozen=True, kw_only=True):
    size: int
    kind: Literal["a", "b"] = "a"


class Outer(Record, frozen=True, kw_only=True):
    one: Inner
    each: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] | None = None


SOUND = {"size": 1}
MISFITS: list[tuple[Any, str]] = [
    ({}, "one"),
    ({"one": {}}, "one.size"),
    ({"one": SOUND, "two": 2}, "two"),
    ({"one": SOUND, "each": [SOUND, {"size": 1, "é`\n": 2}]}, "each[1].é`\\n"),
    ({"one": {"size": "large"}}, "one.size `int`, `str`"),
    ({"one": SOUND, "by_name": {"x": {"size": None}}}, "by_name[...].size `int`, `null`"),
    ({"one": {"size": 1, "kind": "c\nd"}}, "one.kind 'c\\nd'"),
    ([], "`object`, `array`"),
]


@pytest.mark.parametrize(("value", "names"), MISFITS, ids=[names for _, names in MISFITS])
def test_a_misfit_is_named_by_its_whole_name_on_one_line(value, names):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode(value), type=Outer)
    assert_names(said := describe_mismatch(caught.value), names)
    assert "\n" not in said
