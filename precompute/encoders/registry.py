"""The encoders that are served, by the class in a model's config.json: VAEs, vision towers and text encoders.

The modules of families import torch and the libraries of models only inside their functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cache_store.errors import ConfigError, ModelError
from precompute.encoders import text_families, tower_families
from precompute.encoders.encoder import Encoder, Family
from precompute.encoders.encoder_config import STILL_FIELDS, EncoderConfig
from precompute.encoders.vaes import families as vae_families

if TYPE_CHECKING:
    from cache_store.format.array import ImageRecipe
    from precompute.encoders.encoder import Decoder
    from precompute.encoders.model_files import ModelFiles


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Names a user's own encoder: `my_package.module:MyEncoder`."""

MODELS = {
    "AutoencoderKLWan": "Wan 2.1, 2.2, Cosmos-Predict 2 to 3, Qwen-Image",
    "AutoencoderKLCosmos": "Cosmos 1.0",
    "AutoencoderKL": "SD, SDXL, SD3, FLUX.1",
    "AutoencoderKLFlux2": "FLUX.2",
    "AutoencoderDC": "SANA",
    "AutoencoderTiny": "TAESD, TAEF1",
    "AutoencoderKLHunyuanVideo": "HunyuanVideo, LTX, Mochi, CogVideoX",
    "SiglipVisionModel": "SigLIP, SigLIP 2 of fixed size, Gemma 3, PaliGemma",
    "CLIPVisionModel": "CLIP, LLaVA",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL to Qwen3-VL, at a fixed size",
    "Dinov2Model": "DINOv2, DINOv3",
    "AutoModel": "any vision tower of fixed size in transformers",
    "T5EncoderModel": "text of FLUX.1, SD3, LTX; UMT5 of Wan",
    "CLIPTextModel": "text of SD, SDXL, SD3, FLUX.1",
    "Gemma2Model": "text of Lumina 2, SANA",
    "Qwen3ForCausalLM": "text of Z-Image, FLUX.2 klein, Qwen-Image, Krea 2",
    "Mistral3ForConditionalGeneration": "text of FLUX.2 dev",
    "LlamaModel": "text of HunyuanVideo",
    "my_module:MyEncoder": "an encoder of your own, by import path",
}
"""For the help: the first class of each family, and its models."""

REFUSED = {
    "AutoencoderKLAllegro": "diffusers encodes videos alone with it, in tiles",
    "AutoencoderKLHunyuanVideo15": "diffusers encodes no batch with it",
    **dict.fromkeys(("ViTMAEModel", "ViTMAEForPreTraining"), "it masks and shuffles patches at random"),
    **dict.fromkeys(("Siglip2Model", "Siglip2VisionModel"), "it is NaFlex; take a SigLIP 2 of fixed size"),
}
"""Classes that cannot be served, and the reason."""

OTHER_ORDER = "Ideogram4Pipeline"
"""A pipeline that stacks the cells of FLUX.2's class of VAE in another order, which `normalize` would get wrong."""

KNOWN = "`precompute build --help` lists those that are"


def help_lines() -> Iterator[str]:
    yield from (f"  {class_name:<20}  {models}" for class_name, models in MODELS.items())


def family_of(files: ModelFiles, *, reads_text: bool) -> Family | None:
    """Return the family of the model's class; that of towers for an unlisted class with an `image_size`."""
    name = files.class_name
    if reads_text:
        return text_families.FAMILY if name in text_families.LOCATIONS else None
    if name in vae_families.KINDS:
        return vae_families.family_of(name)
    if name in tower_families.LOCATIONS or name in tower_families.QWEN or "image_size" in files.config:
        return tower_families.family_of(name)
    return None


def find_family(config: EncoderConfig) -> tuple[Family, ModelFiles]:
    """Find the model's family and files; raise ModelError for an unknown class."""
    from precompute.encoders.model_files import (  # needs huggingface_hub, which `--help` does without
        ModelFiles,
        pipeline_class,
        refuse_quantised,
    )

    model = config.model
    if (files := usable_files(config)) is None:
        from precompute.encoders import own

        return own.FAMILY, ModelFiles(model=model, subfolder="", class_name=model, config={})
    refuse_quantised(files, config.reads_text)
    if not config.reads_text and (reason := REFUSED.get(files.class_name)):
        raise ModelError(f"encoder.model {model} is of class {files.class_name}: {reason}")
    if files.class_name == "AutoencoderKLFlux2" and pipeline_class(files.model) == OTHER_ORDER:
        raise ModelError(
            f"encoder.model {model} is of class {OTHER_ORDER}, which is not served: its order of channels is another"
        )
    if (family := family_of(files, reads_text=config.reads_text)) is None:
        raise ModelError(f"encoder.model {model} is of class {files.class_name}, which is not known; {KNOWN}")
    return family, files


def find_encoder_files(config: EncoderConfig) -> ModelFiles:
    from precompute.encoders.model_files import SUBFOLDERS, find_model

    if config.subfolder is not None:
        return find_model(config.model, (config.subfolder,))
    return find_model(config.model, ("text_encoder", "") if config.reads_text else SUBFOLDERS)


def refuse_wrong_use(files: ModelFiles, config: EncoderConfig) -> None:
    """Raise ConfigError if a model for images is to read texts, or the reverse."""
    where = f"encoder.model {config.model} is of class {files.class_name}"
    of_texts, of_images = (family_of(files, reads_text=reads_text) for reads_text in (True, False))
    if config.reads_text and not of_texts:
        remedy = "leave out encoder.max_tokens and source.text" if of_images else KNOWN
        raise ConfigError(f"{where}, which is not a known text encoder; {remedy}")
    if not config.reads_text and of_texts and not of_images:
        raise ConfigError(
            f"{where}, which reads texts; set source.text: caption, and encoder.max_tokens, the tokens of each text"
        )


def usable_files(config: EncoderConfig) -> ModelFiles | None:
    """Return the model's files; None for a user's class. Raises ConfigError if images and texts are confused."""
    if IMPORT_PATH.fullmatch(config.model):
        return None
    files = find_encoder_files(config)
    refuse_wrong_use(files, config)
    return files


def refuse_other_class(of: str, name: str, files: ModelFiles) -> None:
    """Raise ConfigError if an encoder's class does not begin as its cache is named, as t5; clip for a pooled vector."""
    begins = name.partition("-")[0].replace("pooled", "clip")
    if not files.class_name.lower().startswith(begins):
        raise ConfigError(
            f"model: {of}'s {name} is a {begins.upper()} text encoder, but {files.model}/{files.subfolder} is a "
            f"{files.class_name}; name a pipeline of {of}"
        )


def refuse_image_size(config: EncoderConfig, height: int, width: int) -> None:
    """Raise ConfigError if the encoder cannot take images of this size; leave a broken config to loading."""
    files = usable_files(config)
    if files is None or config.reads_text:
        return
    try:
        if family := family_of(files, reads_text=False):
            family.refuse_size(files, height, width)
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # loading the model reports the problem


def load_encoder(config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    """Load the frozen encoder that `config` names, for images or clips of a recipe, or for texts.

    For clips it is never folded: the folded network has no time.
    """
    family, files = find_family(config)
    is_clip = image is not None and bool(image.clip)
    if is_clip and not family.takes_clips:
        raise ConfigError(
            f"encoder.model: {files.class_name} encodes images alone; leave clip out, or take a video model's VAE"
        )
    used_on = f"clips of {files.class_name}" if is_clip else files.class_name
    config.refuse_unused_fields(taken_fields(family, image), used_on)
    return family.load(files, config, image)


def taken_fields(family: Family, image: ImageRecipe | None) -> list[str]:
    return [name for name in family.takes if name not in STILL_FIELDS or not (image and image.clip)]


def load_reference(config: EncoderConfig, image: ImageRecipe | None, device: str = "cpu") -> Encoder:
    """Load the same weights in float32, as diffusers or transformers itself runs them, for the canary."""
    family, _ = find_family(config)
    config = replace(config, compute_dtype="float32", device=device)
    native: dict[str, Any] = {name: False for name in taken_fields(family, image) if name in STILL_FIELDS}
    try:
        return load_encoder(replace(config, **native), image)
    except ConfigError:
        if not native:
            raise
        return load_encoder(replace(config, **native | {"fold": True}), image)  # diffusers cannot run this model


def load_decoder(config: EncoderConfig) -> Decoder:
    family, files = find_family(config)
    if family.load_decoder is None:
        raise ConfigError(f"encoder.model {config.model} is of class {files.class_name}, which has no decoder")
    return family.load_decoder(files, config.torch_device)
