"""Finding and loading: what works from a folder and the Hub's cache, and what is refused with one line."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cache_store.errors import EncodeOnceError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.model_files import find_model
from precompute.encoders.registry import load_encoder
from tests.precompute.encoders.conftest import narrow_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"


def load(model: str | Path, **config: Any) -> Encoder:
    return load_encoder(EncoderConfig(model=str(model), device="cpu", **config), "signed")


def refusal(model: str | Path, **config: Any) -> tuple[int, str]:
    """A program's exit code, and the line that it says."""
    with pytest.raises(EncodeOnceError) as caught:
        load(model, **config)
    assert "\n" not in str(caught.value)
    return caught.value.exit_code, str(caught.value)


@pytest.fixture
def vae_folder(tmp_path: Path) -> Path:
    """A pipeline's folder that holds a narrow VAE in its subfolder `vae`."""
    narrow_vae().save_pretrained(tmp_path / "pipeline" / "vae")
    return tmp_path / "pipeline"


def test_the_subfolder_is_found_by_itself(vae_folder):
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


def run(cache: Path, *models: str, code: str = LOAD, **variables: str) -> list[str]:
    """Load models in a process of its own, which ends with 1; what it said, with a Hub's local cache in that folder."""
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


ERROR = "precompute: error: encoder.model org/absent "


def hub_cached(folder: Path, cache: Path, name: str) -> None:
    """Move a model's folder into a Hub's local cache, as `org/name`."""
    repo, commit = cache / f"models--org--{name}", "0123456789abcdef0123456789abcdef01234567"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    folder.rename(repo / "snapshots" / commit)


def test_a_hub_id_loads_offline_with_its_encoder_alone_cached(vae_folder, gemma_of_two_files, tmp_path):
    """One that is not there ends in one line; diffusers, whose import takes seconds, is for other paths."""
    digests = [load(folder).identity.weights_sha256 for folder in (vae_folder, gemma_of_two_files)]
    hub_cached(vae_folder, tmp_path, "pipeline")
    hub_cached(gemma_of_two_files, tmp_path, "gemma")
    first, second, *said = run(tmp_path, "org/pipeline", "org/gemma", "org/absent", HF_HUB_OFFLINE="1")
    assert [first, second] == [f"{digest} without importing diffusers" for digest in digests]
    assert [line.startswith(f"{ERROR}is no folder here") for line in said if "org/absent" in line] == [True]
    assert "Traceback" not in "".join(said)


def test_a_hub_that_cannot_be_reached_is_told_of_once(tmp_path):
    """Though it is asked several times; there is no waiting between here."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    impatient = f"import time; time.sleep = lambda seconds: None\n{LOAD}"
    looking, error = run(tmp_path, "org/absent", code=impatient, **hub)
    assert looking == "precompute: looking for encoder.model org/absent on the Hub"
    assert error.startswith(f"{ERROR}is no folder here, its config.json is not in the Hub's local cache")


def test_a_proxy_that_refuses_is_one_line(tmp_path):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as proxy:  # which knows no method, CONNECT neither
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        hub = {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "HTTPS_PROXY": address}
        _, error = run(tmp_path, "org/absent", **hub)
        proxy.shutdown()
    assert error.startswith(f"{ERROR}cannot be downloaded from the Hub")


def weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: config_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))(folder)


def config_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def pickled(folder: Path) -> None:
    """Weights are pickles, which make a folder when they are loaded."""
    (folder / WEIGHTS).unlink()
    for name in ("diffusion_pytorch_model.bin", "model.pt"):
        (folder / name).write_text(f"cos\nmkdir\n(V{folder / 'loaded'}\ntR.")


NO_CLASS = "config.json is not an encoder's config: it names no class in _class_name or architectures"

LOST = "encoder.conv_out.bias"
ONE_MISSING = f"1 missing key in its encode path, {LOST} first"
ONE_UNEXPECTED = "1 unexpected key in its encode path, encoder.x first"
MISMATCHED = "1 mismatched key in its encode path, quant_conv.bias first"
DAMAGED = f"vae/{WEIGHTS} is damaged or cut short; fetch it again"
NO_WEIGHTS = f"has neither {WEIGHTS}.index.json nor {WEIGHTS}, the only files that are read"
SPOILT: list[tuple[Callable[[Path], object], int, str]] = [
    (weights(lambda held: {name: held[name] for name in {*held} - {LOST}}), 1, ONE_MISSING),
    (weights(lambda held: held | {"encoder.x": held[LOST].clone()}), 1, ONE_UNEXPECTED),
    (weights(lambda held: held | {"quant_conv.bias": held["encoder.conv_in.bias"].clone()}), 1, MISMATCHED),
    (config(_class_name="VQModel"), 1, "is of class VQModel, which is not known; `precompute build --help` lists"),
    (config(latents_std=[1.0, 2.0]), 1, "has 2 values of latents_std for 16 latent channels"),
    (config(dim_mult="wide"), 1, "cannot be loaded"),
    (config_text("{"), 1, "config.json is not JSON"),
    *((config_text(text), 2, NO_CLASS) for text in ("[]", "{}", '{"model_type": "gemma3"}')),
    (
        lambda folder: (folder / "config.json").unlink(),
        2,
        "holds no model: it has none of vae/config.json, con",
    ),
    *((lambda folder, size=size: os.truncate(folder / WEIGHTS, size), 1, DAMAGED) for size in (0, 7, 5_000)),
    (pickled, 1, NO_WEIGHTS),
    (lambda folder: (pickled(folder), (folder / "model.pt").rename(folder / WEIGHTS)), 1, DAMAGED),
]


@pytest.mark.parametrize(("spoil", "code", "message"), SPOILT)
def test_a_model_that_is_not_whole_and_known_is_refused(vae_folder, spoil, code, message):
    """Folded or run by diffusers, in the same words; and no pickle in its place is loaded."""
    spoil(vae_folder / "vae")
    for fold in (True, False):
        said = refusal(vae_folder, fold=fold)
        assert said[0] == code
        assert message in said[1]
    assert not (vae_folder / "vae" / "loaded").exists()


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c", "nowhere", __file__])
def test_a_path_of_nothing_or_a_file_is_wrong_usage(model):
    """The Hub is not asked."""
    no_model = "holds no model: it has none of vae/config.json"
    message = no_model if model == __file__ else "is neither a folder here nor a hub id, which is owner/name"
    code, said = refusal(model)
    assert code == 2
    assert message in said
