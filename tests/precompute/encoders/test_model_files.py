"""Finding and loading models: what works from a folder and the Hub's cache, and what is refused in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache_store.errors import EncodeOnceError
from precompute.encoders.model_files import find_model
from tests.precompute.encoders.conftest import narrow_vae
from tests.precompute.encoders.loading import Spoil, changed_config, changed_weights, load
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.encoders.towers import PATCHES, random_model, save_model


def refusal(model: str | Path, **options: Any) -> tuple[int, str]:
    """Return a program's exit code and its line."""
    with pytest.raises(EncodeOnceError) as caught:
        load(model, **options)
    assert "\n" not in str(caught.value)
    return caught.value.exit_code, str(caught.value)


@pytest.fixture
def vae_folder(tmp_path: Path) -> Path:
    """A pipeline's folder with a narrow VAE in its subfolder `vae`."""
    narrow_vae().save_pretrained(tmp_path / "pipeline" / "vae")
    return tmp_path / "pipeline"


def test_the_subfolder_is_found_although_a_pipeline_has_a_config(vae_folder):
    (vae_folder / "config.json").write_text('{"_class_name": "SomePipeline"}')
    assert find_model(str(vae_folder)).subfolder == "vae"


def test_a_pipeline_that_stacks_cells_in_another_order_is_refused(tmp_path):
    """Its VAE is of the class of FLUX.2's."""
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text('{"_class_name": "AutoencoderKLFlux2"}')
    (tmp_path / "model_index.json").write_text('{"_class_name": "Ideogram4Pipeline"}')
    for model in (tmp_path, tmp_path / "vae"):
        assert "Ideogram4Pipeline" in refusal(model)[1]


LOAD = """
import sys
from cache_store.program.running import run_program
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig

def load(models):
    for model in models:
        identity = load_encoder(EncoderConfig(model=model, device="cpu"), ImageConfig().recipe).identity
        print(identity.weights_sha256, "after" if "diffusers" in sys.modules else "without", "importing diffusers")

sys.exit(run_program("precompute", load, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_hub_id_loads_offline_from_the_hubs_cache(vae_folder, tmp_path):
    """An absent one ends in one line; diffusers, whose import takes seconds, is not imported for Wan."""
    digest = load(vae_folder).identity.weights_sha256
    repo, commit = tmp_path / "models--org--pipeline", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("snapshots", "refs"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    vae_folder.rename(repo / "snapshots" / commit)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, "org/pipeline", "org/absent"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (1, f"{digest} without importing diffusers\n")
    said = [line for line in done.stderr.splitlines() if "error" in line]
    assert [line.partition(" org/absent ")[0] for line in said] == ["precompute: error: encoder.model"]


VAE_FILE, TOWER_FILE = "diffusion_pytorch_model.safetensors", "model.safetensors"


def lose(file: str, name: str) -> Spoil:
    return changed_weights(file, lambda held: {each: held[each] for each in {*held} - {name}})


def pickle_weights(folder: Path) -> None:
    """Replace the weights with pickles, which make a folder if they are loaded."""
    for name in (VAE_FILE, "diffusion_pytorch_model.bin"):
        (folder / name).write_text(f"cos\nmkdir\n(V{folder / 'loaded'}\ntR.")


BIAS = "encoder.conv_out.bias"
LOST = "vision_tower.encoder.layers.1.mlp.fc1.bias"
T5_WEIGHT = "encoder.block.2.layer.0.SelfAttention.q.weight"
GEMMA = "Gemma3ForConditionalGeneration"
SPOILT: list[tuple[str, Spoil, int, str]] = [
    ("vae", changed_weights(VAE_FILE, lambda held: held | {"encoder.x": held[BIAS].clone()}), 1, "encoder.x"),
    ("vae", changed_weights(VAE_FILE, lambda held: held | {BIAS: held[BIAS][1:].clone()}), 1, BIAS),
    ("vae", changed_config(latents_std=[1.0, 2.0]), 1, "latents_std"),
    ("vae", lambda folder: (folder / "config.json").unlink(), 2, "vae/config.json"),
    ("vae", lambda folder: os.truncate(folder / VAE_FILE, 5_000), 1, VAE_FILE),
    ("vae", pickle_weights, 1, VAE_FILE),
    (GEMMA, lose(TOWER_FILE, LOST), 1, "encoder.layers.1.mlp"),
    (GEMMA, changed_config(mm_tokens_per_image=400), 2, "encoder.pool"),
    (GEMMA, changed_config(architectures=["Gemma3ForCausalLM"]), 2, "source.text"),
    ("text_encoder", lose(TOWER_FILE, T5_WEIGHT), 1, T5_WEIGHT),
    ("text_encoder", lambda folder: shutil.rmtree(folder.parent / "tokenizer"), 1, "/tokenizer"),
]
"""For each spoilt model: its folder, the damage, the exit code, and the name that the line must have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    narrow_vae().save_pretrained(folder / "vae/vae")
    save_model(GEMMA, folder / GEMMA / GEMMA)
    save_text_encoder("T5EncoderModel", folder / "text_encoder")
    return folder


@pytest.mark.parametrize(("kind", "spoil", "code", "named"), SPOILT)
def test_a_model_that_is_not_whole_and_known_is_refused(models, tmp_path, kind, spoil, code, named):
    """Whether a VAE is folded or run by diffusers; no pickle is loaded in its place."""
    folder = shutil.copytree(models / kind, tmp_path / "pipeline")
    spoil(folder / kind)
    options = {"max_tokens": 8} if kind == "text_encoder" else {}
    for each in ({"fold": True}, {"fold": False}) if kind == "vae" else (options,):
        found, said = refusal(folder / kind if kind == GEMMA else folder, **each)
        assert (found, named in said) == (code, True), said
    assert not (folder / kind / "loaded").exists()


# The hash of an encoder follows what encoding depends on, however and wherever it is saved.


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

    weights = {name: each for name, each in siglip.state_dict().items() if not name.startswith("head.")}
    kinds = {
        **dict.fromkeys(("model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower."), GEMMA),
        "vision_model.": "SiglipModel",
    }
    for number, (prefix, kind) in enumerate(kinds.items()):
        held = {f"{prefix}{name}": each.bfloat16() for name, each in weights.items()}
        held[f"{prefix}embeddings.position_ids"] = torch.arange(PATCHES)  # saved by older versions
        (folder := tmp_path / str(number)).mkdir()
        save_file(held, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architectures": [kind], "vision_config": config}))
        assert hash_of(folder) == hashed
    siglip.save_pretrained(tmp_path / "files", max_shard_size="4KB")
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    assert hash_of(tmp_path / "files", compute_dtype="bfloat16") == hashed
    siglip.encoder.layers[1].mlp.fc2.bias.data[-1] += 0.25
    siglip.save_pretrained(tmp_path / "other")
    assert hash_of(tmp_path / "other") != hashed
