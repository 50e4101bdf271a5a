"""Refusals: a short table and the command that fits."""

import pytest

from cache_store.errors import StaleError
from cache_store.messages import SHOWN_ROWS, Difference, differences_between, refuse


def message_of(*differences: Difference) -> list[str]:
    with pytest.raises(StaleError) as caught:
        refuse("it does not fit", differences, ["run this"])
    return str(caught.value).splitlines()


def test_a_refusal_is_a_summary_an_aligned_table_and_the_remedy():
    assert message_of(Difference("size", "224", "256"), Difference("weights\x1b[2J\n", "a" * 64, "b" * 64)) == [
        "it does not fit",
        r"  field             in the cache   now",
        r"  size              224            256",
        r"  weights\x1b[2J\n  aaaaaaaaaaaa…  bbbbbbbbbbbb…",
        "  run this",
    ]
    lines = message_of(*[Difference(f"field {number}", "1", "2") for number in range(SHOWN_ROWS + 30)])
    assert len(lines) == SHOWN_ROWS + 4
    assert lines[-2:] == ["  and 30 more", "  run this"]


def test_nested_fields_are_named_by_their_path():
    before, now = {"a": {"b": 1, "c": [1, 2]}, "gone": 0}, {"a": {"b": 1, "c": [1, 3]}, "new": 0}
    assert differences_between(before, now) == [
        ("a.c", "[1, 2]", "[1, 3]"),
        ("gone", "0", "absent"),
        ("new", "absent", "0"),
    ]
