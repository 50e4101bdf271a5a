"""Transformers of diffusers that ignore the padding of a text: presets of their models store zeros there."""

import inspect
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

N, T, WORDS, FEATURES = 2, 12, 5, 16
"""Texts, their tokens, those that are not padding, and features of a token."""

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
IMAGE_NC22 = torch.linspace(-1, 1, N * 4 * 4).reshape(N, 4, 2, 2)
CLIP_NC122 = IMAGE_NC22[:, :, None]
TOKENS_N4C = IMAGE_NC22.flatten(2).mT

MASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "PixArt": (
        "PixArtTransformer2DModel",
        {**HEADS, "sample_size": 2, "patch_size": 1, "cross_attention_dim": 16, "caption_channels": FEATURES},
        {"hidden_states": IMAGE_NC22, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SANA": (
        "SanaTransformer2DModel",
        {
            **HEADS,
            "sample_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": FEATURES,
        },
        {"hidden_states": IMAGE_NC22},
    ),
    "Lumina-2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 2,
            "patch_size": 1,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 8, 8),
            "cap_feat_dim": FEATURES,
        },
        {"hidden_states": IMAGE_NC22},
    ),
    "Mochi": (
        "MochiTransformer3DModel",
        {
            **HEADS,
            "patch_size": 1,
            "in_channels": 4,
            "pooled_projection_dim": 16,
            "text_embed_dim": FEATURES,
            "time_embed_dim": 8,
            "max_sequence_length": T,
        },
        {"hidden_states": CLIP_NC122},
    ),
    "HunyuanVideo": (
        "HunyuanVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "guidance_embeds": False,
            "text_embed_dim": FEATURES,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 2, 4),
        },
        {"hidden_states": CLIP_NC122, "pooled_projections": torch.ones(N, 8)},
    ),
    "LTX": (
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": FEATURES},
        {"hidden_states": TOKENS_N4C, "num_frames": 1, "height": 2, "width": 2},
    ),
    "Qwen-Image": (
        "QwenImageTransformer2DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "joint_attention_dim": FEATURES, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": TOKENS_N4C, "img_shapes": [[(1, 2, 2)]] * N},
    ),
    "Krea-2": (
        "Krea2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "timestep_embed_dim": 8,
            "text_hidden_dim": FEATURES,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 24,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (2, 2, 4),
        },
        {"hidden_states": TOKENS_N4C, "position_ids": torch.zeros(T + 4, 3)},
    ),
}
"""By model: the class of its transformer, its config, and its inputs beside the text."""
TEXT_AXES = {"Krea-2": (2,)}
"""Axes between a text's tokens and features: Krea 2's transformer takes each hidden state by itself."""


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi's, which asks for float32
@pytest.mark.parametrize("model", MASKED)
def test_a_transformer_ignores_the_padding_of_a_text(model):
    """Its output is the same, to the bit, with the encoder's output there, with zeros or with large values."""
    name, config, inputs = MASKED[model]
    kind = getattr(diffusers, name)
    torch.manual_seed(0)
    transformer = kind(**config).eval()
    for weight in transformer.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)  # some begin as zeros
    (mask,) = {"encoder_attention_mask", "encoder_hidden_states_mask"} & {*inspect.signature(kind.forward).parameters}
    mask_NT = (torch.arange(T) < WORDS).expand(N, T)
    text_NTF = torch.randn(N, T, *TEXT_AXES.get(model, ()), FEATURES)
    is_word = mask_NT.reshape(N, T, *[1] * (text_NTF.dim() - 2))

    @torch.inference_mode()
    def made(text_NTF: Tensor) -> Tensor:
        text = {"encoder_hidden_states": text_NTF, mask: mask_NT, "timestep": torch.full((N,), 300.0)}
        output: Tensor = transformer(**inputs, **text, return_dict=False)[0]
        return output

    expected = made(text_NTF)
    assert (made(text_NTF.where(~is_word, 0.0)) - expected).abs().max() > 1e-4
    for value in (0.0, 9.0):
        torch.testing.assert_close(made(text_NTF.where(is_word, value)), expected, rtol=0, atol=0)
