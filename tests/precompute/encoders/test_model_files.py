"""Finding and loading models: what works from a folder and the Hub's cache, and what is refused in one line."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import EncodeOnceError
from precompute.encoders.model_files import find_model
from tests.precompute.encoders.conftest import narrow_vae
from tests.precompute.encoders.loading import Spoil, changed_config, changed_weights, load
from tests.precompute.encoders.test_vaes import VAES
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.encoders.towers import save_model


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


def test_the_subfolder_is_found_automatically(vae_folder):
    """A pipeline's own config does not hide its VAE."""
    assert load(vae_folder).identity == load(vae_folder / "vae").identity
    (vae_folder / "config.json").write_text('{"_class_name": "SomePipeline"}')
    assert find_model(str(vae_folder)).subfolder == "vae"


LOAD = """
import sys
from cache_store.program.running import run_program
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder

def load(models):
    for model in models:
        identity = load_encoder(EncoderConfig(model=model, device="cpu"), "signed").identity
        print(identity.weights_sha256, "after" if "diffusers" in sys.modules else "without", "importing diffusers")

sys.exit(run_program("precompute", load, sys.argv[1:]))
"""


def run(hub_cache: Path, *models: str, code: str = LOAD, **variables: str) -> list[str]:
    """Load models in a process with that local Hub cache, which ends with code 1; return its lines."""
    environment = os.environ | {"HF_HUB_CACHE": str(hub_cache), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code, *models]
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


def test_a_hub_id_loads_offline_from_the_files_of_its_encoder(vae_folder, gemma_of_two_files, tmp_path):
    """An absent one ends in one line; diffusers, whose import takes seconds, is not imported for these encoders."""
    digests = [
        load(folder, compute_dtype="bfloat16").identity.weights_sha256 for folder in (vae_folder, gemma_of_two_files)
    ]
    move_to_hub_cache(vae_folder, tmp_path, "pipeline")
    move_to_hub_cache(gemma_of_two_files, tmp_path, "gemma")
    first, second, *said = run(tmp_path, "org/pipeline", "org/gemma", "org/absent", HF_HUB_OFFLINE="1")
    assert [first, second] == [f"{digest} without importing diffusers" for digest in digests]
    assert [line.startswith(f"{ERROR}is no folder here") for line in said if "org/absent" in line] == [True]
    assert "Traceback" not in "".join(said)


def test_an_unreachable_hub_is_reported_once(tmp_path):
    """It is asked several times, here without pauses."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    impatient = f"import time; time.sleep = lambda seconds: None\n{LOAD}"
    looking, error = run(tmp_path, "org/absent", code=impatient, **hub)
    assert looking == "precompute: looking for encoder.model org/absent on the Hub"
    assert error.startswith(f"{ERROR}is no folder here, its config.json is not in the Hub's local cache")


def test_a_proxy_that_refuses_is_one_line(tmp_path):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as proxy:  # it has no methods, not even CONNECT
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        hub = {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "HTTPS_PROXY": address}
        _, error = run(tmp_path, "org/absent", **hub)
        proxy.shutdown()
    assert error.startswith(f"{ERROR}cannot be downloaded from the Hub")


VAE_FILE, TOWER_FILE = "diffusion_pytorch_model.safetensors", "model.safetensors"


def lose(file: str, name: str) -> Spoil:
    return changed_weights(file, lambda held: {each: held[each] for each in {*held} - {name}})


def copy_weight(file: str, source: str, name: str) -> Spoil:
    return changed_weights(file, lambda held: held | {name: held[source].clone()})


def as_integers(file: str, name: str) -> Spoil:
    return changed_weights(file, lambda held: held | {name: held[name].mul(100).to(torch.int8)})


def write_config(text: str) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(text)


def cut(file: str, size: int) -> Spoil:
    return lambda folder: os.truncate(folder / file, size)


def pickle_weights(folder: Path) -> None:
    """Replace the weights with pickles, which make a folder if they are loaded."""
    (folder / VAE_FILE).unlink()
    for name in ("diffusion_pytorch_model.bin", "model.pt"):
        (folder / name).write_text(f"cos\nmkdir\n(V{folder / 'loaded'}\ntR.")


def rename_pickle(folder: Path) -> None:
    pickle_weights(folder)
    (folder / "model.pt").rename(folder / VAE_FILE)


QUANTISED: Any = changed_config(quantization_config={"quant_method": "bitsandbytes"})
UNQUANTISED = "quantised checkpoints are not supported"
NO_CLASS = "config.json is not an encoder's config: it names no class in _class_name or architectures"
BIAS, KEY = "encoder.conv_out.bias", "key in its encode path, such as"
DAMAGED = f"vae/{VAE_FILE} is damaged or cut short; fetch it again"
NO_WEIGHTS = f"has neither {VAE_FILE}.index.json nor {VAE_FILE}, the only files that are read"
SPOILT_VAES: list[tuple[Spoil, int, str]] = [
    (lose(VAE_FILE, BIAS), 1, f"1 missing {KEY} {BIAS}"),
    (copy_weight(VAE_FILE, BIAS, "encoder.x"), 1, f"1 unexpected {KEY} encoder.x"),
    (copy_weight(VAE_FILE, "encoder.conv_in.bias", "quant_conv.bias"), 1, f"1 mismatched {KEY} quant_conv.bias"),
    (
        as_integers(VAE_FILE, "encoder.conv_in.weight"),
        1,
        "has I8 values in encoder.conv_in.weight",
    ),
    (QUANTISED, 1, UNQUANTISED),
    (changed_config(_class_name="VQModel"), 1, "is of class VQModel, which is not known; `precompute build --help`"),
    (changed_config(latents_std=[1.0, 2.0]), 1, "has 2 values of latents_std for 16 latent channels"),
    (changed_config(dim_mult="wide"), 1, "cannot be loaded"),
    (write_config("{"), 1, "config.json is not JSON"),
    *((write_config(text), 2, NO_CLASS) for text in ("[]", "{}", '{"model_type": "gemma3"}')),
    (lambda folder: (folder / "config.json").unlink(), 2, "holds no model: it has none of vae/config.json, con"),
    *((cut(VAE_FILE, size), 1, DAMAGED) for size in (0, 7, 5_000)),
    (pickle_weights, 1, NO_WEIGHTS),
    (rename_pickle, 1, DAMAGED),
]


@pytest.mark.parametrize(("spoil", "code", "message"), SPOILT_VAES)
def test_a_vae_that_is_not_whole_and_known_is_refused(vae_folder, spoil, code, message):
    """The words are the same whether it is folded or run by diffusers; no pickle is loaded in its place."""
    spoil(vae_folder / "vae")
    for fold in (True, False):
        found, said = refusal(vae_folder, fold=fold)
        assert (found, message in said) == (code, True), said
    assert not (vae_folder / "vae" / "loaded").exists()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("Gemma3ForConditionalGeneration", tmp_path_factory.mktemp("gemma"))


LOST, LAST = "vision_tower.encoder.layers.1.mlp.fc1.bias", "vision_tower.post_layernorm.bias"
TOWER_KEY = "key in its vision tower, such as"
SPOILT_TOWERS: list[tuple[Spoil, str]] = [
    (lose(TOWER_FILE, LOST), f"1 missing {TOWER_KEY} encoder.layers.1.mlp"),
    (
        changed_weights(TOWER_FILE, lambda held: {name: held[name] for name in held if "tower" not in name}),
        "53 missing keys in its vision tower",
    ),
    (copy_weight(TOWER_FILE, LOST, "vision_tower.x"), f"1 unexpected {TOWER_KEY} x"),
    (copy_weight(TOWER_FILE, LOST, LAST), f"1 mismatched {TOWER_KEY} post_layernorm.bias"),
    (as_integers(TOWER_FILE, LOST), "has I8 values in "),
    (changed_config(vision_config=None), "has no vision_config in its config.json: it has no vision tower"),
    (changed_config(vision_config={"model_type": "clip_vision_model"}), "has a vision tower of type clip_vision_model"),
    (changed_config(vision_config={"hidden_size": "wide"}), "cannot be loaded"),
    (changed_config(mm_tokens_per_image=0), "cannot be loaded"),
    (changed_config(mm_tokens_per_image=400), "encoder.pool must divide the tower's 4 patches per side, got 0"),
    (changed_config(architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM, which reads texts; set source.text"),
    (cut(TOWER_FILE, 3), "is damaged or cut short; fetch it again"),
    (lambda folder: (folder / TOWER_FILE).rename(folder / "model.bin"), f"has neither {TOWER_FILE} nor"),
    (lambda folder: (folder / TOWER_FILE).rename(folder / f"{TOWER_FILE}.index.json"), "cannot be loaded"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT_TOWERS)
def test_a_tower_that_is_not_whole_and_known_is_refused(gemma, tmp_path, spoil, message):
    shutil.copytree(gemma, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    assert message in refusal(tmp_path)[1]


def test_files_without_weights_of_the_tower_are_not_needed(gemma, gemma_of_two_files):
    assert load(gemma_of_two_files).identity == load(gemma).identity


def remove_tokenizer(folder: Path) -> None:
    for file in (folder.parent / "tokenizer").iterdir():
        file.unlink()


T5_WEIGHT = "encoder.block.2.layer.0.SelfAttention.q.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose(TOWER_FILE, T5_WEIGHT), f"1 missing key in its text encoder, such as {T5_WEIGHT}"),
        (as_integers(TOWER_FILE, T5_WEIGHT), f"has I8 values in {T5_WEIGHT}"),
        (QUANTISED, UNQUANTISED),
        (remove_tokenizer, "/tokenizer holds none of its files"),
    ],
)
def test_a_text_encoder_that_is_not_whole_is_refused(tmp_path, spoil, message):
    spoil(save_text_encoder("T5EncoderModel", tmp_path) / "text_encoder")
    assert message in refusal(tmp_path, max_tokens=8)[1]


def test_a_pipeline_that_stacks_cells_in_another_order_is_refused(tmp_path):
    """Its VAE is of the class of FLUX.2's."""
    vae = next(each for each in VAES if each.class_name == "AutoencoderKLFlux2")
    vae.save(tmp_path / "vae")
    for pipeline in ("Flux2Pipeline", "Ideogram4Pipeline"):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        for model in (tmp_path, tmp_path / "vae"):
            if pipeline == "Flux2Pipeline":
                load(model)
            else:
                assert f"is of class {pipeline}, which is not served" in refusal(model)[1]
