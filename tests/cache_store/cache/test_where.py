"""Samples are chosen by an expression over their columns."""

import numpy as np
import pytest

from cache_store import Cache, open_cache, open_joined
from cache_store.cache import where
from cache_store.errors import ConfigError
from tests.make_cache import make_cache

COUNT = 20
SCORES = [None if row % 5 == 4 else row / 2 for row in range(COUNT)]
SPLITS = ["val" if row % 3 == 0 else "train" for row in range(COUNT)]
EXTRA = {
    "score": SCORES,
    "split": SPLITS,
    "number": [*range(COUNT)],
    "is_good": [None if row == 9 else row % 2 == 0 for row in range(COUNT)],
    "tags": [["a"]] * COUNT,
}


@pytest.fixture
def cache(tmp_path) -> Cache:
    latents = np.zeros((COUNT, 1, 2, 2), np.float32)
    return open_cache(make_cache(tmp_path / "cache", latents, extra=EXTRA, rejected=[2, 11]))


def rows_where(cache: Cache, expression: str) -> list[int]:
    rows: list[int] = cache.samples(cache.where(expression), ["row"])["row"].to_pylist()
    return rows


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("score > 5 and split == 'train'", [13, 16, 17]),
        ("not score > 1", [0, 1]),
        ("score is null", [4, 9, 14, 19]),
        ("score is not null and number >= 15", [15, 16, 17, 18]),
        ("number in [3, 11, 12]", [3, 12]),
        ("split not in ('train',) and number < 7", [0, 3, 6]),
        ("(split == 'val' or number == 1) and number < 4", [0, 1, 3]),
        ("is_good and number < 7", [0, 4, 6]),
        ("number == -1 or score == number", [0]),
        ("height != 48 or id == 'sample-000005'", [5]),
        ("score > 1e400", []),
    ],
)
def test_an_expression_chooses_samples_whose_columns_make_it_true(cache, monkeypatch, expression, rows):
    """Rows 2 and 11 are rejected. An absent value is neither more nor less than a number, as in SQL."""
    assert rows_where(cache, expression) == rows
    monkeypatch.setattr(where, "ROWS_AT_ONCE", 3)
    assert rows_where(cache, expression) == rows
    assert rows_where(open_joined({"world": cache}), expression) == rows  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("skore > 5", "skore"),
        ("score >", "character 8"),
        ("score > 5 &", "character 12"),
        ("score > 5 or len(split) > 2", "no column len"),
        ("score == number.real", "character 10"),
        ("score in []", "character 10"),
        ("score > 99999999999999999999", "character 9"),
        ("5 > 3", "character 1"),
        ("", "character 1"),
        ("score > 'a'", "score is double"),
        ("tags == 'a'", "tags is list"),
        ("(" * 300 + "score > 1" + ")" * 300, "character"),
        ("not " * 5_000 + "is_good", "20,007 characters"),
        ("score > 1\0", "character"),
        ("split == 'Zürich' and 5", "character 23;"),
        ("(score > 1 and\nnumber + )", "character 25;"),
    ],
)
def test_what_cannot_be_read_is_named_on_one_line(cache, expression, named):
    with pytest.raises(ConfigError, match=r"\Awhere: [^\n]*\Z") as refused:
        cache.where(expression)
    assert named in str(refused.value)
