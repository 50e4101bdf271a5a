"""A build commits nothing from a device whose samples are not those of the encoder's weights."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import precompute.build.steps as build_module
from cache_store.cli import main as cache_store
from cache_store.errors import Interrupted
from cache_store.format.array import Size
from precompute.encode.canary import Canary, difference
from precompute.encode.tolerance import Difference, Limits
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.hardware import hardware_of
from precompute.encoders.registry import load_encoder
from tests.cache_store.signing import load, save_signed
from tests.families import first_and_slow
from tests.make_cache import make_array, make_encoder
from tests.precompute.encoders.loading import image_recipe, photos
from tests.precompute.encoders.test_text_encoder import TEXTS, padded
from tests.precompute.encoders.test_vaes import VAES, Vae
from tests.precompute.encoders.test_vision_towers import QWENS, save_qwen
from tests.precompute.encoders.text_models import TEXT_MODELS, save_text_encoder
from tests.precompute.encoders.towers import SIDE, TOWERS, save_model

DEVICE = torch.device("cpu")

ARRAY = make_array((5, 4), "float16", "none", make_encoder(1, [], [])).of_size(Size(1, 8, 8), (5, 4))


def weight_of(encoder) -> torch.Tensor:
    """Return the weights of a convolution of a folded VAE's network."""
    cells = [cell.cell_contents for cell in encoder._vae.network.__closure__]
    (network,) = (each for each in cells if isinstance(each, torch.nn.Module))
    return [each for each in network.modules() if isinstance(each, torch.nn.Conv2d)][3].weight.data


BREAKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "one weight is off": (lambda encoder: weight_of(encoder)[0, 0, 0, 0].add_(1.0), "float32"),
    "a convolution gives zeros": (lambda encoder: weight_of(encoder).zero_(), "bfloat16"),
}


@pytest.mark.parametrize(("break_it", "dtype"), BREAKS.values(), ids=BREAKS)
def test_a_device_that_computes_something_else_commits_nothing(project, monkeypatch, break_it, dtype):
    def load_broken(config, image):
        encoder = load_encoder(config, image)
        break_it(encoder)
        return encoder

    monkeypatch.setattr(build_module, "load_encoder", load_broken)
    said = project.build(encoder__compute_dtype=dtype, code=1)
    assert "encoder.device cpu (cpu " in said
    assert not [*project.cache.glob("commits/*"), *project.cache.rglob("*.partial")]
    monkeypatch.undo()
    project.build(encoder__compute_dtype=dtype)


SOUND: list[list[tuple[Any, Callable[[Any, Path], Any], int]]] = [
    [(kind, Vae.save, 128) for kind in VAES],
    [(kind, save_model, SIDE) for kind in TOWERS],
    [(kind, save_qwen, 4 * QWENS[kind][-1]) for kind in QWENS],
    [(kind, save_text_encoder, 0) for kind in TEXT_MODELS],
]
"""A kind of encoder, the function that saves a small one, and the side of its images; 0 for a text encoder."""


@pytest.mark.parametrize(("kind", "save", "side"), [each for kinds in SOUND for each in first_and_slow(kinds)])
def test_a_sound_encoder_of_every_family_passes_at_its_default_dtype(tmp_path, kind, save, side):
    save(kind, tmp_path)
    output: Any = "pooled" if kind == "CLIPTextModelWithProjection" else "tokens"
    config = EncoderConfig(model=str(tmp_path), device="cpu", max_tokens=None if side else 32, output=output)
    image = image_recipe("clip" if kind in list(QWENS) else "signed") if side else None
    encoder: Any = load_encoder(config, image)
    inputs = photos(side, side) if side else padded(encoder, TEXTS)
    layout = encoder.array(Size(1, side or 1, side or 32))
    array: Any = SimpleNamespace(encoder=encoder.identity, feature_place=layout.feature_place)
    with Canary(config, image) as checking:
        checking.begin(inputs.numpy(), encoder.encode(inputs).numpy(), [0, 1], array)
        checking.refuse_wrong_device(DEVICE)


def test_one_value_far_off_is_judged_only_if_it_is_off_by_an_order():
    limits, shares = Limits(0.1, 0.2), np.full(10_000, 0.01)
    for largest, is_admitted in ((1.9, True), (2.1, False), (np.nan, False)):
        shares[3] = largest
        assert limits.admit(Difference.of(shares)) is is_admitted
    shares[:20] = 0.3
    assert not limits.admit(Difference.of(shares)), "more than a thousandth of the values"


def test_differences_are_shares_of_the_whole_or_of_a_larger_feature():
    reference = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
    reference[..., 3] *= 1_000
    off = difference(reference * np.float32(1.01), reference, ARRAY)
    assert 0.004 < off.overall < 0.011, "a large feature is measured by its own size"
    broken = reference.copy()
    broken[1, 0, 0] = np.nan
    assert difference(broken, reference, ARRAY).largest == np.inf
    assert difference(reference, broken, ARRAY).largest == 0, "only the other sample is compared"
    assert difference(broken[1:], broken[1:], ARRAY) == difference(reference, reference, ARRAY)


def test_a_stop_does_not_wait_for_the_comparison(monkeypatch):
    """On a slow machine the reference takes longer than a worker has to end."""
    ended, stop, inputs = threading.Event(), threading.Event(), np.zeros((1, 1, 8, 8, 3), np.uint8)
    monkeypatch.setattr("precompute.encode.canary.STOP_REQUEST", stop)
    monkeypatch.setattr("precompute.encode.canary.load_reference", lambda *arguments: ended.wait(60))
    with Canary(EncoderConfig(model="none"), image_recipe()) as checking:
        checking.begin(inputs, np.zeros((1, 5, 4), np.float32), [], ARRAY)
        assert checking.wants_samples, "the batch had no good image"
        checking.begin(inputs, np.zeros((1, 5, 4), np.float32), [0], ARRAY)
        assert not checking.wants_samples
        stop.set()
        with pytest.raises(Interrupted, match="run the same command again"):
            checking.refuse_wrong_device(DEVICE)
    ended.set()


def test_a_record_names_its_hardware_and_info_says_where_shards_differ(project):
    project.build()
    made = json.loads((project.cache / "commits/000001.json").read_bytes())["run"]["hardware"]
    assert made == hardware_of(DEVICE)
    assert project.run(cache_store, "info", project.cache).count("made by ") == 1
    record = load(commit := project.cache / "commits/000001.json")
    record["run"]["hardware"] = {"gpu": "NVIDIA H100", "driver": "570.86.15", "cuda": "12.8", "cudnn": "9.10.2"}
    save_signed(commit, record)
    other = "1 shard: NVIDIA H100, cuda 12.8, cudnn 9.10.2, driver 570.86.15, av "
    assert other in project.run(cache_store, "info", project.cache)
