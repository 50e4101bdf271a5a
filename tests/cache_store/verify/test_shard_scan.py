"""Reading a shard file once, for its samples."""

from pathlib import Path

import numpy as np
import pytest

from cache_store.cache.metadata import read_spec
from cache_store.format.checksum import crc32c
from cache_store.format.layout import Location
from cache_store.format.schema import ArraySpec
from cache_store.verify.scan import PIECE_BYTES, scan_shard
from tests.make_cache import make_cache

SHAPE = (16, 28, 28)
SAMPLES = 30
"""In three pieces."""


@pytest.fixture
def array(tmp_path: Path) -> ArraySpec:
    """Float16 samples, stored as they are."""
    cache = make_cache(tmp_path / "cache", np.zeros((1, *SHAPE), np.float32))
    return read_spec(cache).array


@pytest.mark.parametrize("gap", [0, 2, 3, 1_536, 2 * PIECE_BYTES], ids=lambda gap: f"gap {gap}")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan], ids=str)
def test_non_finite_values_are_counted_wherever_their_sample_lies(
    gap: int, value: float, array: ArraySpec, tmp_path: Path
) -> None:
    """The gaps hold no finite values at all, and an odd one sets the samples where no value can be read in place."""
    samples = finite_samples()
    samples[[0, 9, 10, SAMPLES - 1], 5, 7, 9] = value
    path, locations = write_samples(tmp_path / "shard", samples, gap)
    expected = [(slot, "holds 1 non-finite values") for slot in (0, 9, 10, SAMPLES - 1)]
    assert scan(path, array, locations) == expected


def test_only_samples_that_lie_in_others_are_blamed_for_it(array: ArraySpec, tmp_path: Path) -> None:
    path, locations = write_samples(tmp_path / "shard", finite_samples(), gap=4)
    moved = [*locations]
    moved[12] = locations[11]._replace(offset=locations[11].offset + 2)
    ((slot, problem),) = scan(path, array, moved)
    assert slot == 12
    assert "where another sample lies too" in problem


def test_a_sample_of_other_length_is_named_under_a_right_crc32c(array: ArraySpec, tmp_path: Path) -> None:
    path, locations = write_samples(tmp_path / "shard", finite_samples(), gap=4)
    offset, length, _ = locations[3]
    payload = path.read_bytes()[offset : offset + length - 2]
    shorter = [*locations]
    shorter[3] = Location(offset, len(payload), crc32c(payload))
    assert [slot for slot, _ in scan(path, array, shorter)] == [3]


def scan(path: Path, array: ArraySpec, locations: list[Location]) -> list[tuple[int, str]]:
    with path.open("rb") as stream:
        return scan_shard(stream, array, locations)


def finite_samples() -> np.ndarray:
    """[N, C, H, W] float16, with the largest finite values of either sign."""
    samples = np.random.default_rng(0).standard_normal((SAMPLES, *SHAPE)).astype("<f2")
    samples[:, 0, 0, :2] = 65_504, -65_504
    return samples


def write_samples(path: Path, samples: np.ndarray, gap: int) -> tuple[Path, list[Location]]:
    """The samples, each after `gap` bytes of ones."""
    payloads = [sample.tobytes() for sample in samples]
    path.write_bytes(b"".join(b"\xff" * gap + payload for payload in payloads))
    stride = gap + len(payloads[0])
    places = [Location(gap + slot * stride, len(each), crc32c(each)) for slot, each in enumerate(payloads)]
    return path, places
