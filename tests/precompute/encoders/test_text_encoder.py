"""Text encoders give the embeddings that pipelines of diffusers give their transformers; misuse is refused."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from precompute.encoders.encoder import NO_TOKEN
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder, load_reference
from precompute.encoders.text_encoder import ZEROS, TransformersTextEncoder
from precompute.encoders.text_presets import PRESETS
from tests.families import first_and_slow
from tests.precompute.encoders.loading import image_recipe, load, shape_of
from tests.precompute.encoders.text_models import make_text_tokenizer, random_text_model, save_text_encoder

TEXTS = ["a tench", "a house finch, red as a brick", "x"]
AWKWARD = [
    "",
    "   ",
    " A  Tench\n\tin\r\nLINES \n",
    "fish &amp;amp; &lt;CHIPS&gt;",
    "sch\u00c3\u00b6n \u201cx\u201d\u00a0y",
    "&nbsp;z ",
]
"""Captions that pipelines clean in different ways: white space, entities, mojibake, capitals, nothing."""
LONG = "a caption of far more tokens than are kept of any"


def load_text(folder: Path, **options: Any) -> TransformersTextEncoder:
    encoder = load(folder, **{"max_tokens": 32, **options})
    assert isinstance(encoder, TransformersTextEncoder)
    return encoder


def padded(encoder: TransformersTextEncoder, texts: list[str]) -> Tensor:
    """Tokenize texts and pad them, as a batch does."""
    ids_NT = np.full((len(texts), encoder.texts.recipe.drop + encoder.texts.recipe.max_tokens), NO_TOKEN, np.int32)
    for row, tokens in zip(ids_NT, encoder.texts.tokens(texts), strict=True):
        row[: len(tokens.ids)] = tokens.ids
    return torch.from_numpy(ids_NT)


def encoded(encoder: TransformersTextEncoder, texts: list[str]) -> Tensor:
    return encoder.encode(padded(encoder, texts))


def pipeline(class_name: str, models: dict[str, str]) -> Any:
    """Make a pipeline of that class with only these text encoders and their tokenizers, by suffix."""
    kind = getattr(diffusers, class_name)
    parameters = inspect.signature(kind).parameters.items()
    parts = dict.fromkeys(name for name, each in parameters if each.default is each.empty)
    for suffix, each in models.items():
        parts[f"text_encoder{suffix}"], parts[f"tokenizer{suffix}"] = random_text_model(each), make_text_tokenizer(each)
    return kind(**parts)


def pad_behind(made: list[Tensor], tokens: int) -> Tensor:
    return torch.stack([torch.cat([each, each.new_zeros(tokens - len(each), each.shape[1])]) for each in made])


Embed = Callable[[Any, list[str]], Any]


def prompts(place: int = 0, **options: Any) -> Embed:
    """Return a function that takes one of the results of `encode_prompt`."""
    return lambda pipe, texts: pipe.encode_prompt(texts, device="cpu", **options)[place]


def guided(place: int, *, guidance: bool = False, **options: Any) -> Embed:
    return prompts(place, do_classifier_free_guidance=guidance, **options)


def t5_prompts(pipe: Any, texts: list[str]) -> Any:
    return pipe._get_t5_prompt_embeds(texts, max_sequence_length=32, device="cpu", dtype=torch.float32)


def clip_prompts(pipe: Any, texts: list[str]) -> Any:
    pipe.tokenizer_max_length = 32
    return pipe._get_clip_prompt_embeds(texts, device="cpu")


def first(embed: Embed, place: int = 0) -> Embed:
    return lambda pipe, texts: embed(pipe, texts)[place]


def padded_behind(embed: Embed, tokens: int) -> Embed:
    return lambda pipe, texts: pad_behind(list(embed(pipe, texts)), tokens)


def kandinsky(pipe: Any, texts: list[str]) -> list[Tensor]:
    made, _, ends = pipe.encode_prompt(texts, device="cpu")
    return [each[:length] for each, length in zip(made, ends.diff(), strict=True)]


def z_image(pipe: Any, texts: list[str]) -> Any:
    return pipe._encode_prompt([*texts], device="cpu", max_sequence_length=90)


def krea(pipe: Any, texts: list[str]) -> Any:
    """Move the padding, which the pipeline has before the template's end, behind it: the transformer ignores it."""
    vars(pipe)["text_encoder_select_layers"] = (1, 2, 4)  # the pipeline takes components alone
    made, mask = pipe.encode_prompt(texts, device="cpu", max_sequence_length=300)
    return pad_behind([each[seen].flatten(1) for each, seen in zip(made, mask, strict=True)], 300)


T5, UMT5, CLIP, POOLED_CLIP = "T5EncoderModel", "UMT5EncoderModel", "CLIPTextModelWithProjection", "CLIPTextModel"
GEMMA, QWEN, QWEN_VL = "Gemma2Model", "Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL, MISTRAL, LLAMA = "Qwen3VLModel", "Mistral3ForConditionalGeneration", "LlamaModel"

INSTRUCTION = inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default
SANA = {"max_sequence_length": 48, "complex_human_instruction": INSTRUCTION}
LONGER = {"max_sequence_length": 500}
LAYERS, LAYERS_OUT = {"layer": [1, 2, 4]}, {"text_encoder_out_layers": (1, 2, 4)}

PIPELINES: dict[str, tuple[str, dict[str, Any], str, Embed]] = {
    "FLUX.1-dev t5": (T5, {}, "FluxPipeline", t5_prompts),
    "FLUX.1-dev pooled": (POOLED_CLIP, {}, "FluxPipeline", clip_prompts),
    "SD clip": (POOLED_CLIP, {"max_tokens": 40}, "StableDiffusionPipeline", guided(0, num_images_per_prompt=1)),
    "SD3 clip": (CLIP, {}, "StableDiffusion3Pipeline", first(clip_prompts)),
    "SD3 pooled": (CLIP, {}, "StableDiffusion3Pipeline", first(clip_prompts, 1)),
    "SDXL clip-2": (CLIP, {"max_tokens": 40}, "StableDiffusionXLPipeline", guided(0)),
    "SDXL pooled": (CLIP, {"max_tokens": 40}, "StableDiffusionXLPipeline", guided(2)),
    "LTX t5": (T5, {}, "LTXPipeline", first(t5_prompts)),
    "CogVideoX t5": (T5, {}, "CogVideoXPipeline", t5_prompts),
    "Mochi t5": (T5, {}, "MochiPipeline", first(t5_prompts)),
    "AuraFlow umt5": (UMT5, {}, "AuraFlowPipeline", guided(0, max_sequence_length=32)),
    "PixArt t5": (T5, {}, "PixArtAlphaPipeline", guided(0, max_sequence_length=32)),
    "Wan umt5": (UMT5, {}, "WanPipeline", t5_prompts),
    "Kandinsky-5 qwen": (QWEN_VL, {"max_tokens": 240}, "Kandinsky5T2IPipeline", padded_behind(kandinsky, 240)),
    "Kandinsky-5 pooled": (POOLED_CLIP, {"max_tokens": 77}, "Kandinsky5T2IPipeline", prompts(1)),
    "SANA gemma": (GEMMA, {"max_tokens": 48}, "SanaPipeline", guided(0, **SANA)),
    "Lumina-2 gemma": (GEMMA, {"max_tokens": 220}, "Lumina2Pipeline", guided(0, max_sequence_length=220)),
    "Qwen-Image qwen": (QWEN_VL, {"max_tokens": 300}, "QwenImagePipeline", padded_behind(prompts(), 300)),
    "Krea-2 qwen": (QWEN3_VL, {"max_tokens": 300, **LAYERS}, "Krea2Pipeline", krea),
    "Z-Image qwen": (QWEN, {"max_tokens": 90}, "ZImagePipeline", padded_behind(z_image, 90)),
    "FLUX.2-klein qwen": (
        *(QWEN, {"max_tokens": 120, **LAYERS}, "Flux2KleinPipeline"),
        prompts(max_sequence_length=120, **LAYERS_OUT),
    ),
    "FLUX.2-dev mistral": (
        *(MISTRAL, {"max_tokens": 250, **LAYERS}, "Flux2Pipeline"),
        prompts(max_sequence_length=250, **LAYERS_OUT),
    ),
    "HunyuanVideo llama": (LLAMA, {"max_tokens": 500}, "HunyuanVideoPipeline", prompts(**LONGER)),
    "HunyuanVideo pooled": (POOLED_CLIP, {"max_tokens": 77}, "HunyuanVideoPipeline", prompts(1, **LONGER)),
}
"""By model and encoder of a preset: our encoder's class, its options beside the preset's, the pipeline's class, and
its embeddings of texts."""
BOTH = {
    "Kandinsky5T2IPipeline": {"": QWEN_VL, "_2": POOLED_CLIP},
    "HunyuanVideoPipeline": {"": LLAMA, "_2": POOLED_CLIP},
}
"""Pipelines that need both of their text encoders."""
NULL_PROMPTS = {
    "SANA gemma": guided(2, guidance=True, **SANA),
    "Lumina-2 gemma": guided(2, guidance=True, max_sequence_length=220),
}
"""Pipelines that encode the negative prompt in a way of its own."""
MASKED = ("PixArt", "SANA", "Lumina-2", "Mochi", "HunyuanVideo", "LTX", "Qwen-Image", "Krea-2")
"""Models whose transformers ignore the padding of a text."""


@pytest.mark.parametrize("name", first_and_slow(PIPELINES, quick=3))
def test_a_text_encoder_gives_its_pipelines_embeddings(tmp_path, name):
    """Also of its negative prompt, an empty one, and of a text that is cut."""
    (kind, options, class_name, embed), (model, each) = PIPELINES[name], name.split()
    options = {**PRESETS[model][each], "max_tokens": 32, **options}
    which = options["subfolder"].removeprefix("text_encoder")
    encoder = load_text(save_text_encoder(kind, tmp_path, which), **options)
    pipe = pipeline(class_name, BOTH.get(class_name) or {which: kind})
    texts, recipe = [*TEXTS, *AWKWARD], encoder.texts.recipe
    ours, theirs = encoded(encoder, texts), embed(pipe, [*texts])
    if model in MASKED and each != "pooled":  # its padding is ignored, and zeros in a cache
        assert recipe.padding in ZEROS
        counts = np.array([tokens.whole for tokens in encoder.texts.tokens(texts)])
        theirs = theirs.where(torch.from_numpy(recipe.mask(counts))[:, :, None], 0.0)
    assert ours.shape == theirs.shape == (len(texts), *shape_of(encoder, 1, recipe.max_tokens))
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    null_NT = torch.full((1, recipe.drop + recipe.max_tokens), NO_TOKEN)
    null_NT[0, : len(encoder.texts.null_ids)] = torch.tensor(encoder.texts.null_ids)
    ours, theirs = encoder.encode(null_NT), NULL_PROMPTS.get(name, embed)(pipe, [""])
    if model in MASKED and each != "pooled":
        theirs = theirs.where(torch.from_numpy(recipe.mask(np.array([recipe.null_tokens])))[:, :, None], 0.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert recipe.padding not in ZEROS or (ours != 0).any(-1).sum() == recipe.null_tokens
    if name in ("FLUX.1-dev t5", "SD3 pooled", "Wan umt5", "SANA gemma", "FLUX.2-dev mistral"):
        (tokens,) = encoder.texts.tokens([LONG])
        assert (len(tokens.ids), tokens.whole > recipe.max_tokens) == (recipe.drop + recipe.max_tokens, True)
        torch.testing.assert_close(encoded(encoder, [LONG]), embed(pipe, [LONG]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_preset_has_its_pipelines_length_and_layers(name):
    model, each = name.split()
    preset, parameters = PRESETS[model][each], inspect.signature(getattr(diffusers, PIPELINES[name][2]).__call__)
    defaults = {name: parameter.default for name, parameter in parameters.parameters.items()}
    if "clip" not in name and "pooled" not in name:
        assert preset["max_tokens"] == defaults["max_sequence_length"]
    if layers := defaults.get("text_encoder_out_layers"):
        assert preset["layer"] == [*layers]
    if model == "Krea-2":
        assert preset["layer"] == [*pipeline("Krea2Pipeline", {}).text_encoder_select_layers]


def test_each_preset_is_compared_or_like_one_that_is_and_is_on_its_page():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "encoders.md").read_text()
    for model, preset in PRESETS.items():
        for name, fields in preset.items():
            assert re.search(rf"\| `{name}` \| `{fields['subfolder']}` \| .*`max_tokens: {fields['max_tokens']}`", page)
        assert f"| {model} |" in page
    alike = ["SDXL clip", "SD3 clip-2", "SD3 pooled-2", "SD3 t5", "FLUX.1-schnell t5", "FLUX.1-schnell pooled"]
    assert {f"{model} {each}" for model, preset in PRESETS.items() for each in preset} == {*PIPELINES, *alike}


def test_padding_is_seen_masked_zero_or_before_the_text(tmp_path):
    """The text is short, beside a longer one; its token and its end are the first two, or the last."""
    folder, texts = save_text_encoder("T5EncoderModel", tmp_path), ["x", "a house finch"]
    kinds = ("seen", "masked", "zero", "seen-zero")
    seen, masked, zero, seen_zero = (encoded(load_text(folder, padding=each), texts)[0] for each in kinds)
    torch.testing.assert_close(seen_zero[:2], seen[:2], rtol=0, atol=0)
    assert (seen_zero[2:] == 0).all()
    assert not torch.allclose(seen[:2], masked[:2])
    torch.testing.assert_close(zero[:2], masked[:2], rtol=0, atol=0)
    assert (zero[2:] == 0).all()
    assert (masked[2:] != 0).any()
    left = load_text(folder, padding="left")
    (mask,) = left.texts.recipe.mask(np.array([2]))
    assert np.flatnonzero(mask).tolist() == [30, 31]
    torch.testing.assert_close(encoded(left, texts)[0][mask], masked[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["CLIPTextModel", "UMT5EncoderModel"])
def test_a_missing_text_is_finite_and_changes_no_other(tmp_path, kind):
    encoder = load_text(save_text_encoder(kind, tmp_path))
    ids_NT = padded(encoder, TEXTS)
    alone, ids_NT[1] = encoder.encode(ids_NT)[[0, 2]], NO_TOKEN
    made = encoder.encode(ids_NT)
    assert made.isfinite().all()
    torch.testing.assert_close(made[[0, 2]], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["T5EncoderModel", "Qwen3VLModel"])
def test_the_identity_follows_weights_and_tokenizer_not_files(tmp_path, kind):
    """Those of the canary's reference too."""
    folder, alone = save_text_encoder(kind, tmp_path / "pipeline"), tmp_path / "alone"
    encoder, model = load_text(folder), random_text_model(kind)
    model.save_pretrained(alone, max_shard_size="8KB")
    make_text_tokenizer(kind).save_pretrained(alone)
    assert load_text(alone).identity == encoder.identity
    model.half().float().save_pretrained(alone, max_shard_size="8KB")
    assert load_text(alone).identity.weights_sha256 != encoder.identity.weights_sha256
    config = EncoderConfig(model=str(folder), device="cpu", max_tokens=32)
    ids_NT = padded(encoder, TEXTS)
    torch.testing.assert_close(load_reference(config, None).encode(ids_NT), encoder.encode(ids_NT), rtol=0, atol=0)


def test_a_qwen_vl_reads_texts_or_images_as_configured(tmp_path):
    folder = save_text_encoder("Qwen2_5_VLForConditionalGeneration", tmp_path, "_2")
    assert load_text(folder, subfolder="text_encoder_2").identity.class_name == "Qwen2_5_VLTextModel"
    config = EncoderConfig(model=str(folder), subfolder="text_encoder_2", device="cpu")
    assert load_encoder(config, image_recipe("clip")).identity.class_name == "Qwen2_5_VisionTransformerPretrainedModel"
