from pathlib import Path

import numpy as np
import pytest

from tests.make_cache import make_cache

ROWS, REJECTED = 30, (3, 9, 29)
CACHED_ROWS = [row for row in range(ROWS) if row not in REJECTED]


@pytest.fixture(scope="session")
def latents() -> np.ndarray:
    """float32 [30, 4, 6, 5], each value exact in float16."""
    values = np.random.default_rng(7).standard_normal((ROWS, 4, 6, 5))
    return values.astype(np.float16).astype(np.float32)


@pytest.fixture
def cache(tmp_path: Path, latents: np.ndarray) -> Path:
    """Four shards of up to 8 rows, three rows rejected."""
    return make_cache(tmp_path / "cache", latents, rejected=REJECTED)
