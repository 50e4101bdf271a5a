import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precompute.encoders.config import EncoderConfig
from precompute.encoders.identity import weights_sha256
from precompute.encoders.registry import load_encoder


def saved_hash(vae: Any, folder: Path, **save: Any) -> str:
    vae.save_pretrained(folder, **save)
    return folder_hash(folder)


def folder_hash(folder: Path, **config: Any) -> str:
    return load_encoder(EncoderConfig(model=str(folder), device="cpu", **config), "signed").identity.weights_sha256


@pytest.fixture
def vae(narrow_vae: Callable[..., Any]) -> Any:
    """Of weights that are exact in bfloat16."""
    return narrow_vae().to(torch.bfloat16).float()


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("encoder.conv_in.weight", False),
        ("encoder.mid_block.resnets.1.norm2.gamma", False),
        ("encoder.conv_out.bias", False),
        ("quant_conv.weight", False),
        ("decoder.conv_in.weight", True),
        ("post_quant_conv.bias", True),
    ],
)
def test_the_hash_follows_every_weight_of_the_encode_path(vae, tmp_path, name, is_same):
    before = saved_hash(vae, tmp_path / "before")
    vae.get_parameter(name).data.view(-1)[-1] += 0.25
    assert (saved_hash(vae, tmp_path / "after") == before) == is_same


def test_a_config_key_beside_the_encode_path_changes_nothing(vae, tmp_path):
    before = saved_hash(vae, tmp_path)
    edit_config(tmp_path, dropout=0.5, scale_factor_temporal=2)
    assert folder_hash(tmp_path) == before


def test_the_hash_follows_class_chosen_config_and_named_weights():
    ones = torch.ones(2, 3)
    hashed = {
        weights_sha256(class_name, config, ["dim", "more"], [(name, weight)])
        for class_name in ("A", "B")
        for config in ({"dim": 1, "more": 1}, {"dim": 2, "more": 1}, {"dim": 1, "more": 2})
        for name in ("first", "second")
        for weight in (ones, ones.T, 2 * ones)
    }
    assert len(hashed) == 2 * 3 * 2 * 3


def test_the_hash_is_of_values_not_of_files(vae, tmp_path):
    whole = saved_hash(vae, tmp_path / "whole")
    sharded = saved_hash(vae, tmp_path / "sharded", max_shard_size="100KB")
    narrow = saved_hash(vae.to(torch.bfloat16), tmp_path / "bfloat16")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert whole == sharded == narrow


def test_the_hash_does_not_depend_on_how_the_encoder_runs(vae, tmp_path):
    vae.save_pretrained(tmp_path)
    folded = folder_hash(tmp_path, compute_dtype="float32")
    assert folder_hash(tmp_path, fold=False, compute_dtype="bfloat16") == folded


def edit_config(folder: Path, **changes: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
