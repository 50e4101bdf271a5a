"""The config of the frozen language model and of the projectors in front of it; no torch, so that `--help` is quick."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from cache_store.errors import ConfigError
from cache_store.program.config import format_value, suggest

WORLD = "world"
"""The tower's name in a run from one cache."""

TOWER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

PRETRAINED = "pretrained"
"""The projector that a multimodal checkpoint brings."""

AutoClass = Literal["AutoModelForCausalLM", "AutoModelForImageTextToText"]
TEXT_ALONE: AutoClass = "AutoModelForCausalLM"
"""The class of transformers that opens a language model; multimodal ones may need the other."""

ProjectorKind = Literal["linear", "mlp", "mlp_gelu", "pretrained"]
Layout = Literal["spatial", "channel"]
Ends = Literal["learned", "none", "checkpoint"]
Attention = Literal["causal", "full"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """One tower's part of the model, where it is another than usual."""

    projector: ProjectorKind | None = None
    """null: as `model.projector`."""
    layout: Layout | None = None
    """Of latents; null: as `model.layout`. A sample of [token, feature] has none: its tokens are the tokens."""
    ends: Ends | None = None
    """Around the tower's tokens: learned START and END, nothing, or what the checkpoint itself puts around an image;
    null: learned, and checkpoint for a pretrained projector."""
    attention: Attention | None = None
    """Whether its tokens see those before them, or all of their image; null: causal, and full for a pretrained one."""
    trained: bool | None = None
    """Whether the projector learns; null: true, and false for a pretrained one."""


@dataclass(frozen=True, kw_only=True)
class TowerForm:
    """A tower's part of the model, with every field decided."""

    projector: ProjectorKind
    layout: Layout
    ends: Ends
    attention: Attention
    trained: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The frozen language model and the projector in front of it."""

    language_model: str
    """A hub id or a folder: any transformers causal language model, or a multimodal one, which gives its text model; it
    stays frozen."""
    layout: Layout = "spatial"
    """World tokens of a latent: `spatial` gives H·W tokens of C values, `channel` C tokens of H·W values."""
    projector: ProjectorKind = "mlp"
    """Shape of the projector: one linear map, linear-GELU-linear, TheWorld's, with a GELU at the end too, or the one
    that a multimodal checkpoint of the language model brings."""
    towers: dict[str, TowerConfig] | None = None
    """What differs for single towers: {siglip: {projector: pretrained}}; its fields are projector, layout, ends
    (learned, none, checkpoint), attention (causal, full) and trained."""
    chat_template: str | None = None
    """A Jinja file in place of the tokenizer's own chat template."""
    init_projector: str | None = None
    """A trained projector to start from: a run's folder or a projector's file; null: random weights."""

    def form(self, tower: str) -> TowerForm:
        own = (self.towers or {}).get(tower, TowerConfig())
        projector = own.projector or self.projector
        pretrained = projector == PRETRAINED
        return TowerForm(
            projector=projector,
            layout=own.layout or self.layout,
            ends=own.ends or ("checkpoint" if pretrained else "learned"),
            attention=own.attention or ("full" if pretrained else "causal"),
            trained=not pretrained if own.trained is None else own.trained,
        )

    def refuse_unfit(self, towers: Collection[str]) -> None:
        """Raise ConfigError for towers that no cache is of, and for frozen ones that would be random."""
        for name in self.towers or {}:
            if name not in towers:
                raise ConfigError(f"model.towers: no cache is of the tower {suggest(name, towers)}")
        forms = {name: self.form(name) for name in towers}
        if not any(form.trained for form in forms.values()):
            frozen = "model.towers" if self.towers else f"model.projector: {self.projector}"
            first = next(iter(towers))
            raise ConfigError(
                f"{frozen}: nothing is left to train: {', '.join(forms)} frozen, as a pretrained projector is if "
                f"nothing is said; to train one: --model.towers '{{{first}: {{trained: true}}}}'"
            )
        for name, form in forms.items():
            if not form.trained and self.init_projector is None:
                refuse_random(name, form)


def refuse_random(name: str, form: TowerForm) -> None:
    """Raise ConfigError where a tower's frozen weights would be random ones."""
    frozen = f"model.towers: {name} is frozen, and "
    if form.projector != PRETRAINED:
        raise ConfigError(f"{frozen}its weights would be random; name trained ones with model.init_projector")
    if form.ends == "learned":
        raise ConfigError(f"{frozen}its START and END would be random; set its ends: checkpoint or none, or train it")


def each_with(option: str, towers: Collection[str]) -> str:
    """Spell an option that names something for each tower, as it is typed."""
    return f"--{option} '{{{', '.join(f'{name}: …' for name in towers)}}}'"


def refuse_other_towers(views: Sequence[Collection[str]]) -> None:
    """Raise ConfigError where two views are not of the same towers."""
    names = dict.fromkeys(name for view in views for name in view)
    for place, view in enumerate(views, 1):
        for name in names.keys() - set(view):
            raise ConfigError(
                f"views: no. {place} has no cache for the tower {name}; name one for each of {', '.join(names)} in each"
            )


def refuse_tower_names(names: Collection[str]) -> None:
    for name in names:
        if not TOWER_NAME.fullmatch(name):
            raise ConfigError(f"caches: a tower's name has small letters, digits and _ alone, got {format_value(name)}")
    if not names:
        raise ConfigError("caches: name at least one: {world: FOLDER, siglip: FOLDER}")
