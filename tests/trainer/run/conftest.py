"""Runs draw no curves here: they take five sixths of a small run, and tests/trainer/insight tests them."""

from collections.abc import Iterator

import pytest

from trainer.insight import report


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "curves", lambda records: [])
        yield
