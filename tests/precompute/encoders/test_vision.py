"""Tokens of CLIP, DINO and other towers are transformers' own; images are prepared as its processors do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BitImageProcessorPil,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from cache_store.errors import ConfigError, EncodeOnceError, ModelError
from precompute.config import BuildConfig
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PIXEL_RANGES, Encoder
from precompute.encoders.preprocessing import as_model_prepares
from precompute.encoders.registry import load_encoder, load_reference, refuse_image_size
from precompute.images.decode import ImageConfig
from precompute.images.fit import fit_image, to_pixels, whole
from precompute.sources import SourceConfig

SIDE, PATCHES, FEATURES, LAYERS = 32, 16, 16, 3
SMALL = {
    "hidden_size": FEATURES,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
LLAMA = {**TEXT, "model_type": "llama", "num_key_value_heads": 2}


def clip_model() -> Any:
    return CLIPModel(CLIPConfig(vision_config=SMALL, text_config=TEXT, projection_dim=8))


def llava() -> Any:
    vision = {**SMALL, "model_type": "clip_vision_model"}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LLAMA, image_token_index=31))


MAKERS = {
    "CLIPVisionModel": lambda: CLIPVisionModel(CLIPVisionConfig(**SMALL)),
    "CLIPModel": clip_model,
    "LlavaForConditionalGeneration": llava,
    "Dinov2Model": lambda: Dinov2Model(Dinov2Config(**SMALL)),
    "Dinov2WithRegistersModel": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SMALL)),
    "DINOv3ViTModel": lambda: DINOv3ViTModel(DINOv3ViTConfig(**SMALL, num_register_tokens=2)),
    "ViTModel": lambda: ViTModel(ViTConfig(**SMALL)),
    "ViTForImageClassification": lambda: ViTForImageClassification(ViTConfig(**SMALL)),
}
BEFORE = {"Dinov2WithRegistersModel": 5, "DINOv3ViTModel": 3}
"""A class token and registers, where there are more than the first."""


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(kind: str, folder: Path) -> Any:
    """A tower of random weights, which all count, within its checkpoint."""
    torch.manual_seed(0)
    model = MAKERS[kind]().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "position" in name:
            weight.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.3)
    model.save_pretrained(folder)
    for part in ("vision_model", "model.vision_tower", "vit"):
        try:
            return model.get_submodule(part)
        except AttributeError:
            continue
    return model


def load(folder: Path, **config: Any) -> Encoder:
    options: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", **config}
    return load_encoder(EncoderConfig(model=str(folder), **options), "clip")


def photos(number: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)


@torch.inference_mode()
def hidden_states(tower: Any) -> Any:
    pixels = PIXEL_RANGES["clip"](photos().permute(0, 3, 1, 2).float()).contiguous()
    return tower(pixel_values=pixels, output_hidden_states=True)


def test_tokens_are_transformers_own(kind, tmp_path):
    """To the bit: the last hidden state, LLaVA's second to last; another layer; the tokens before the patches kept."""
    states = hidden_states(save(kind, tmp_path))
    own = states.hidden_states[-2] if "Llava" in kind else states.last_hidden_state
    before = BEFORE.get(kind, 1)
    for config, expected in (
        ({}, own[:, before:]),
        ({"class_token": True}, own),
        ({"layer": 1}, states.hidden_states[1][:, before:]),
        ({"layer": -LAYERS}, states.hidden_states[-LAYERS][:, before:]),
    ):
        encoder = load(tmp_path, **config)
        tokens = encoder.encode(photos())
        assert torch.equal(tokens, expected)
        assert tokens.std() > 0.1
        assert tokens.shape[1:] == encoder.layout(SIDE, SIDE).shape
        assert encoder.layout(SIDE, SIDE).axes == ("token", "feature")
        assert encoder.identity.path == "native"
        reference = load_reference(EncoderConfig(model=str(tmp_path), **config), "clip")
        assert torch.equal(reference.encode(photos()), expected)
    assert load(tmp_path).identity.layer == (-2 if "Llava" in kind else None)
    assert load(tmp_path, pool=2).encode(photos()).shape == (3, 4, FEATURES)


def test_the_hash_is_the_towers_wherever_it_lies(tmp_path):
    """Alone, beside a text tower, under older names with what older versions saved."""
    tower = save("CLIPModel", tmp_path / "clip")
    tower.save_pretrained(tmp_path / "alone")
    hashed = load(tmp_path / "alone").identity.weights_sha256
    assert load(tmp_path / "clip").identity.weights_sha256 == hashed
    held = {f"vision_model.{name}": each for name, each in tower.state_dict().items()}
    held["vision_model.embeddings.position_ids"] = torch.arange(PATCHES + 1)
    save_file(held, tmp_path / "alone" / "model.safetensors")
    assert load(tmp_path / "alone").identity.weights_sha256 == hashed
    tower.pre_layrnorm.bias[-1] += 0.25
    tower.save_pretrained(tmp_path / "other")
    assert load(tmp_path / "other").identity.weights_sha256 != hashed


QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 8}
QWEN_2 = {"depth": 2, "embed_dim": 16, "hidden_size": 8, "num_heads": 2}
QWEN_3 = {**QWEN, "depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
QWEN_TEXT = {
    **TEXT,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]},
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
QWENS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "2": (Qwen2VLForConditionalGeneration, Qwen2VLConfig, QWEN_2, 14),
    "2.5": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {**QWEN, "window_size": 28, "fullatt_block_indexes": [1]},
        14,
    ),
    "3": (Qwen3VLForConditionalGeneration, Qwen3VLConfig, QWEN_3, 16),
    "3 of experts": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, QWEN_3, 16),
}


def save_qwen(name: str, folder: Path) -> Any:
    model_class, config_class, vision, _ = QWENS[name]
    torch.manual_seed(0)
    text = {**QWEN_TEXT, **EXPERTS} if "experts" in name else QWEN_TEXT
    model = model_class(config_class(vision_config=vision, text_config=text)).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("name", QWENS)
def test_tokens_of_a_qwen_vl_are_what_its_language_model_is_given(name, rows, columns, tmp_path):
    """At any multiple of a token's side, with its own processor's patches; of Qwen3-VL each deepstack level, too."""
    model, patch = save_qwen(name, tmp_path), QWENS[name][3]
    height, width = 2 * patch * rows, 2 * patch * columns
    noise = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), np.uint8)
    processor = Qwen2VLImageProcessorPil(do_resize=False, patch_size=patch)
    made = processor([Image.fromarray(each) for each in noise], return_tensors="pt")
    with torch.inference_mode():
        given = model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
    levels = (
        dict(zip(model.config.vision_config.deepstack_visual_indexes, given.deepstack_features, strict=True))
        if "3" in name
        else {}
    )
    for layer, expected in {"auto": given.pooler_output, **levels}.items():
        encoder = load(tmp_path, layer=layer)
        tokens = encoder.encode(torch.from_numpy(noise))
        torch.testing.assert_close(tokens, torch.stack(expected), rtol=0, atol=1e-5)
        assert tokens.std() > 0.1
        assert tokens.shape[1:] == encoder.layout(height, width).shape == (rows * columns, 8)
        assert encoder.identity.layer == (None if layer == "auto" else layer)
    with pytest.raises(
        ModelError, match="has deepstack features of the layers \\[0, 2\\]" if levels else "has no deepstack"
    ):
        load(tmp_path, layer=1)
    with pytest.raises(ConfigError, match=f"multiples of {2 * patch}, got 60x{4 * patch}"):
        refuse_image_size(EncoderConfig(model=str(tmp_path)), 60, 4 * patch)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("CLIPVisionModel", {"layer": 4}, "encoder.layer is 4, but .* has hidden states 0 to 3, or -1 to -4"),
    ("CLIPVisionModel", {"class_token": True, "pool": 2}, "cannot stand beside pooled patches; set encoder.pool: 1"),
    ("CLIPVisionModel", {"posterior": "moments"}, "encoder.posterior: moments means nothing to a CLIPVisionModel"),
]


@pytest.mark.parametrize(("kind", "config", "message"), WRONG)
def test_what_a_tower_has_not_is_refused(kind, config, message, tmp_path):
    save(kind, tmp_path)
    with pytest.raises(EncodeOnceError, match=message):
        load(tmp_path, **config)


def test_another_size_is_refused_unloaded(kind, tmp_path):
    save(kind, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"must be {SIDE}, as the tower was trained, got 224x224"):
        refuse_image_size(EncoderConfig(model=str(tmp_path)), 224, 224)


PROCESSORS = [
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
    BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": SIDE, "width": SIDE}),
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}),
]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [(61, 47), (47, 61), (32, 90), (33, 33), (300, 201)])
def test_images_are_prepared_as_the_models_processor_does(processor, size, tmp_path):
    """Every pixel, by the checkpoint's own preprocessor_config.json."""
    processor.save_pretrained(tmp_path)
    save("CLIPVisionModel", tmp_path)
    source = SourceConfig(kind="folder", path=str(tmp_path))
    encoder = EncoderConfig(model=str(tmp_path), device="cpu")
    image = BuildConfig(cache="c", source=source, encoder=encoder, image=ImageConfig(from_model=True)).prepared().image
    assert not image.from_model
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    pixels_NYX3 = torch.from_numpy(to_pixels(fit_image(whole(Image.fromarray(noise)), image.recipe)).copy())[None]
    ours = PIXEL_RANGES[image.range](pixels_NYX3.permute(0, 3, 1, 2).float())
    theirs = torch.from_numpy(processor(Image.fromarray(noise), return_tensors="np")["pixel_values"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # a level is 0.004 or more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_processor_type": "DINOv3ViTImageProcessorFast"}, "does not only resize and crop, with Pillow"),
        ({"resample": 0}, "leave it out and choose image.height, width, fit, resample and range for"),
        ({"image_mean": [0.1, 0.2, 0.3]}, "its mean and deviation are neither CLIP's"),
        ({"do_center_crop": False}, "neither fixed nor that of the shorter side"),
    ],
)
def test_a_processor_that_is_not_followed_is_shown(changes, message, tmp_path):
    save("CLIPVisionModel", tmp_path)
    PROCESSORS[0].save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        as_model_prepares(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_range_that_is_not_the_models_is_refused(tmp_path):
    save("CLIPVisionModel", tmp_path)
    PROCESSORS[0].save_pretrained(tmp_path)
    load(tmp_path)
    with pytest.raises(ConfigError, match=r"image.range is signed, but .* set image.range: clip, or image.from_model"):
        load_encoder(EncoderConfig(model=str(tmp_path), device="cpu"), "signed")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fit": "edge"}, "image.fit must be one of squash, crop, pad, or edge N, got edge"),
        ({"fit": "edge 200"}, "the shorter side must be at least 224"),
        ({"fit": "crop", "from_model": True}, "image.from_model says height, width, fit, resample and range"),
    ],
)
def test_an_image_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        ImageConfig(**config)
