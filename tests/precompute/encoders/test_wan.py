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
import torch
from safetensors.torch import load_file, save_file

from cache_store.errors import ConfigError, MissingPathError, ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.model_files import find_model
from precompute.encoders.registry import load_encoder
from precompute.encoders.wan import cpu_chunks, read_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"
LOAD = """
import sys
from cache_store.program.run_program import run_program
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder

def load(models):
    for model in models:
        print(load_encoder(EncoderConfig(model=model, device="cpu"), "signed").identity.weights_sha256)
    return 0

sys.exit(run_program("precompute", load, sys.argv[1:]))
"""


def load(model: str | Path, **config: Any) -> Encoder:
    return load_encoder(EncoderConfig(model=str(model), device="cpu", **config), "signed")


def refusal(model: str | Path, **config: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, **config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def hub_cache(vae_folder: Path, cache: Path) -> Path:
    """Lay a pipeline out as the Hub's local cache does, with nothing but its subfolder `vae`."""
    repo = cache / "models--org--pipeline"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    vae_folder.rename(repo / "snapshots" / commit)
    return cache


def run(cache: Path, *models: str, code: str = LOAD, **variables: str) -> list[str]:
    """Load models in a process of its own, which ends with 1; what it said, with a Hub's local cache in that folder."""
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("height", "width", "sizes"),
    [(64, 64, [8, 3]), (32, 64, [11]), (128, 128, [2, 2, 2, 2, 2, 1]), (160, 160, [1] * 11), (224, 224, [1] * 11)],
)
def test_a_cpu_cuts_a_batch_by_the_images_size_alone(height, width, sizes):
    batch = torch.arange(11.0).reshape(11, 1, 1, 1).expand(11, 3, height, width)
    chunks = cpu_chunks(batch)
    assert [len(chunk) for chunk in chunks] == sizes
    assert torch.equal(torch.cat(list(chunks)), batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_images_encoded_together_are_what_each_is_alone(vae_folder, dtype):
    encoder = load(vae_folder, compute_dtype=dtype)
    image_NYX3 = torch.randint(0, 256, (11, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([encoder.encode(image[None]) for image in image_NYX3])
    tolerance = 1e-5 if dtype == "float32" else 0.02 * float(alone.square().mean().sqrt())
    assert float((encoder.encode(image_NYX3) - alone).abs().max()) <= tolerance


def test_the_subfolder_is_found_by_itself(vae_folder):
    """A pipeline's own config does not hide its VAE."""
    assert load(vae_folder).identity == load(vae_folder / "vae").identity
    (vae_folder / "config.json").write_text('{"_class_name": "SomePipeline"}')
    assert find_model(str(vae_folder)).subfolder == "vae"


ERROR = "precompute: error: encoder.model org/absent "


def test_a_hub_id_loads_offline_from_a_cache_of_the_vae_alone(vae_folder, tmp_path):
    """One that is not there ends in one line."""
    expected = load(vae_folder).identity.weights_sha256
    weights, *said = run(hub_cache(vae_folder, tmp_path / "hub"), "org/pipeline", "org/absent", HF_HUB_OFFLINE="1")
    assert weights == expected
    assert [line.startswith(f"{ERROR}is no folder here") for line in said if "org/absent" in line] == [True]
    assert "Traceback" not in "".join(said)


def test_a_hub_that_cannot_be_reached_is_told_of_once(tmp_path):
    """Though it is asked several times; there is no waiting between here."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    impatient = f"import time; time.sleep = lambda seconds: None\n{LOAD}"
    looking, error = run(tmp_path, "org/absent", code=impatient, **hub)
    assert looking == "precompute: looking for encoder.model org/absent on the Hub"
    assert error.startswith(f"{ERROR}is no folder here, not in the Hub's local cache")


def test_a_proxy_that_refuses_is_one_line(tmp_path):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as proxy:  # which knows no method, CONNECT neither
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        hub = {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "HTTPS_PROXY": address}
        _, error = run(tmp_path, "org/absent", **hub)
        proxy.shutdown()
    assert error.startswith(f"{ERROR}cannot be downloaded from the Hub")


def test_the_decoder_is_dropped(vae_folder):
    vae = read_vae(find_model(str(vae_folder)))
    assert not [name for name in vae.state_dict() if not name.startswith(("encoder.", "quant_conv."))]


def test_a_checkpoint_without_a_decoder_is_enough(vae_folder):
    expected, file = load(vae_folder).identity, vae_folder / "vae" / WEIGHTS
    decoding = ("decoder.", "post_quant_conv.")
    save_file({name: each for name, each in load_file(file).items() if not name.startswith(decoding)}, file)
    assert load(vae_folder).identity == expected


def with_weights(**weights: str | None) -> Callable[[Path], None]:
    """Weights are others', or gone; . is __ in their names."""

    def spoil(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        others = {name.replace("__", "."): other and held[other].clone() for name, other in weights.items()}
        changed = {name: weight for name, weight in (held | others).items() if weight is not None}
        save_file(changed, folder / WEIGHTS)

    return spoil


def with_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def cut_to(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / WEIGHTS, size)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_weights(encoder__conv_out__bias=None), "1 missing keys in its encode path, encoder.conv_out.bias first"),
        (with_weights(encoder__extra="quant_conv.bias"), "1 unexpected keys in its encode path, encoder.extra first"),
        (with_weights(quant_conv__bias="encoder.conv_in.bias"), "cannot be loaded"),
        (with_config('{"_class_name": "AutoencoderKLCosmos"}'), "AutoencoderKLCosmos; known are AutoencoderKLWan"),
        (with_config(""), "config.json is not JSON"),
        (with_config("{"), "config.json is not JSON"),
        (with_config('{"_class_name": "AutoencoderKLWan", "dim_mult": "wide"}'), "cannot be loaded"),
        *((cut_to(size), "cannot be loaded") for size in (0, 7, 5_000)),
    ],
)
def test_a_model_that_is_not_whole_and_known_is_refused(vae_folder, spoil, message):
    spoil(vae_folder / "vae")
    assert message in refusal(vae_folder)


NO_VAE = r"config\.json is not a VAE's config: it has no _class_name"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, r"is no VAE: it holds none of vae/config\.json, config\.json"),
        *((text, NO_VAE) for text in ("[]", "{}", '{"model_type": "gemma3"}')),
    ],
)
def test_a_folder_of_no_vae_is_wrong_usage(tmp_path, file, message):
    if file is not None:
        (tmp_path / "config.json").write_text(file)
    with pytest.raises(MissingPathError, match=message) as caught:
        load(tmp_path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c", "nowhere", __file__])
def test_a_path_of_nothing_or_a_file_is_wrong_usage(model):
    """The Hub is not asked."""
    no_vae = "is no VAE: it holds none of vae/config.json"
    message = no_vae if model == __file__ else "is neither a folder here nor a hub id, which is owner/name"
    with pytest.raises(MissingPathError, match=message) as caught:
        load(model)
    assert caught.value.exit_code == 2


def test_a_latent_scale_for_other_channels_is_refused(vae_folder):
    config = vae_folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latents_std": [1.0, 2.0]}))
    assert "has 2 values of latents_std for 16 latent channels" in refusal(vae_folder)


def test_attention_scales_are_refused_unfolded(narrow_vae, tmp_path):
    narrow_vae(attn_scales=[0.5]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder.fold: false cannot run a model with attn_scales"):
        load(tmp_path, fold=False)
