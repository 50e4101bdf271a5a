"""Pages of runs have no curves here: drawing them is five sixths of a small run, and tests/trainer/insight has it."""

from collections.abc import Iterator

import pytest

from trainer.insight import report


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "curves", lambda records: [])
        yield
