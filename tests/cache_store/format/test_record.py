"""Records in files: messages about misfits."""

from typing import Any, Literal

import msgspec
import pytest

from cache_store.format.record import Record, describe_mismatch
from tests.named import assert_names


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
