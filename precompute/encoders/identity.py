"""The SHA-256 of a frozen encoder: what it is, however its weights were saved.

Only what encoding depends on goes in: named config values, and the encode path's weights as float32, by name. So the
hash stays when a decoder is finetuned, when float32 weights that bfloat16 holds exactly are saved as such, when a
checkpoint is split into shards, and when diffusers adds a config key with a default.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rfc8785
import torch
from torch import Tensor

from cache_store.format.schema import EncoderIdentity
from precompute.encoders.config import EncoderConfig


def weights_sha256(
    class_name: str, config: Mapping[str, Any], config_keys: Sequence[str], weights: Iterable[tuple[str, Tensor]]
) -> str:
    """Hash the chosen config values and every tensor: a line of canonical JSON that announces it, then its bytes."""
    chosen = {key: config[key] for key in sorted(config_keys)}
    digest = hashlib.sha256(json_line({"class_name": class_name, "config": chosen}))
    for name, tensor in sorted(weights, key=lambda weight: weight[0]):
        digest.update(json_line({"name": name, "dtype": "float32", "shape": list(tensor.shape)}))
        array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(array.astype("<f4", copy=False).data)  # little-endian, in row-major order
    return digest.hexdigest()


def json_line(value: Any) -> bytes:
    return rfc8785.dumps(value) + b"\n"


def native_identity(config: EncoderConfig, class_name: str, weights_sha256: str, **others: Any) -> EncoderIdentity:
    """Name an encoder that its library runs as it is, and that has neither a posterior nor a normalisation."""
    return EncoderIdentity(
        class_name=class_name,
        weights_sha256=weights_sha256,
        path="native",
        compiled=False,
        posterior="none",
        compute_dtype=config.compute_dtype,
        batch_size=config.batch_size,
        latents_mean=(),
        latents_std=(),
        **others,
    )
