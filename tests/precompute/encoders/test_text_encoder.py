"""Text encoders give the embeddings that pipelines of diffusers give their transformers; misuse is refused."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders.encoder import NO_TOKEN
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder, load_reference
from precompute.encoders.text_encoder import TransformersTextEncoder
from tests.precompute.encoders.loading import load
from tests.precompute.encoders.text_models import (
    LAYERS,
    TEXT_MODELS,
    make_text_tokenizer,
    random_text_model,
    save_text_encoder,
)

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
    ids_NT = np.full((len(texts), encoder.recipe.drop + encoder.recipe.max_tokens), NO_TOKEN, np.int32)
    for row, tokens in zip(ids_NT, encoder.tokens(texts), strict=True):
        row[: len(tokens.ids)] = tokens.ids
    return torch.from_numpy(ids_NT)


def encoded(encoder: TransformersTextEncoder, texts: list[str]) -> Tensor:
    return encoder.encode(padded(encoder, texts))


def pipeline(class_name: str, model: str = "", *, which: str = "", **models: str) -> Any:
    """Make a pipeline of that class with only this text encoder and its tokenizer, or several, by suffix."""
    kind = getattr(diffusers, class_name)
    parts = dict.fromkeys(kind._get_signature_types())
    for suffix, each in (models or {which: model}).items():
        parts[f"text_encoder{suffix}"], parts[f"tokenizer{suffix}"] = random_text_model(each), make_text_tokenizer(each)
    return kind(**parts)


def flux(texts: list[str]) -> Tensor:
    pipe = pipeline("FluxPipeline", "T5EncoderModel", which="_2")
    return pipe._get_t5_prompt_embeds(texts, max_sequence_length=32, device="cpu", dtype=torch.float32)


def flux_clip(texts: list[str]) -> Tensor:
    pipe = pipeline("FluxPipeline", "CLIPTextModel")
    pipe.tokenizer_max_length = 32
    return pipe._get_clip_prompt_embeds(texts, device="cpu")


def sd3(output: int) -> Callable[[list[str]], Tensor]:
    def embed(texts: list[str]) -> Tensor:
        pipe = pipeline("StableDiffusion3Pipeline", "CLIPTextModelWithProjection")
        pipe.tokenizer_max_length = 32
        return pipe._get_clip_prompt_embeds(texts, device="cpu")[output]

    return embed


def wan(texts: list[str]) -> Tensor:
    return pipeline("WanPipeline", "UMT5EncoderModel")._get_t5_prompt_embeds(
        texts, max_sequence_length=32, device="cpu"
    )


def ltx(texts: list[str]) -> Tensor:
    pipe = pipeline("LTXPipeline", "T5EncoderModel")
    return pipe._get_t5_prompt_embeds(texts, max_sequence_length=32, device="cpu")[0]


def cogvideox(texts: list[str]) -> Tensor:
    return pipeline("CogVideoXPipeline", "T5EncoderModel")._get_t5_prompt_embeds(texts, max_sequence_length=32)


def mochi(texts: list[str]) -> Tensor:
    return pipeline("MochiPipeline", "T5EncoderModel")._get_t5_prompt_embeds(texts, max_sequence_length=32)[0]


def aura_flow(texts: list[str]) -> Tensor:
    return pipeline("AuraFlowPipeline", "UMT5EncoderModel").encode_prompt(texts, None, False, max_sequence_length=32)[0]


def pixart(texts: list[str]) -> Tensor:
    pipe = pipeline("PixArtAlphaPipeline", "T5EncoderModel")
    return pipe.encode_prompt(texts, False, device="cpu", max_sequence_length=32)[0]


def sdxl(output: int) -> Callable[[list[str]], Tensor]:
    def embed(texts: list[str]) -> Tensor:
        pipe = pipeline("StableDiffusionXLPipeline", "CLIPTextModelWithProjection", which="_2")
        return pipe.encode_prompt(texts, device="cpu", do_classifier_free_guidance=False)[output]

    return embed


KANDINSKY = {"": "Qwen2_5_VLForConditionalGeneration", "_2": "CLIPTextModel"}


def kandinsky(texts: list[str]) -> Tensor:
    pipe = pipeline("Kandinsky5T2IPipeline", **KANDINSKY)
    made, _, ends = pipe.encode_prompt(texts, device="cpu")
    return pad_behind([each[:length] for each, length in zip(made, ends.diff(), strict=True)], 240)


def kandinsky_clip(texts: list[str]) -> Tensor:
    return pipeline("Kandinsky5T2IPipeline", **KANDINSKY).encode_prompt(texts, device="cpu")[1]


INSTRUCTION = inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default


def sana(output: int) -> Callable[[list[str]], Tensor]:
    def embed(texts: list[str]) -> Tensor:
        pipe = pipeline("SanaPipeline", "Gemma2Model")
        options = {"max_sequence_length": 48, "complex_human_instruction": INSTRUCTION}
        return pipe.encode_prompt(texts, output > 0, device="cpu", **options)[output]

    return embed


LUMINA_SYSTEM = "You are an assistant."


def lumina(output: int) -> Callable[[list[str]], Tensor]:
    def embed(texts: list[str]) -> Tensor:
        pipe = pipeline("Lumina2Pipeline", "Gemma2Model")
        options = {"system_prompt": LUMINA_SYSTEM, "max_sequence_length": 80}
        return pipe.encode_prompt(texts, output > 0, device="cpu", **options)[output]

    return embed


def qwen_image(texts: list[str]) -> Tensor:
    made, _ = pipeline("QwenImagePipeline", "Qwen2_5_VLForConditionalGeneration").encode_prompt(texts, device="cpu")
    return pad_behind(list(made), 300)


def z_image(texts: list[str]) -> Tensor:
    pipe = pipeline("ZImagePipeline", "Qwen3ForCausalLM")
    return pad_behind(pipe._encode_prompt([*texts], device="cpu", max_sequence_length=90), 90)


def klein(texts: list[str]) -> Tensor:
    pipe, layers = pipeline("Flux2KleinPipeline", "Qwen3ForCausalLM"), (1, 2, 4)
    made, _ = pipe.encode_prompt(texts, device="cpu", max_sequence_length=120, text_encoder_out_layers=layers)
    return made  # type: ignore[no-any-return]


def pad_behind(made: list[Tensor], tokens: int) -> Tensor:
    return torch.stack([torch.cat([each, each.new_zeros(tokens - len(each), each.shape[1])]) for each in made])


QWEN_IMAGE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
KANDINSKY_PROMPT = (
    "<|im_start|>system\nYou are a prompt engineer. Describe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>"
)
CONFIGS = Path(__file__).parents[3] / "configs"
SANA_CONFIG = yaml.safe_load((CONFIGS / "precompute_sana_text.yaml").read_text())["encoder"]
SANA = {**{name: SANA_CONFIG[name] for name in ("template", "drop", "clean")}, "max_tokens": 48}
LUMINA = {"template": f"{LUMINA_SYSTEM} <Prompt Start> {{}}", "layer": -2, "max_tokens": 80}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
KLEIN = {"template": f"{CHAT}<think>\n\n</think>\n\n", "layer": [1, 2, 4], "padding": "masked", "max_tokens": 120}

PIPELINES: dict[str, tuple[str, dict[str, Any], Callable[[list[str]], Tensor]]] = {
    "FLUX.1": ("T5EncoderModel", {}, flux),
    "FLUX.1, pooled": ("CLIPTextModel", {"output": "pooled"}, flux_clip),
    "SD3": ("CLIPTextModelWithProjection", {"layer": -2}, sd3(0)),
    "SD3, pooled": ("CLIPTextModelWithProjection", {"output": "pooled"}, sd3(1)),
    "SDXL": ("CLIPTextModelWithProjection", {"layer": -2, "max_tokens": 40}, sdxl(0)),
    "SDXL, pooled": ("CLIPTextModelWithProjection", {"output": "pooled", "max_tokens": 40}, sdxl(2)),
    "LTX": ("T5EncoderModel", {}, ltx),
    "CogVideoX": ("T5EncoderModel", {}, cogvideox),
    "Mochi": ("T5EncoderModel", {"padding": "masked"}, mochi),
    "AuraFlow": ("UMT5EncoderModel", {"clean": "none"}, aura_flow),
    "PixArt": ("T5EncoderModel", {"clean": "lower", "padding": "masked"}, pixart),
    "Wan": ("UMT5EncoderModel", {}, wan),
    "Kandinsky 5": (
        KANDINSKY[""],
        {"template": KANDINSKY_PROMPT, "drop": 40, "clean": "prompt_clean", "max_tokens": 240},
        kandinsky,
    ),
    "Kandinsky 5, pooled": (
        KANDINSKY["_2"],
        {"output": "pooled", "clean": "prompt_clean", "max_tokens": 77},
        kandinsky_clip,
    ),
    "SANA": ("Gemma2Model", SANA, sana(0)),
    "Lumina 2": ("Gemma2Model", LUMINA, lumina(0)),
    "Qwen-Image": (
        "Qwen2_5_VLForConditionalGeneration",
        {"template": QWEN_IMAGE, "drop": 34, "max_tokens": 300},
        qwen_image,
    ),
    "Z-Image": ("Qwen3ForCausalLM", {"template": CHAT, "layer": -2, "max_tokens": 90}, z_image),
    "FLUX.2 klein": ("Qwen3ForCausalLM", KLEIN, klein),
}


NULL_PROMPTS = {"SANA": sana(2), "Lumina 2": lumina(2)}
"""Pipelines that encode the negative prompt, by default an empty one, in a way of its own."""


@pytest.mark.parametrize("name", PIPELINES)
def test_the_null_prompt_is_encoded_as_its_pipelines_negative_prompt(tmp_path, name):
    kind, options, embed = PIPELINES[name]
    encoder = load_text(save_text_encoder(kind, tmp_path), **options)
    ids_NT = torch.full((1, encoder.recipe.drop + encoder.recipe.max_tokens), NO_TOKEN)
    ids_NT[0, : len(encoder.null_ids)] = torch.tensor(encoder.null_ids)
    ours, theirs = encoder.encode(ids_NT), NULL_PROMPTS.get(name, embed)([""])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    if encoder.recipe.padding == "zero":
        assert (ours != 0).any(-1).sum() == encoder.recipe.null_tokens


@pytest.mark.parametrize("name", PIPELINES)
def test_a_text_encoder_gives_its_pipelines_embeddings(tmp_path, name):
    kind, options, embed = PIPELINES[name]
    encoder = load_text(save_text_encoder(kind, tmp_path), **options)
    texts = [*TEXTS, *AWKWARD]
    ours, theirs = encoded(encoder, texts), embed([*texts])
    assert ours.shape == theirs.shape == (len(texts), *encoder.layout(0, 0).shape)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["FLUX.1", "SD3, pooled", "Wan", "SANA"])
def test_a_text_too_long_is_cut_as_its_pipeline_cuts_it(tmp_path, name):
    kind, options, embed = PIPELINES[name]
    encoder = load_text(save_text_encoder(kind, tmp_path), **options)
    (tokens,) = encoder.tokens([LONG])
    recipe = encoder.recipe
    assert (len(tokens.ids), tokens.whole > recipe.max_tokens) == (recipe.drop + recipe.max_tokens, True)
    torch.testing.assert_close(encoded(encoder, [LONG]), embed([LONG]), rtol=0, atol=1e-5)


def test_padding_is_seen_masked_or_zero(tmp_path):
    """The text is short, beside a longer one; its token and its end are the first two."""
    folder, texts = save_text_encoder("T5EncoderModel", tmp_path), ["x", "a house finch"]
    seen, masked, zero = (encoded(load_text(folder, padding=each), texts)[0] for each in ("seen", "masked", "zero"))
    assert not torch.allclose(seen[:2], masked[:2])
    torch.testing.assert_close(zero[:2], masked[:2], rtol=0, atol=0)
    assert (zero[2:] == 0).all()
    assert (masked[2:] != 0).any()


@pytest.mark.parametrize("kind", ["CLIPTextModel", "Gemma2Model", "UMT5EncoderModel"])
def test_a_missing_text_is_finite_and_changes_no_other(tmp_path, kind):
    encoder = load_text(save_text_encoder(kind, tmp_path))
    ids_NT = padded(encoder, TEXTS)
    alone, ids_NT[1] = encoder.encode(ids_NT)[[0, 2]], NO_TOKEN
    made = encoder.encode(ids_NT)
    assert made.isfinite().all()
    torch.testing.assert_close(made[[0, 2]], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_the_identity_follows_weights_and_tokenizer_not_files(tmp_path, kind):
    """The canary's reference has it too, and is near."""
    folder = save_text_encoder(kind, tmp_path / "pipeline")
    encoder = load_text(folder)
    alone = tmp_path / "alone"
    random_text_model(kind).half().float().save_pretrained(alone)
    make_text_tokenizer(kind).save_pretrained(alone)
    changed = load_text(alone).identity
    assert changed.weights_sha256 != encoder.identity.weights_sha256
    assert changed.tokenizer_sha256 == encoder.identity.tokenizer_sha256
    (alone / "model.safetensors").unlink()
    random_text_model(kind).save_pretrained(alone, max_shard_size="8KB")
    assert len([*alone.glob("*.safetensors")]) > 1
    assert load_text(alone).identity == encoder.identity
    config = EncoderConfig(model=str(folder), device="cpu", max_tokens=32)
    ids_NT = padded(encoder, TEXTS)
    exact, rounded = encoder.encode(ids_NT), load_encoder(config, "signed").encode(ids_NT)
    torch.testing.assert_close(load_reference(config, "signed").encode(ids_NT), exact, rtol=0, atol=0)
    assert 0 < (rounded - exact).square().mean().sqrt() < 0.03 * rounded.std()


def test_t5_is_the_same_with_its_decoder_or_without(tmp_path):
    """Its embeddings may be saved under another name."""
    random_text_model("T5ForConditionalGeneration").save_pretrained(tmp_path)
    make_text_tokenizer("T5").save_pretrained(tmp_path)
    identity = load_text(tmp_path).identity
    weights = load_file(tmp_path / "model.safetensors")
    encoder = {name: each for name, each in weights.items() if not name.startswith(("decoder", "lm_head"))}
    encoder["encoder.embed_tokens.weight"] = encoder.pop("shared.weight")
    save_file(encoder, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_text(tmp_path).identity == identity


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("CLIPTextModel", {"max_tokens": 78}, "encoder.max_tokens must be at most 77: the model has positions"),
        ("CLIPTextModel", {"max_tokens": 2}, "encoder.max_tokens must be at least 3, got 2: the template and"),
        ("CLIPTextModel", {"drop": 5}, "encoder.drop is 5, but encoder.template is 2 tokens alone"),
        ("Gemma2Model", {"layer": LAYERS + 1}, f"encoder.layer is {LAYERS + 1}, but .* has hidden states 0 to 4"),
        ("T5EncoderModel", {"max_tokens": None, "subfolder": "text_encoder"}, "which reads texts; set source.text: c"),
    ],
)
def test_an_option_that_does_not_fit_a_text_encoder_is_refused(tmp_path, kind, options, message):
    with pytest.raises(ConfigError, match=message):
        load_text(save_text_encoder(kind, tmp_path), **options)


def test_a_qwen_vl_reads_texts_or_images_as_configured(tmp_path):
    folder = save_text_encoder("Qwen2_5_VLForConditionalGeneration", tmp_path, "_2")
    assert load_text(folder, subfolder="text_encoder_2").identity.class_name == "Qwen2_5_VLTextModel"
    config = EncoderConfig(model=str(folder), subfolder="text_encoder_2", device="cpu")
    assert load_encoder(config, "clip").identity.class_name == "Qwen2_5_VisionTransformerPretrainedModel"
    for other, remedy in (("CLIPVisionModel", "leave out encoder.max_tokens"), ("BertModel", ".* --help` lists")):
        (tmp_path / "config.json").write_text(f'{{"architectures": ["{other}"]}}')
        with pytest.raises(ConfigError, match=f"which is not a known text encoder; {remedy}"):
            load_encoder(replace(config, subfolder="", max_tokens=8), "signed")
