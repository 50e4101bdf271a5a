"""SDXL's six numbers follow from the columns of a samples table, as diffusers and as sd-scripts record them."""

import numpy as np
import pyarrow as pa
import pytest

from cache_store import time_ids
from cache_store.conditioning import letterbox
from cache_store.errors import ConfigError

STORED = (
    ((1024, 1024), (1024, 1024), (0, 0, 1024, 1024)),
    ((1920, 1080), (1024, 576), (0, 0, 1024, 576)),
    ((768, 512), (1024, 704), (0, 10, 1024, 692.6666666666666)),
    ((500, 333), (1024, 704), (0, 11, 1024, 692.984)),
    ((3000, 4000), (896, 1152), (16, 0, 880, 1152)),
    ((2560, 1080), (1536, 640), (9, 0, 1526.037037037037, 640)),
)
"""Image, bucket (width, height) and sd-scripts' crop_ltrb: BucketManager.get_crop_ltrb, revision 48d368f."""


@pytest.mark.parametrize("as_table", [pa.table, dict], ids=["table", "arrays"])
def test_the_six_numbers_are_in_diffusers_order(as_table):
    """1920 x 1080 and 3000 x 4000 in diffusers' ladder at 1024."""
    columns = {"width": [1920, 3000], "height": [1080, 4000], "crop_left": [2, 4], "crop_top": [0, 7]}
    found = time_ids(as_table(columns), [(768, 1360), (1184, 880)])
    assert found.tolist() == [[1080, 1920, 0, 2, 768, 1360], [4000, 3000, 7, 4, 1184, 880]]
    assert time_ids(as_table(columns), (768, 1360))[:, 4:].tolist() == [[768, 1360]] * 2
    del columns["height"]
    for wrong in (as_table(columns), None):
        with pytest.raises(ConfigError, match="(height|width) has no whole numbers; expected columns width, height"):
            time_ids(wrong, (768, 1360))
    with pytest.raises(ConfigError, match=r"expected a bucket .*, got 768$"):
        time_ids(as_table({**columns, "height": [1080, 4000]}), 768)
    columns["height"] = [1080, 4000]
    with pytest.raises(ConfigError, match="kohya"):
        time_ids(as_table(columns), (768, 1360), "kohya")  # type: ignore[arg-type]


def test_sd_scripts_stored_crops_are_those_of_a_letterbox():
    sizes, buckets, stored = (np.array(column) for column in zip(*STORED, strict=True))
    np.testing.assert_array_equal(letterbox(*sizes.T, buckets[:, ::-1]), stored)
    found = time_ids({"width": sizes[:, 0], "height": sizes[:, 1]}, buckets[:, ::-1], "sd-scripts")
    expected = np.column_stack([sizes[:, ::-1], stored[:, [1, 0]], buckets[:, ::-1]])
    np.testing.assert_array_equal(found, expected)
