"""Finding and loading models: what works from a folder and the Hub's cache, and what is refused in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import EncodeOnceError
from precompute.encoders.model_files import find_model
from tests.precompute.encoders.conftest import narrow_vae
from tests.precompute.encoders.loading import Spoil, changed_config, changed_weights, load
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.encoders.towers import random_model, save_model


def refusal(model: str | Path, **options: Any) -> tuple[int, str]:
    """Return a program's exit code and its line."""
    with pytest.raises(EncodeOnceError) as caught:
        load(model, **options)
    assert "\n" not in str(caught.value)
    return caught.value.exit_code, str(caught.value)


@pytest.fixture
def gemma_without_language(tmp_path: Path) -> Path:
    """A checkpoint in several files, of which only those with the vision tower are there."""
    random_model(GEMMA).save_pretrained(folder := tmp_path / "gemma", max_shard_size="8KB")
    files = json.loads((folder / f"{TOWER_FILE}.index.json").read_text())["weight_map"]
    for file in {*files.values()} - {file for name, file in files.items() if "tower" in name}:
        (folder / file).unlink()
    return folder


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


def run(hub_cache: Path, *models: str, **variables: str) -> list[str]:
    """Load models in a process with that local Hub cache, which ends with code 1; return its lines."""
    environment = os.environ | {"HF_HUB_CACHE": str(hub_cache), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", LOAD, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


ERROR = "precompute: error: encoder.model org/absent "


def move_to_hub_cache(folder: Path, hub_cache: Path, name: str) -> None:
    """Move a model's folder into a local Hub cache, as `org/name`."""
    repo, commit = hub_cache / f"models--org--{name}", "0123456789abcdef0123456789abcdef01234567"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    folder.rename(repo / "snapshots" / commit)


@pytest.mark.slow
def test_a_hub_id_loads_offline_from_the_files_of_its_encoder(vae_folder, gemma_without_language, tmp_path):
    """An absent one ends in one line; diffusers, whose import takes seconds, is not imported for these encoders."""
    folders = vae_folder, gemma_without_language
    digests = [load(folder, compute_dtype="bfloat16").identity.weights_sha256 for folder in folders]
    move_to_hub_cache(vae_folder, tmp_path, "pipeline")
    move_to_hub_cache(gemma_without_language, tmp_path, "gemma")
    first, second, *said = run(tmp_path, "org/pipeline", "org/gemma", "org/absent", HF_HUB_OFFLINE="1")
    assert [first, second] == [f"{digest} without importing diffusers" for digest in digests]
    assert [line.startswith(ERROR) for line in said if "org/absent" in line] == [True]
    assert "Traceback" not in "".join(said)


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
