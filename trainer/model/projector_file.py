"""A trained projector as one safetensors file that describes itself.

    {tower}.mean, {tower}.std         statistics that standardise a sample, shaped to broadcast over it
    {tower}.layers.{n}.weight, .bias  the projector's matrices
    {tower}.norm, {tower}.weight      in place of these four, if the projector is a checkpoint's own
    {tower}.ends                      [2, D]: START and END, if the tower has them

All tensors are float32, frozen towers' too. The metadata has one key, METADATA_KEY, whose value is a `ProjectorConfig`
as canonical JSON. `config.json` beside the file repeats it; this program never reads that.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cache_store.errors import CacheError, ConfigError
from cache_store.format.array import ArrayRecipe, Count, Side
from cache_store.format.record import Record, canonical_json, parse_record, refuse_other_version
from cache_store.storage.files import file_sha256
from trainer.model.model_config import PRETRAINED, TEXT_ALONE, Attention, AutoClass, ProjectorKind
from trainer.model.own_projector import PretrainedProjector
from trainer.model.projector import Projector, Projectors, TowerProjector

PROJECTOR_FILE, CONFIG_FILE = "projector.safetensors", "config.json"
METADATA_KEY = "encode_once.projector"
"""The only metadata key: safetensors writes several in no fixed order, and equal projectors give equal bytes."""

VERSIONED = ("encode-once", "torch", "transformers")


TowerLayout = Literal["spatial", "channel", "token"]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class Tower(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One encoder's samples, and the projector that turns them into tokens.

    Defaults are not written: equal projectors give equal bytes in every version.
    """

    name: str
    projector: ProjectorKind
    layout: TowerLayout
    """`spatial` or `channel` for latents, `token` for samples that are tokens already."""
    ends: bool
    """Whether START and END are put around its tokens."""
    ends_from: Literal["learned", "checkpoint"] = "learned"
    attention: Attention = "causal"
    """Whether its tokens attend to each other (`full`) or only to earlier ones (`causal`)."""
    trained: bool = True
    norm_eps: float | None = None
    """Epsilon of the norm in a checkpoint's own projector; None for other kinds."""
    tokens: Count
    """START and END included; the most if images have several sizes."""
    features: Count
    """Values of one token before the projector."""
    array: ArrayRecipe
    shapes: Annotated[tuple[tuple[Side, ...], ...], msgspec.Meta(min_length=1)]
    """Shape of a sample of each size that the cache has."""
    encoder_model: str | None
    """Where the cache's build found the encoder: a hub id or a folder."""
    cache_identity: str

    @property
    def shape(self) -> tuple[int, ...]:
        return max(self.shapes, key=prod)


class ReadBy(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The frozen language model that reads the tokens."""

    name: str
    """A hub id or a folder."""
    identity: str
    """`LanguageModel.identity`"""
    width: Width
    precision: Literal["bf16", "fp32"]
    opened_by: AutoClass = TEXT_ALONE
    """transformers' class that opens it."""


class TextRule(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the text around the tokens is rendered."""

    begins_with_bos: bool
    """Whether BOS comes before all towers; if not, the first tower comes first."""
    chat_template: str
    """Jinja."""
    content_in_parts: bool = False
    end_of_turn: str
    """What the template writes after the assistant's words; a label in training."""


class Training(Record, frozen=True, kw_only=True):
    """How far the projector was trained."""

    steps: Count
    samples: Count
    """Samples consumed; counted again in each epoch."""
    val_fraction: float
    started_from: str | None = None
    """SHA-256 of that projector's file; null: random weights."""


class ProjectorConfig(Record, frozen=True, kw_only=True):
    """Everything needed to use a trained projector, besides its tensors."""

    format_version: int
    towers: tuple[Tower, ...]
    """The order in which the language model reads them: [BOS], towers, text."""
    language_model: ReadBy
    text: TextRule
    training: Training
    versions: dict[str, str]

    @property
    def tower(self) -> Tower:
        """The only tower; ValueError if there are several."""
        (tower,) = self.towers
        return tower

    @property
    def full(self) -> frozenset[str]:
        return frozenset(tower.name for tower in self.towers if tower.attention == "full")

    @property
    def as_json(self) -> bytes:
        return json.dumps(msgspec.to_builtins(self), indent=2, ensure_ascii=False).encode() + b"\n"


def library_versions() -> dict[str, str]:
    found = dict[str, str]()
    for name in VERSIONED:
        with suppress(PackageNotFoundError):  # a clone runs without being installed
            found[name] = version(name)
    return found


def projector_bytes(projectors: Projectors, config: ProjectorConfig) -> bytes:
    towers = [(tower, each.state_dict().items()) for tower, each in projectors.items()]
    tensors = {f"{tower}.{name}": tensor.detach() for tower, tensors in towers for name, tensor in tensors}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return save(tensors, {METADATA_KEY: canonical_json(config).decode()})


def read_projector_file(path: Path) -> tuple[ProjectorConfig, dict[str, Tensor]]:
    """Return config and tensors. Raise ConfigError if the file is not a projector, CacheError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        raise CacheError(f"{path} cannot be read: {error}") from None
    if METADATA_KEY not in metadata:
        raise ConfigError(f"{path} is no projector of this program: its metadata has no {METADATA_KEY}")
    return parse_config(metadata[METADATA_KEY].encode(), str(path)), tensors


def parse_config(data: bytes, where: str) -> ProjectorConfig:
    refuse_other_version(data, where)
    config = parse_record(ProjectorConfig, data, where)
    names = [tower.name for tower in config.towers]
    if not names or len(set(names)) < len(names):
        raise CacheError(f"{where} names its towers {names}; it must name at least one, each with a different name")
    return config


def load_tensors(projectors: Projectors, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load each tower's tensors; CacheError if their names, dtypes or shapes are not its own."""
    for tower, projector in projectors.items():
        mine = {name.removeprefix(f"{tower}."): each for name, each in tensors.items() if name.startswith(f"{tower}.")}
        found, expected = (
            {name: dtype_and_shape(each) for name, each in state.items()} for state in (mine, projector.state_dict())
        )
        if found != expected:
            name = min(dict(found.items() ^ expected.items()))
            raise CacheError(
                f"{where} does not hold the tensors of its projector: {tower}.{name} should be "
                f"{expected.get(name, 'absent')}, is {found.get(name, 'absent')}"
            )
        projector.load_state_dict(mine, assign=any(each.is_meta for each in projector.state_dict().values()))


def dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class TrainedProjector(Projectors):
    """The projectors of a file: on the CPU, in float32, frozen."""

    def __init__(self, path: Path) -> None:
        config, tensors = read_projector_file(path)
        width = config.language_model.width
        try:
            with torch.device("meta"):  # no memory is taken for a size that the tensors may not have
                towers = {tower.name: make_empty_projector(tower, width, tensors) for tower in config.towers}
        except (ValueError, ArithmeticError, RuntimeError) as error:
            raise CacheError(f"{path} describes a projector that cannot be made: {error}") from None
        super().__init__(towers, config.full)
        self.config, self.path, self.sha256 = config, path, file_sha256(path)
        load_tensors(self, tensors, str(path))
        self.requires_grad_(False).eval()
        for tower in config.towers:  # each may also be called alone
            self[tower.name].register_forward_pre_hook(partial(refuse_no_batch, path, tower))

    def forward(self, samples: Mapping[str, Tensor] | Tensor) -> Tensor:
        """Return all towers' tokens; ConfigError for what is no batch of a tower's samples."""
        given = samples if isinstance(samples, Mapping) else dict.fromkeys(self.names[:1], samples)
        if missing := [name for name in self.names if name not in given]:
            raise ConfigError(f"{self.path} reads a mapping of samples by tower; there are none of {missing[0]}")
        return super().forward(given)


def shared_shape(shapes: Sequence[Sequence[int]]) -> str:
    """Show the shape of samples; a side in which they differ is `…`."""
    sides = (each[0] if len({*each}) == 1 else "…" for each in zip(*shapes, strict=True))
    return ", ".join(map(str, sides))


def refuse_no_batch(path: Path, tower: Tower, _: object, given: tuple[object]) -> None:
    (found,) = given
    if not isinstance(found, Tensor) or found.ndim != 1 + len(tower.array.axes):
        shown, expected = list(getattr(found, "shape", "")), f"[N, {shared_shape(tower.shapes)}]"
        raise ConfigError(f"{path} reads a tensor {expected} of the tower {tower.name}, got {shown}")


def make_empty_projector(tower: Tower, width: int, tensors: Mapping[str, Tensor]) -> TowerProjector:
    """Make a tower's projector without weights; its mean in `tensors` has as many values as channels are read."""
    ends = torch.empty(2, width) if tower.ends else None
    if tower.projector == PRETRAINED:
        if tower.norm_eps is None:
            raise ValueError("norm_eps is missing")
        return PretrainedProjector(
            sample_shape=tower.shape,
            width=width,
            num_world_tokens=tower.tokens - 2 * tower.ends,
            norm_eps=tower.norm_eps,
            ends=ends,
        )
    mean = tensors.get(f"{tower.name}.mean")
    channels = 1 if mean is None or not mean.ndim else max(1, len(mean))
    return Projector(
        sample_shape=tower.shape,
        width=width,
        layout=tower.layout,
        shape=tower.projector,
        mean=[0.0] * channels,
        std=[1.0] * channels,
        seed=0,
        ends=ends,
    )
