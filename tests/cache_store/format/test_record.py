"""Records as they lie in files: one form, and whether bytes that were read are in it is told without writing it."""

import hashlib

import pytest

from cache_store.format.record import Record, canonical_json, parse_record


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
