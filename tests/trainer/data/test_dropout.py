"""Captions are dropped at positions that seed and rate alone decide, in every cache of texts at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cache_store import JoinedCache, open_joined
from cache_store.errors import ConfigError
from tests.make_cache import make_cache, text_recipe
from trainer import LatentStream, caption_dropped

ROWS, TOKENS, RATE = 40, 6, 0.3


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> JoinedCache:
    """Latents and two text encoders' samples, all above 1; null prompts are zeros of one token."""
    folder: Path = tmp_path_factory.mktemp("dropout")
    rng = np.random.default_rng(0)
    shapes = {"world": (4, 3, 3), "tokens": (TOKENS, 8), "more": (TOKENS, 2)}
    return open_joined(
        {
            name: make_cache(
                folder / name,
                1 + rng.random((ROWS, *shape), np.float32),
                text=None if name == "world" else text_recipe(TOKENS),
            )
            for name, shape in shapes.items()
        }
    )


def stream(cache: JoinedCache, **options: int) -> LatentStream:
    return LatentStream(cache, 4, seed=5, epochs=3, caption_dropout=RATE, **options)


def test_a_position_is_decided_by_seed_and_rate_alone():
    positions = np.arange(20_000)
    dropped = caption_dropped(positions, 0, RATE)
    assert abs(dropped.mean() - RATE) < 0.01
    scattered = np.random.default_rng(0).permutation(positions)[:500]
    np.testing.assert_array_equal(caption_dropped(scattered, 0, RATE), dropped[scattered])
    assert (caption_dropped(positions, 1, RATE) != dropped).mean() > 0.3
    assert not (dropped & ~caption_dropped(positions, 0, 2 * RATE)).any()
    assert caption_dropped(positions[:9], 0, 1.0).all()
    assert not caption_dropped(positions[:9], 0, 0.0).any()
    assert "".join(str(int(each)) for each in dropped[:24]) == "000010101001010101000000"


@pytest.mark.parametrize("options", [{}, {"shuffle_block": 4}])
def test_dropped_captions_are_null_prompts_with_their_masks_and_others_stay(joined, options):
    """Images stay too; a shuffle in blocks, which holds samples, gives them whole in a later epoch."""
    plain = LatentStream(joined, 4, seed=5, epochs=3, **options)
    for one, other in zip(plain, stream(joined, **options), strict=True):
        dropped = torch.from_numpy(caption_dropped(one["positions"], 5, RATE))
        assert torch.equal(one["latents"]["world"], other["latents"]["world"])
        for name in ("tokens", "more"):
            assert torch.equal(one["latents"][name][~dropped], other["latents"][name][~dropped])
            assert (other["latents"][name][dropped] == 0).all()
            assert (one["latents"][name] >= 1).all()
            assert torch.equal(one["mask"][name][~dropped], other["mask"][name][~dropped])
            assert other["mask"][name][dropped].sum(1).tolist() == [1] * int(dropped.sum())


def test_a_resumed_stream_and_ranks_and_workers_drop_the_same_captions(joined):
    whole = [batch["latents"]["tokens"] for batch in stream(joined)]
    resumed = stream(joined)
    resumed.load_state_dict({"cursor": 12})
    halves = zip(*(stream(joined, rank=rank, world_size=2) for rank in (0, 1)), strict=True)
    ways = [
        [*whole[:3], *(batch["latents"]["tokens"] for batch in resumed)],
        [torch.cat([part["latents"]["tokens"] for part in parts]) for parts in halves],
        [batch["latents"]["tokens"] for batch in DataLoader(stream(joined), batch_size=None, num_workers=2)],
    ]
    for way in ways:
        assert all(torch.equal(one, other) for one, other in zip(whole, way, strict=True))


def test_dropout_without_texts_or_beyond_its_range_is_refused(joined):
    with pytest.raises(ConfigError, match="caption_dropout"):
        LatentStream(joined.caches["world"], 4, caption_dropout=0.1)
    with pytest.raises(ConfigError, match=r"caption_dropout must be in \[0, 1\]"):
        LatentStream(joined, 4, caption_dropout=1.1)
