"""SDXL's six numbers follow from the columns of a samples table, as diffusers records them."""

import pyarrow as pa
import pytest

from cache_store import time_ids
from cache_store.errors import ConfigError


@pytest.mark.parametrize("as_table", [pa.table, dict], ids=["table", "arrays"])
def test_the_six_numbers_are_in_diffusers_order(as_table):
    """1920 x 1080 and 3000 x 4000 in diffusers' ladder at 1024."""
    columns = {"width": [1920, 3000], "height": [1080, 4000], "crop_left": [2, 4], "crop_top": [0, 7]}
    found = time_ids(as_table(columns), [(768, 1360), (1184, 880)])
    assert found.tolist() == [[1080, 1920, 0, 2, 768, 1360], [4000, 3000, 7, 4, 1184, 880]]
    assert time_ids(as_table(columns), (768, 1360))[:, 4:].tolist() == [[768, 1360]] * 2
    with pytest.raises(ConfigError, match=r"expected a bucket .*, got 768$"):
        time_ids(as_table(columns), 768)
    del columns["height"]
    for wrong in (as_table(columns), None):
        with pytest.raises(ConfigError, match="(height|width) has no whole numbers; expected columns width, height"):
            time_ids(wrong, (768, 1360))
