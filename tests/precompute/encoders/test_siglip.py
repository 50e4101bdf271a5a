"""A vision tower's samples are transformers' own, wherever its weights lie; what is not whole is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import SiglipVisionConfig, SiglipVisionModel

from cache_store.errors import ConfigError, EncodeOnceError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder, refuse_image_size
from precompute.encoders.tower import FrozenTower, TowerEncoder
from tests.precompute.encoders.conftest import narrow_vae
from tests.precompute.encoders.towers import (
    FEATURES,
    PATCHES,
    SIDE,
    TOKENS,
    gemma_tokens,
    random_model,
    save_model,
    tower_of,
)

CLASSES = ["SiglipVisionModel", "SiglipModel", "Gemma3ForConditionalGeneration"]
GEMMA = CLASSES[-1]


def load(folder: Path, **config: Any) -> Encoder:
    options: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", **config}
    return load_encoder(EncoderConfig(model=str(folder), **options), "signed")


def refusal(folder: Path, **config: Any) -> str:
    with pytest.raises(EncodeOnceError) as caught:
        load(folder, **config)
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_code}: {caught.value}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each class."""
    return {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in CLASSES}


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """uint8 [N, Y, X, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (5, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)


def signed(image_NYX3: Tensor) -> Tensor:
    return image_NYX3.permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.mark.parametrize("kind", CLASSES)
def test_samples_are_transformers_last_hidden_state(folders, photos, kind):
    encoder = load(folders[kind], pool=1)
    with torch.inference_mode():
        expected = tower_of(random_model(kind))(signed(photos)).last_hidden_state
    tokens = encoder.encode(photos)
    assert expected.std() > 0.1
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5)
    assert tokens.shape[1:] == encoder.layout(SIDE, SIDE).shape == (PATCHES, FEATURES)
    assert (encoder.identity.class_name, encoder.identity.posterior) == ("SiglipVisionModel", "none")


def test_a_gemma_pools_as_it_does_itself_and_a_siglip_not(folders, photos):
    """Before the projector's norm and matrix; in squares of another side if asked."""
    encoder = load(folders[GEMMA])
    tokens, expected = encoder.encode(photos), gemma_tokens(random_model(GEMMA), signed(photos))
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5)
    assert (tokens.shape[1], encoder.identity.pool) == (TOKENS, 2)
    assert load(folders["SiglipModel"]).identity.pool == 1
    whole = load(folders["SiglipModel"], pool=4).encode(photos)
    every = load(folders["SiglipModel"]).encode(photos)
    torch.testing.assert_close(whole[:, 0], every.mean(1), rtol=0, atol=1e-5)
    assert "encoder.pool must divide the tower's 4 patches per side, got 3" in refusal(folders[GEMMA], pool=3)


def test_the_hash_is_the_towers_wherever_it_lies(tmp_path, photos):
    """Under the names of older versions, in several files, in bfloat16, without a head; other weights are another."""
    model = random_model("SiglipVisionModel").bfloat16().float()
    model.save_pretrained(tmp_path / "alone")
    hashed, config = load(tmp_path / "alone").identity.weights_sha256, model.config.to_dict()
    weights = {name: each for name, each in model.state_dict().items() if not name.startswith("head.")}
    names = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
    for number, prefix in enumerate(names):
        held = {f"{prefix}{name}": each.bfloat16() for name, each in weights.items()}
        save(tmp_path / f"gemma{number}", held, architectures=[GEMMA], vision_config=config)
        assert load(tmp_path / f"gemma{number}").identity.weights_sha256 == hashed
    held = {f"vision_model.{name}": each for name, each in weights.items()}
    held["text_model.encoder.layers.0.mlp.fc1.bias"] = torch.zeros(3)
    save(tmp_path / "siglip", held, architectures=["SiglipModel"], vision_config=config)
    assert load(tmp_path / "siglip").identity.weights_sha256 == hashed
    model.save_pretrained(tmp_path / "files", max_shard_size="4KB")
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    assert load(tmp_path / "files", compute_dtype="bfloat16").identity.weights_sha256 == hashed
    model.encoder.layers[1].mlp.fc2.bias.data[-1] += 0.25
    model.save_pretrained(tmp_path / "other")
    assert load(tmp_path / "other").identity.weights_sha256 != hashed


def save(folder: Path, weights: dict[str, Tensor], **config: Any) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_files_without_weights_of_the_tower_are_not_needed(folders, gemma_of_two_files):
    assert load(gemma_of_two_files).identity == load(folders[GEMMA]).identity


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_tokens_are_those_of_their_image_alone(folders, photos, monkeypatch, dtype, tolerance):
    """To rounding, however many a CPU takes at once."""
    encoder = load(folders[GEMMA], compute_dtype=dtype)
    together = encoder.encode(photos)
    monkeypatch.setattr("precompute.encoders.tower.TOWER_CPU_PIXELS", 2 * SIDE**2)
    assert together.dtype == torch.float32
    torch.testing.assert_close(encoder.encode(photos), together, rtol=0, atol=tolerance)
    exact = load(folders[GEMMA]).encode(photos)
    torch.testing.assert_close(together, exact, rtol=0, atol=tolerance)


def test_gemma_3s_own_tower_makes_256_tokens_of_an_image():
    """At full size, by shapes alone: So400m, 896 x 896 pixels, 64 x 64 patches, 4 x 4 of them a token."""
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    with torch.device("meta"):
        config = SiglipVisionConfig(**sizes, image_size=896, patch_size=14, vision_use_head=False)
        model = SiglipVisionModel(config).eval()
    assert sum(weight.numel() for weight in model.parameters()) == 416_866_032
    tower = FrozenTower(
        hidden=lambda image: model(image.to("meta")).last_hidden_state, class_name="SiglipVisionModel",
        weights_sha256="0" * 64, image_side=896, patches=64, features=1152, pool=4,
    )  # fmt: skip
    encoder = TowerEncoder(tower, EncoderConfig(model="m", device="cpu", compute_dtype="float32"), "signed")
    tokens = encoder.encode(torch.zeros(2, 896, 896, 3, dtype=torch.uint8))
    assert tokens.shape[1:] == encoder.layout(896, 896).shape == (256, 1152)


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], object]:
    return lambda folder: save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def config(**changes: Any) -> Callable[[Path], object]:
    path = "config.json"
    return lambda folder: (folder / path).write_text(json.dumps(json.loads((folder / path).read_text()) | changes))


LOST = "vision_tower.encoder.layers.1.mlp.fc1.bias"
LAST = "vision_tower.post_layernorm.bias"
KEY = "key in its vision tower"
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (weights(lambda held: {name: held[name] for name in {*held} - {LOST}}), f"1 missing {KEY}, encoder.layers.1.mlp"),
    (weights(lambda held: {name: held[name] for name in held if "tower" not in name}), "37 missing keys in its "),
    (weights(lambda held: held | {"vision_tower.x": held[LOST].clone()}), f"1 unexpected {KEY}, x first"),
    (weights(lambda held: held | {LAST: held[LOST].clone()}), f"1 mismatched {KEY}, post_layernorm.bias first"),
    (config(vision_config=None), "has no vision_config in its config.json: it has no vision tower"),
    (config(vision_config={"model_type": "clip_vision_model"}), "has a vision tower of type clip_vision_model"),
    (config(vision_config={"hidden_size": "wide"}), "cannot be loaded"),
    (config(mm_tokens_per_image=0), "cannot be loaded"),
    (config(mm_tokens_per_image=400), "encoder.pool must divide the tower's 4 patches per side, got 0"),
    (config(architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM, which reads texts; set source.text"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "is damaged or cut short; fetch it again"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "has neither model.safetensors nor"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"), "cannot be loaded"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_a_tower_that_is_not_whole_and_known_is_refused(folders, tmp_path, spoil, message):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders[GEMMA] / name).read_bytes())
    spoil(tmp_path)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("SiglipModel", {"posterior": "moments"}, "posterior: moments"),
        (GEMMA, {"fold": False}, "fold: false"),
        (GEMMA, {"compile": True}, "compile: true"),
        ("AutoencoderKLWan", {"pool": 1}, "pool: 1"),
    ],
)
def test_a_field_for_another_encoder_is_refused(folders, tmp_path, kind, options, field):
    if kind not in folders:
        narrow_vae().save_pretrained(tmp_path)
    said = refusal(folders.get(kind, tmp_path), **options)
    assert said == f"2: encoder.{field} means nothing to a {kind}; leave it out"


def test_a_tower_takes_its_own_size_and_range_alone(folders):
    """The size is known without its weights, which name their default by leaving it out."""
    for folder in folders.values():
        refuse_image_size(EncoderConfig(model=str(folder)), SIDE, SIDE)
        for size in ((SIDE, 40), (64, 64)):
            with pytest.raises(ConfigError, match=f"must be {SIDE}, as the tower was trained, got {size[0]}x{size[1]}"):
                refuse_image_size(EncoderConfig(model=str(folder)), *size)
            with pytest.raises(ConfigError, match=f"must be {SIDE}, as"):
                load(folder).layout(*size)
    with pytest.raises(ConfigError, match="image.range: theworld is for VAEs"):
        load_encoder(EncoderConfig(model=str(folders[GEMMA]), device="cpu"), "theworld")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_cpus_tokens(folders, photos):
    tokens = load(folders[GEMMA], device="cuda").encode(photos)
    torch.testing.assert_close(tokens.cpu(), load(folders[GEMMA]).encode(photos), rtol=1e-2, atol=1e-2)
