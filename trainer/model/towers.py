"""Make each tower's projector from caches and config, and describe it for the projector file."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from msgspec import to_builtins
from torch import Tensor

from cache_store import Cache, JoinedCache
from cache_store.cache.metadata import read_build
from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import ArrayRecipe
from cache_store.format.layout import BUILD_FILE
from cache_store.messages import flatten
from trainer.model.language_model import LanguageModel
from trainer.model.load_language_model import refuse_no_image_masks
from trainer.model.model_config import PRETRAINED, WORLD, Ends, ModelConfig
from trainer.model.own_projector import ImageParts, PretrainedProjector, refuse_other_states
from trainer.model.projector import Projector, Projectors, TowerProjector
from trainer.model.projector_file import Tower, TowerLayout, shared_shape

NOT_OF_MEANING = {"max_pixels", "flip", "decode", "path", "compiled", "compute_dtype", "batch_size"}
"""Fields of image recipe and encoder that do not change what a latent means: they choose the picture, or only round.
"""


def refuse_unread(config: ModelConfig, joined: JoinedCache) -> None:
    """Raise ConfigError, before the language model is loaded, for samples that no projector can read."""
    for name, cache in joined.caches.items():
        layout_of(config, name, cache)
    if all(cache.spec.array.text for cache in joined.caches.values()):
        raise ConfigError(
            f"cache: {joined.first.store} holds texts, and no other cache holds images; name one of images, "
            "and this one beside it in `caches`"
        )


def make_projectors(config: ModelConfig, caches: Mapping[str, Cache], language: LanguageModel, seed: int) -> Projectors:
    """Make each tower's projector, not yet scaled, and freeze those that are not trained."""
    towers = {name: make_projector(config, name, cache, language, seed) for name, cache in caches.items()}
    full = frozenset(name for name in caches if config.form(name).attention == "full")
    if full:
        refuse_no_image_masks(language, config.language_model)
    for name, each in towers.items():
        each.requires_grad_(config.form(name).trained)
    return Projectors(towers, full)


def make_projector(config: ModelConfig, name: str, cache: Cache, language: LanguageModel, seed: int) -> TowerProjector:
    form, own_seed = config.form(name), tower_seed(name, seed)
    layout = layout_of(config, name, cache)
    ends = ends_of(form.ends, config, language)
    if form.projector == PRETRAINED:
        parts = require_image_parts(config, language)
        (only,) = cache.arrays
        refuse_other_states(parts, only.shape, str(cache.store))
        pretrained = PretrainedProjector(
            sample_shape=only.shape,
            width=language.width,
            num_world_tokens=parts.tokens,
            norm_eps=parts.norm_eps,
            ends=ends,
        )
        pretrained.take_weights(parts, torch.Generator().manual_seed(own_seed))
        return pretrained
    mean, std = sample_statistics(cache)
    return Projector(
        sample_shape=max((each.shape for each in cache.arrays), key=math.prod),
        width=language.width,
        layout=layout,
        shape=form.projector,
        mean=mean,
        std=std,
        seed=own_seed,
        ends=ends,
    )


def tower_seed(name: str, seed: int) -> int:
    """Return the seed of a tower's random weights: the run's own for `world`, else derived from it and the name."""
    if name == WORLD:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:8], "little") // 2


def layout_of(config: ModelConfig, name: str, cache: Cache) -> TowerLayout:
    """Return the layout of a cache's samples; ConfigError if no projector reads them as the config says."""
    asked = config.towers[name].layout if config.towers and name in config.towers else None
    array, where = cache.spec.array, cache.store
    axes, feature = len(array.axes), array.feature_place
    layout: TowerLayout = config.form(name).layout
    if (axes, feature) == (2, 1):
        if asked:
            raise ConfigError(
                f"model.towers.{name}.layout: {where} holds [{array.named_axes}], which are tokens "
                "already; leave out the layout"
            )
        layout = "token"
    elif axes not in (3, 4) or feature != 0:
        raise ConfigError(
            f"cache: {where} holds [{array.named_axes}] for each {array.made_of}; a projector reads latents of a VAE, "
            "[channel, latent_y, latent_x], with latent_t of clips, or tokens, [token, feature]; other samples are for "
            "a training loop of your own: trainer.LatentStream"
        )
    if len(cache.arrays) > 1 and (layout == "channel" or config.form(name).projector == PRETRAINED):
        raise ConfigError(
            f"model.layout: channel, and model.projector: {PRETRAINED}, read images of one size, and those of {where} "
            "have several; take model.layout: spatial and another projector"
        )
    return layout


def require_image_parts(config: ModelConfig, language: LanguageModel) -> ImageParts:
    if language.image_parts is None:
        raise ModelError(
            f"model.language_model {config.language_model!r} has no projector that this program knows: "
            "Gemma 3's multimodal checkpoints do"
        )
    return language.image_parts


@torch.no_grad()
def ends_of(ends: Ends, config: ModelConfig, language: LanguageModel) -> Tensor | Literal["learned"] | None:
    if ends != "checkpoint":
        return "learned" if ends == "learned" else None
    parts = require_image_parts(config, language)
    own_2D: Tensor = language.embed(torch.tensor([parts.boi, parts.eoi], device=language.device))
    return own_2D.float().cpu()


def sample_statistics(cache: Cache) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each feature that is read: the encoder's own, else the cache's."""
    array, summary = cache.spec.array, cache.seal.array
    features = array.features // 2 if array.encoder.posterior == "moments" else array.features
    if len(array.encoder.latents_mean) == features:  # FLUX.2's statistics are of patches
        return array.encoder.latents_mean, array.encoder.latents_std
    return summary.mean[:features], summary.std[:features]


def tower_record(config: ModelConfig, name: str, cache: Cache, projector: TowerProjector) -> Tower:
    form = config.form(name)
    return Tower(
        name=name,
        projector=form.projector,
        layout=layout_of(config, name, cache),
        ends=projector.ends is not None,
        ends_from="checkpoint" if form.ends == "checkpoint" else "learned",
        attention=form.attention,
        trained=form.trained,
        norm_eps=projector.norm_eps if isinstance(projector, PretrainedProjector) else None,
        tokens=projector.num_tokens,
        features=projector.num_features,
        array=cache.spec.array,
        shapes=tuple(each.shape for each in cache.arrays),
        encoder_model=encoder_model(cache),
        cache_identity=cache.identity,
    )


def encoder_model(cache: Cache) -> str | None:
    if not cache.store.has(BUILD_FILE):
        return None
    model = read_build(cache.store).config.get("encoder", {}).get("model")
    return model if isinstance(model, str) else None


def describe_by_tower(towers: Sequence[Tower], describe: Callable[[Tower], dict[str, str]]) -> dict[str, str]:
    prefixes = [f"{tower.name}." * (len(towers) > 1) for tower in towers]
    described = zip(prefixes, map(describe, towers), strict=True)
    return {prefix + key: value for prefix, fields in described for key, value in fields.items()}


def describe_tower_samples(tower: Tower) -> dict[str, str]:
    return describe_samples(tower.array, tower.shapes)


def describe_form(tower: Tower) -> dict[str, str]:
    return {
        "model.layout": tower.layout,
        "model.projector": tower.projector,
        "model.ends": tower.ends_from if tower.ends else "none",
        "model.attention": tower.attention,
        "model.trained": str(tower.trained).lower(),
    }


def describe_samples(array: ArrayRecipe, shapes: Sequence[tuple[int, ...]]) -> dict[str, str]:
    """Describe the pixels, or the text, and the encoder that samples come from, as far as they change their meaning."""
    parts = {"encoder": to_builtins(array.encoder), array.made_of: to_builtins(array.text or array.images)}
    meant = {
        part: {name: value for name, value in fields.items() if name not in NOT_OF_MEANING}
        for part, fields in parts.items()
    }
    described = {"latents.shape": f"[{shared_shape(shapes)}]", **dict(flatten(meant))}
    return {name: str(value) for name, value in described.items()}
