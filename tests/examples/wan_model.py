"""A Wan transformer with random weights, small in all but its patches."""

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel


def save_transformer(folder: Path, channels: int, text_features: int) -> Path:
    """Save a transformer as a pipeline does, for latents of `channels` and texts of `text_features`."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
    latents = {"in_channels": channels, "out_channels": channels, "patch_size": (1, 2, 2)}
    model = WanTransformer3DModel(**heads, **latents, text_dim=text_features, freq_dim=16, ffn_dim=24)
    model.save_pretrained(folder / "transformer")
    return folder
