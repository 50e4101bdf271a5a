from typing import Any

import pytest
import torch
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders import folded_wan
from precompute.encoders.folded_wan import FoldedWanEncoder, normalize_in_blocks, normalize_whole


def pixels(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def diffusers_moments(vae: Any, image: Tensor) -> Tensor:
    return vae.encode(image.unsqueeze(2)).latent_dist.parameters.squeeze(2)  # type: ignore[no-any-return]


def largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def rms_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).square().mean().sqrt())


@pytest.mark.parametrize(("height", "width", "scale"), [(64, 64, 1), (48, 80, 1), (8, 8, 1), (32, 32, 127.5)])
def test_folded_equals_diffusers_on_the_full_size_architecture(full_size_vae, height, width, scale):
    """Also where the input is not normalised."""
    image = (pixels(2, 3, height, width) + (scale != 1)) * scale
    with torch.inference_mode():
        expected = diffusers_moments(full_size_vae, image)
        folded = FoldedWanEncoder(full_size_vae, torch.float32)(image)
    assert expected.shape == (2, 32, height // 8, width // 8)
    assert expected[:, :16].std() > 0.05
    assert largest_difference(folded, expected) < 1e-5


def test_bfloat16_rounds_no_worse_than_diffusers_bfloat16(full_size_vae, narrow_vae):
    image = pixels(2, 3, 64, 64)
    rounded = narrow_vae(base_dim=96)
    rounded.load_state_dict(full_size_vae.state_dict())
    rounded = rounded.bfloat16()
    with torch.inference_mode():
        exact = diffusers_moments(full_size_vae, image)
        folded = FoldedWanEncoder(full_size_vae, torch.bfloat16)(image.bfloat16())
        theirs = diffusers_moments(rounded, image.bfloat16())
    assert folded.dtype == torch.bfloat16
    assert 0 < rms_difference(folded, exact) < rms_difference(theirs, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folded_weights_lie_channels_last_as_the_pixels_do(narrow_vae, dtype):
    modules = FoldedWanEncoder(narrow_vae(), dtype).modules()
    weights = [module.weight for module in modules if isinstance(module, torch.nn.Conv2d)]
    assert len(weights) > 10
    for weight in weights:
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()


@pytest.mark.parametrize(
    "config",
    [
        {"base_dim": 12, "num_res_blocks": 1},
        {"dim_mult": [1, 2], "temperal_downsample": [True]},
        {"dim_mult": [2, 1, 3, 1], "z_dim": 5},
        {"num_res_blocks": 3},
    ],
)
def test_every_shape_of_wan_2_1_folds(narrow_vae, config):
    vae = narrow_vae(**config)
    image = pixels(2, 3, 40, 24)
    with torch.inference_mode():
        folded = FoldedWanEncoder(vae, torch.float32)(image)
        assert largest_difference(folded, diffusers_moments(vae, image)) < 1e-5


def test_attention_at_several_scales_folds(narrow_vae):
    vae = narrow_vae(attn_scales=[0.5, 0.25])
    image = pixels(2, 3, 32, 48)
    with torch.inference_mode():
        # diffusers' encode hands its frame cache to attention blocks, which take none; without it, frame one is exact.
        expected = vae.quant_conv(vae.encoder(image.unsqueeze(2))).squeeze(2)
        folded = FoldedWanEncoder(vae, torch.float32)(image)
    assert largest_difference(folded, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_latent_does_not_depend_on_the_number_of_threads(full_size_vae, dtype):
    network = FoldedWanEncoder(full_size_vae, dtype)
    image = pixels(1, 3, 72, 104).to(dtype)  # odd enough that threads' shares are no multiples of a vector
    before = torch.get_num_threads()
    latents = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            with torch.inference_mode():
                latents.append(network(image))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(latents[0], other) for other in latents[1:])


@pytest.mark.parametrize("silu", [True, False])
def test_both_normalisations_agree(silu, monkeypatch):
    monkeypatch.setattr(folded_wan, "BLOCK_ELEMENTS", 96 * 8)
    x, gain = pixels(2, 5, 7, 96), pixels(96)
    blocks = normalize_in_blocks(x, gain, silu, out=torch.empty_like(x))
    torch.testing.assert_close(blocks, normalize_whole(x, gain, silu), rtol=1e-5, atol=1e-6)
    assert torch.equal(normalize_in_blocks(x, gain, silu, out=x), blocks)


def test_a_pixel_of_zeros_stays_zero():
    zeros = torch.zeros(1, 2, 2, 8)
    assert normalize_in_blocks(zeros, torch.ones(8), True, out=torch.empty_like(zeros)).eq(0).all()
    assert normalize_whole(zeros, torch.ones(8), True).eq(0).all()


def test_folding_copies_so_that_the_model_can_be_dropped(narrow_vae):
    vae = narrow_vae()
    network = FoldedWanEncoder(vae, torch.float32)
    image = pixels(1, 3, 16, 16)
    with torch.inference_mode():
        before = network(image)
        for weight in vae.parameters():
            weight.data.zero_()
        assert torch.equal(network(image), before)
    assert not any(weight.requires_grad for weight in network.parameters())


@pytest.mark.parametrize("config", [{"is_residual": True}, {"patch_size": 2, "in_channels": 12, "out_channels": 12}])
def test_wan_2_2_is_refused_with_the_way_out(narrow_vae, config):
    with pytest.raises(ConfigError, match="set encoder.fold: false"):
        FoldedWanEncoder(narrow_vae(**config), torch.float32)
