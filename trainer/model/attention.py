"""Attention in which the tokens of an image see each other, and text sees what is before it.

Only what a model is given besides its embeddings changes: masks, in the forms that transformers' models take.
"""
# Axes: N samples, T positions; Q of them as queries, K as keys.

from typing import Any

import torch
from torch import Tensor

CAUSAL = -1
"""Block of a token that sees only those before it."""

Masks = Tensor | dict[str, Tensor]
"""[N, 1, Q, K] for all layers, or for each type of layer by its name."""


def image_masks(config: Any, block_NT: Tensor, dtype: torch.dtype, is_padding_NT: Tensor | None = None) -> Masks:
    """Masks under which tokens of equal `block` see each other too, unless it is CAUSAL.

    Sliding windows and chunks bound how far a token sees, as in transformers' Gemma 3 and Llama 4. A padding token sees
    itself, so that its row is not empty, and no other sees it.
    """
    place_T = torch.arange(block_NT.shape[1], device=block_NT.device)
    same_NQK = (block_NT[:, :, None] == block_NT[:, None]) & (block_NT[:, :, None] != CAUSAL)
    seen_NQK = (place_T <= place_T[:, None]) | same_NQK
    if is_padding_NT is not None:
        seen_NQK = (seen_NQK & ~is_padding_NT[:, None]) | torch.eye(
            len(place_T), dtype=torch.bool, device=place_T.device
        )
    near_NQK, chunk_NQK = seen_NQK, seen_NQK
    if (window := getattr(config, "sliding_window", None)) is not None:
        near_NQK = seen_NQK & (place_T > place_T[:, None] - window)
    if (size := getattr(config, "attention_chunk_size", None)) is not None:
        padding_N1 = 0 if is_padding_NT is None else is_padding_NT.sum(1, keepdim=True)
        chunk_NT = (place_T[None] - padding_N1) // size  # padding stands before a text
        chunk_NQK = seen_NQK & (chunk_NT[:, :, None] == chunk_NT[:, None])
    bounded = {"sliding_attention": near_NQK, "chunked_attention": chunk_NQK}
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return as_given(config, near_NQK[:, None], dtype)
    return {kind: as_given(config, bounded.get(kind, seen_NQK)[:, None], dtype) for kind in set(kinds)}


def as_given(config: Any, seen_N1QK: Tensor, dtype: torch.dtype) -> Tensor:
    """As the model's attention takes it: truth values, or what is added to its logits."""
    if config._attn_implementation == "eager":
        return torch.zeros_like(seen_N1QK, dtype=dtype).masked_fill(~seen_N1QK, torch.finfo(dtype).min)
    return seen_N1QK
