"""Tokens of vision towers are transformers' own, wherever a checkpoint keeps the tower."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BitImageProcessorPil,
    Gemma3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    ViTImageProcessorPil,
)

from cache_store import open_cache
from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import Size
from precompute.config import BuildConfig
from precompute.encode_images import encode_images
from precompute.encoders.encoder import PIXEL_RANGES, still_in_range
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.preprocessing import recipe_of_model
from precompute.encoders.registry import load_reference, refuse_image_size
from precompute.images.buckets import place
from precompute.images.config import ImageConfig
from precompute.images.fit import fit_image, unreduced
from precompute.sources.config import SourceConfig
from tests.families import first_and_slow
from tests.precompute.conftest import GOOD, image_bytes
from tests.precompute.encoders.loading import changed_config, image_recipe, load, photos, shape_of, signed
from tests.precompute.encoders.towers import (
    CLIP_PROCESSOR,
    FEATURES,
    LAYERS,
    SIDE,
    SIGLIP_KINDS,
    TEXT,
    TOKENS,
    TOWERS,
    gemma_tokens,
    make_model,
    random_model,
    save_model,
    tower_of,
)

GEMMA = "Gemma3ForConditionalGeneration"
TOKENS_BEFORE = dict.fromkeys(SIGLIP_KINDS, 0) | {"Dinov2WithRegistersModel": 5, "DINOv3ViTModel": 3}
"""Class tokens and registers; other towers have one class token."""
PHOTOS = photos(SIDE, SIDE, 5)


@pytest.fixture(scope="module", params=first_and_slow(TOWERS, quick=3))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in TOWERS}


def test_tokens_are_transformers_own(kind, folders):
    """To the bit: the last hidden state or LLaVA's second to last, another layer, with the tokens before patches."""
    with torch.inference_mode():
        made = tower_of(random_model(kind))(pixel_values=signed(PHOTOS), output_hidden_states=True)
    states, before = made.hidden_states, TOKENS_BEFORE.get(kind, 1)
    own = states[-2] if "Llava" in kind else made.last_hidden_state
    cases: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({}, own[:, before:]),
        ({"layer": -LAYERS}, states[-LAYERS][:, before:]),
    ]
    for options, expected in cases + ([({"class_token": True}, own)] if before else []):
        options = {"pool": 1, **options}
        encoder = load(folders[kind], **options)
        tokens = encoder.encode(PHOTOS)
        assert torch.equal(tokens, expected)
        assert tokens.std() > 0.1
        assert tokens.shape[1:] == shape_of(encoder, SIDE, SIDE)
        assert encoder.array(Size(1, SIDE, SIDE)).axes == ("token", "feature")
        assert (encoder.identity.path, encoder.identity.posterior) == ("native", "none")
        reference = load_reference(EncoderConfig(model=str(folders[kind]), **options), image_recipe())
        assert torch.equal(reference.encode(PHOTOS), expected)
    assert load(folders[kind]).identity.layer == (-2 if "Llava" in kind else None)
    pooled = load(folders[kind], pool=4).encode(PHOTOS)
    torch.testing.assert_close(pooled[:, 0], own[:, before:].mean(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_tokens_depend_only_on_their_image(folders, dtype, tolerance):
    encoder = load(folders[GEMMA], compute_dtype=dtype)
    together = encoder.encode(PHOTOS)
    assert together.dtype == torch.float32
    torch.testing.assert_close(encoder.encode(PHOTOS[:1]), together[:1], rtol=0, atol=tolerance)
    torch.testing.assert_close(together, load(folders[GEMMA]).encode(PHOTOS), rtol=0, atol=tolerance)


def test_a_tower_takes_only_its_own_size(kind, folders):
    """The size is known from the config."""
    refuse = partial(refuse_image_size, EncoderConfig(model=str(folders[kind])))
    refuse(SIDE, SIDE)
    for each in (refuse, partial(shape_of, load(folders[kind]))):
        with pytest.raises(ConfigError, match=str(SIDE)):
            each(SIDE, 40)


QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 8}
QWEN_2 = {"depth": 2, "embed_dim": 16, "hidden_size": 8, "num_heads": 2}
QWEN_2_5 = {**QWEN, "window_size": 28, "fullatt_block_indexes": [1]}
QWEN_3 = {**QWEN, "depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
QWEN_TEXT = {**TEXT, "hidden_size": 8, "intermediate_size": 8, "num_key_value_heads": 2, "rope_parameters": ROPE}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
QWENS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "Qwen2VLForConditionalGeneration": ("Qwen2VLConfig", QWEN_2, QWEN_TEXT, 14),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", QWEN_2_5, QWEN_TEXT, 14),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", QWEN_3, QWEN_TEXT, 16),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeConfig", QWEN_3, {**QWEN_TEXT, **EXPERTS}, 16),
}
"""Class of the config, vision and text config, and side of a patch in pixels."""


def save_qwen(kind: str, folder: Path) -> Any:
    config_class, vision, text, _ = QWENS[kind]
    model = make_model(kind, config_class, {"vision_config": vision, "text_config": text})
    for weight in model.parameters():
        weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", first_and_slow(QWENS))
def test_tokens_of_a_qwen_vl_are_those_of_its_language_model(kind, tmp_path):
    """At any multiple of a token's side, with patches of its own processor; for Qwen3-VL each deepstack level too."""
    model, patch, rows, columns = save_qwen(kind, tmp_path), QWENS[kind][-1], 3, 2
    height, width = 2 * patch * rows, 2 * patch * columns
    images = photos(height, width)
    processor = Qwen2VLImageProcessorPil(do_resize=False, patch_size=patch)
    made = processor([Image.fromarray(each) for each in images[:, 0].numpy()], return_tensors="pt")
    with torch.inference_mode():
        given = model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
    levels = {}
    if "Qwen3" in kind:
        blocks = model.config.vision_config.deepstack_visual_indexes
        levels = dict(zip(blocks, given.deepstack_features, strict=True))
    for layer, expected in {"auto": given.pooler_output, **levels}.items():
        encoder = load(tmp_path, "clip", layer=layer)
        tokens = encoder.encode(images)
        torch.testing.assert_close(tokens, torch.stack(list(expected)), rtol=0, atol=1e-5)
        assert tokens.std() > 0.1
        assert tokens.shape[1:] == shape_of(encoder, height, width) == (rows * columns, 8)
        assert encoder.identity.layer == (None if layer == "auto" else layer)
    with pytest.raises(ModelError, match="deepstack"):
        load(tmp_path, "clip", layer=1)
    with pytest.raises(ConfigError, match=f"{2 * patch}.*60x{4 * patch}"):
        refuse_image_size(EncoderConfig(model=str(tmp_path)), 60, 4 * patch)


def test_a_towers_cache_holds_transformers_tokens_of_the_files(project, tmp_path):
    """The family's own processor prepares them; `encode_images` gives the same."""
    project.vae, project.settings = save_model(GEMMA, tmp_path / "model"), {"image": {"height": SIDE, "width": SIDE}}
    project.build(store__dtype="float32")
    cache, order = open_cache(project.cache), np.random.default_rng(0).permutation(len(GOOD))
    images = [Image.open(io.BytesIO(image_bytes(GOOD[number]))) for number in order]
    pixels = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})(images, return_tensors="pt")["pixel_values"]
    expected = gemma_tokens(random_model(GEMMA), pixels).numpy()
    assert expected.shape == (len(GOOD), TOKENS, FEATURES)
    assert cache.spec.array.encoder.pool == 2
    np.testing.assert_allclose(cache.read(order), expected, rtol=0, atol=1e-5)
    (tmp_path / "image.png").write_bytes(image_bytes(GOOD[7]))
    np.testing.assert_allclose(encode_images(cache, [tmp_path / "image.png"]), cache.read(np.array([7])), atol=1e-5)


# Images for a tower are prepared as its own processor does, pixel by pixel.

PROCESSORS = [
    CLIP_PROCESSOR,
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
    BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": SIDE, "width": SIDE}),
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}),
]


@pytest.fixture
def clip(tmp_path):
    CLIP_PROCESSOR.save_pretrained(tmp_path)
    return save_model("CLIPVisionModel", tmp_path)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [(61, 47), (300, 201)])
def test_images_are_prepared_as_the_models_processor_does(processor, size, clip):
    processor.save_pretrained(clip)
    source = SourceConfig(kind="folder", path=str(clip))
    encoder = EncoderConfig(model=str(clip), device="cpu")
    image = BuildConfig(cache="c", source=source, encoder=encoder, image=ImageConfig(from_model=True)).prepared().image
    assert not image.from_model
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    fitted = fit_image(unreduced(noise), image.recipe, place(image.rule, noise.size))
    ours = still_in_range(torch.tensor(np.array([[fitted]])), PIXEL_RANGES[image.range], torch.device("cpu"))
    theirs = torch.from_numpy(processor(noise, return_tensors="np")["pixel_values"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # a level is 0.004 or more


@pytest.mark.parametrize("changes", [{"image_processor_type": "DINOv3ViTImageProcessor"}, {"image_mean": [0.1] * 3}])
def test_a_processor_that_cannot_be_followed_is_refused_by_the_field_to_leave_out(changes, clip):
    changed_config("preprocessor_config.json", **changes)(clip)
    with pytest.raises(ConfigError, match="image.from_model"):
        recipe_of_model(str(clip))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_cpus_tokens(folders):
    tokens = load(folders[GEMMA], device="cuda").encode(PHOTOS)
    torch.testing.assert_close(tokens.cpu(), load(folders[GEMMA]).encode(PHOTOS), rtol=1e-2, atol=1e-2)
