"""The config of the frozen language model and of the projectors in front of it; no torch, so that `--help` is quick."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from cache_store.errors import ConfigError
from cache_store.program.config_file import format_value, suggest

WORLD = "world"
"""Name of the only tower in a run from a single cache."""

TOWER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

PRETRAINED = "pretrained"
"""Kind of projector: the one in a multimodal checkpoint."""

AutoClass = Literal["AutoModelForCausalLM", "AutoModelForImageTextToText"]
TEXT_ALONE: AutoClass = "AutoModelForCausalLM"
"""transformers' class that opens a language model; multimodal checkpoints may need the other class."""

ProjectorKind = Literal["linear", "mlp", "mlp_gelu", "pretrained"]
Layout = Literal["spatial", "channel"]
Ends = Literal["learned", "none", "checkpoint"]
Attention = Literal["causal", "full"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Settings of one tower, where they differ from the defaults."""

    projector: ProjectorKind | None = None
    """Kind of projector; null: `model.projector`."""
    layout: Layout | None = None
    """Layout of latents; null: `model.layout`. Samples of [token, feature] have none."""
    ends: Ends | None = None
    """Around the tower's tokens: learned START and END, nothing, or the embeddings that the checkpoint itself puts
    around an image. null: learned; checkpoint for a pretrained projector."""
    attention: Attention | None = None
    """Whether its tokens attend only to earlier ones (causal) or to all of their image (full). null: causal; full for a
    pretrained projector."""
    trained: bool | None = None
    """Whether the projector is trained. null: true; false for a pretrained projector."""


@dataclass(frozen=True, kw_only=True)
class TowerForm:
    """Settings of one tower after the defaults are filled in."""

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
    """How a latent becomes world tokens: `spatial` gives H·W tokens of C values, `channel` C tokens of H·W values."""
    projector: ProjectorKind = "mlp"
    """Kind of projector: `linear` is one linear map, `mlp` is linear-GELU-linear, `mlp_gelu` is TheWorld's, with a GELU
    at the end too, `pretrained` is the one in a multimodal checkpoint of the language model."""
    towers: dict[str, TowerConfig] | None = None
    """Settings that differ for single towers: {siglip: {projector: pretrained}}. The fields are projector, layout, ends
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
        for name in self.towers or {}:
            if name not in towers:
                raise ConfigError(f"model.towers: there is no cache for the tower {suggest(name, towers)}")
        forms = {name: self.form(name) for name in towers}
        if not any(form.trained for form in forms.values()):
            frozen = "model.towers" if self.towers else f"model.projector: {self.projector}"
            first = next(iter(towers))
            raise ConfigError(
                f"{frozen}: nothing is left to train: {', '.join(forms)} frozen, as a pretrained projector is by "
                f"default; to train one: --model.towers '{{{first}: {{trained: true}}}}'"
            )
        for name, form in forms.items() if self.init_projector is None else ():
            if not form.trained and (form.projector != PRETRAINED or form.ends == "learned"):
                raise ConfigError(
                    f"model.towers: {name} is frozen, and its weights or its START and END would be random; train it, "
                    "name trained ones with model.init_projector, or set projector: pretrained and ends: checkpoint"
                )


def spell_option(option: str, towers: Collection[str]) -> str:
    return f"--{option} '{{{', '.join(f'{name}: …' for name in towers)}}}'"


def refuse_other_towers(views: Sequence[Collection[str]]) -> None:
    names = dict.fromkeys(name for view in views for name in view)
    for place, view in enumerate(views, 1):
        for name in names.keys() - set(view):
            raise ConfigError(
                f"views: no. {place} has no cache for the tower {name}; name one for each of {', '.join(names)} in each"
            )


def refuse_tower_names(names: Collection[str]) -> None:
    for name in names:
        if not TOWER_NAME.fullmatch(name):
            raise ConfigError(
                f"caches: a tower's name has only small letters, digits and _, a letter first and 32 at most, "
                f"got {format_value(name)}"
            )
    if not names:
        raise ConfigError("caches: name at least one: {world: FOLDER, siglip: FOLDER}")
