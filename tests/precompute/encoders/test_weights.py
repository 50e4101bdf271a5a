"""The hash of an encoder follows the values that encoding depends on, however and wherever they are saved."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.precompute.encoders.loading import changed_config, load
from tests.precompute.encoders.towers import PATCHES, random_model


def hash_of(folder, **options):
    return load(folder, **options).identity.weights_sha256


def test_a_vaes_hash_follows_its_encode_path_only(vae, tmp_path):
    """It does not depend on its files, the decoder, or on how the encoder runs."""
    folder = tmp_path / "vae"
    vae.save_pretrained(folder)
    hashed = hash_of(folder)
    changed_config(dropout=0.5, scale_factor_temporal=2)(folder)
    held = load_file(folder / "diffusion_pytorch_model.safetensors")
    encode_path = {name: each for name, each in held.items() if name.startswith(("encoder.", "quant_conv."))}
    save_file(encode_path, folder / "diffusion_pytorch_model.safetensors")
    assert hash_of(folder, fold=False, compute_dtype="bfloat16") == hashed
    vae.decoder.conv_in.weight.data += 0.25
    vae.bfloat16().save_pretrained(tmp_path / "bfloat16")
    assert hash_of(tmp_path / "bfloat16") == hashed
    vae.float().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert hash_of(tmp_path / "sharded") == hashed
    for name in ("encoder.conv_in.weight", "encoder.mid_block.resnets.1.norm2.gamma", "quant_conv.bias"):
        vae.get_parameter(name).data.view(-1)[-1] += 0.25
        vae.save_pretrained(tmp_path / "changed")
        assert hash_of(tmp_path / "changed") != hashed
        vae.get_parameter(name).data.view(-1)[-1] -= 0.25


def test_a_towers_hash_follows_its_weights_only(tmp_path):
    """It is the same alone, in other models, under the names of older versions, in several files, in bfloat16."""
    siglip = random_model("SiglipVisionModel").bfloat16().float()
    siglip.save_pretrained(tmp_path / "alone")
    hashed, config = hash_of(tmp_path / "alone"), siglip.config.to_dict()

    def save(name: str, weights: dict[str, Tensor], **config: object) -> None:
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    weights = {name: each for name, each in siglip.state_dict().items() if not name.startswith("head.")}
    names = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
    for number, prefix in enumerate(names):
        held = {f"{prefix}{name}": each.bfloat16() for name, each in weights.items()}
        save(f"gemma{number}", held, architectures=["Gemma3ForConditionalGeneration"], vision_config=config)
        assert hash_of(tmp_path / f"gemma{number}") == hashed
    held = {f"vision_model.{name}": each for name, each in weights.items()}
    held["text_model.encoder.layers.0.mlp.fc1.bias"] = torch.zeros(3)
    held["vision_model.embeddings.position_ids"] = torch.arange(PATCHES)  # saved by older versions
    save("siglip", held, architectures=["SiglipModel"], vision_config=config)
    assert hash_of(tmp_path / "siglip") == hashed
    siglip.save_pretrained(tmp_path / "files", max_shard_size="4KB")
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    assert hash_of(tmp_path / "files", compute_dtype="bfloat16") == hashed
    siglip.encoder.layers[1].mlp.fc2.bias.data[-1] += 0.25
    siglip.save_pretrained(tmp_path / "other")
    assert hash_of(tmp_path / "other") != hashed
