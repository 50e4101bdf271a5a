"""Refusals: a short table and the command that fits."""

import pytest

from cache_store.errors import StaleError
from cache_store.messages import SHOWN_ROWS, Difference, refuse


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
