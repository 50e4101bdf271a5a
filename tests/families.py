"""Every family of models in `make test-all`, the first ones of a kind in `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_and_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return parameters of a test, of which all but the first `quick` are slow."""
    listed = [*cases]
    rest = [each if isinstance(each, tuple) else (each,) for each in listed[quick:]]
    return [*listed[:quick], *(pytest.param(*each, marks=pytest.mark.slow) for each in rest)]
