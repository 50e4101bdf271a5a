"""Refusals: a short table and the command that fits."""

import pytest

from cache_store.errors import StaleError
from cache_store.refusal import CELL, SHOWN_ROWS, Difference, differing, refuse, shorten


def message_of(*differences: Difference, held: str = "in the cache") -> list[str]:
    with pytest.raises(StaleError) as caught:
        refuse("it does not fit", differences, ["run this"], held)
    return str(caught.value).splitlines()


def test_a_refusal_is_a_summary_an_aligned_table_and_the_remedy():
    assert message_of(Difference("size", "224", "256"), Difference("weights", "a" * 64, "b" * 64)) == [
        "it does not fit",
        "  field    in the cache   now",
        "  size     224            256",
        "  weights  aaaaaaaaaaaa…  bbbbbbbbbbbb…",
        "  run this",
    ]


def test_a_table_shows_a_dozen_rows_and_counts_the_others():
    lines = message_of(*[Difference(f"field {number}", "1", "2") for number in range(SHOWN_ROWS + 30)])
    assert len(lines) == SHOWN_ROWS + 4
    assert lines[-2:] == ["  and 30 more", "  run this"]


@pytest.mark.parametrize(
    ("before", "now"),
    [("x" * 500 + "1" + "y" * 500, "x" * 500 + "2" + "y" * 500), ("x" * 80, "x" * 81), ("short", "x" * 80)],
)
def test_long_values_are_cut_to_what_tells_them_apart(before: str, now: str):
    shown = shorten(before, now)
    assert shown[0] != shown[1]
    assert max(map(len, shown)) <= CELL + 2


def test_names_from_others_files_cannot_write_on_the_terminal():
    assert "".join(message_of(Difference("image of a\nb\x1b[2J", "1", "2"))).isprintable()


def test_nested_fields_are_named_by_their_path():
    before = {"a": {"b": 1, "c": [1, 2]}, "gone": 0}
    now = {"a": {"b": 1, "c": [1, 3]}, "new": 0}
    assert differing(before, now) == [("a.c", "[1, 2]", "[1, 3]"), ("gone", "0", "absent"), ("new", "absent", "0")]
