"""A trained projector as one safetensors file that describes itself.

    {tower}.mean, {tower}.std         what samples are standardised with, shaped to broadcast over one
    {tower}.layers.{n}.weight, .bias  the projector's matrices
    {tower}.norm, {tower}.weight      in place of those, of a checkpoint's own projector
    {tower}.ends                      [2, D]: START and END, where the tower has them

All are float32. Frozen towers are in it like all others, so that the file alone is enough. Its metadata has one key,
METADATA_KEY; the value is a `ProjectorConfig` as canonical JSON. `config.json` beside the file says the same, for
people and for other programs; this one never reads it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import isqrt
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.array import ArraySpec, Count
from cache_store.format.record import Record, canonical_json, parse_record
from cache_store.storage.files import file_sha256
from trainer.model.config import PRETRAINED, TEXT_ALONE, Attention, AutoClass
from trainer.model.own_projector import PretrainedProjector
from trainer.model.projector import LAYOUTS, SHAPES, Projector, Projectors, TowerProjector

PROJECTOR_FILE, CONFIG_FILE = "projector.safetensors", "config.json"
METADATA_KEY = "encode_once.projector"
"""The only key: safetensors writes several in no fixed order, and equal projectors are to be equal bytes."""

PROJECTOR_VERSION = 1

VERSIONED = ("encode-once", "torch", "transformers")


Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""Of a language model, far above any."""


class Tower(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One encoder's samples, and the projector that makes tokens of them.

    What has a default is left out where it has it: equal projectors are equal bytes, whichever version wrote them.
    """

    name: str
    """What its tensors' names begin with."""
    projector: str
    layout: str
    """How a sample becomes tokens: spatial or channel of latents; token where it is tokens already."""
    ends: bool
    """Whether START and END stand around its tokens."""
    ends_from: Literal["learned", "checkpoint"] = "learned"
    attention: Attention = "causal"
    """Whether its tokens see each other (full), or only those before them."""
    trained: bool = True
    """Whether the run trained it; without, it is as the run was given it."""
    norm_eps: float | None = None
    """Of a checkpoint's own projector."""
    tokens: Count
    """That the language model reads, START and END among them."""
    features: Count
    """Values of one token before the projector."""
    array: ArraySpec
    """Shape and dtype of a sample; image recipe and encoder, with the SHA-256 of its weights."""
    encoder_model: str | None
    """Where the cache's build found the encoder: a hub id or a folder."""
    cache_identity: str


class ReadBy(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The frozen language model."""

    name: str
    """A hub id or a folder."""
    identity: str
    """SHA-256 over its config and values of all its weights."""
    width: Width
    precision: Literal["bf16", "fp32"]
    opened_by: AutoClass = TEXT_ALONE
    """The class of transformers that opens it."""


class TextRule(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the text around the tokens is written."""

    begins_with_bos: bool
    """BOS stands before all towers; without, the first of them is first."""
    chat_template: str
    """Jinja."""
    content_in_parts: bool = False
    """Whether the template reads a message's content as a list of parts, not as a string."""
    end_of_turn: str
    """What the template writes after the assistant's words, white space aside; the model has learned to say it."""


class Training(Record, frozen=True, kw_only=True):
    """How far it was trained."""

    steps: Count
    samples: Count
    """Seen, epoch after epoch."""
    val_fraction: float
    """Share of samples held out, by hash of the id: of any cache, those were never trained on."""
    started_from: str | None = None
    """SHA-256 of the file of the trained projector that its first step began with; null: of random weights."""


class ProjectorConfig(Record, frozen=True, kw_only=True):
    """All that has to be known to use a trained projector."""

    format_version: int
    towers: tuple[Tower, ...]
    """In the order in which the language model reads them: [BOS], towers, text."""
    language_model: ReadBy
    text: TextRule
    training: Training
    versions: dict[str, str]

    @property
    def tower(self) -> Tower:
        """The only one."""
        (tower,) = self.towers
        return tower

    @property
    def full(self) -> frozenset[str]:
        """The towers whose tokens see each other."""
        return frozenset(tower.name for tower in self.towers if tower.attention == "full")

    @property
    def as_json(self) -> bytes:
        """As it stands in `config.json`."""
        return json.dumps(msgspec.to_builtins(self), indent=2, ensure_ascii=False).encode() + b"\n"

    def trained(self, steps: int, samples: int, started_from: str | None) -> "ProjectorConfig":
        training = msgspec.structs.replace(self.training, steps=steps, samples=samples, started_from=started_from)
        return msgspec.structs.replace(self, training=training)


def library_versions() -> dict[str, str]:
    found = dict[str, str]()
    for name in VERSIONED:
        with suppress(PackageNotFoundError):  # a clone runs without being installed
            found[name] = version(name)
    return found


def projector_bytes(projectors: Projectors, config: ProjectorConfig) -> bytes:
    """The whole file."""
    towers = [(tower, each.state_dict().items()) for tower, each in projectors.items()]
    tensors = {f"{tower}.{name}": tensor.detach() for tower, tensors in towers for name, tensor in tensors}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return save(tensors, {METADATA_KEY: canonical_json(config).decode()})


def read_projector_file(path: Path) -> tuple[ProjectorConfig, dict[str, Tensor]]:
    """Read config and tensors; ConfigError for a file that is no projector, CacheError for a damaged one."""
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
    found = parse_record(AnyVersion, data, where).format_version
    if found != PROJECTOR_VERSION:
        raise NewerFormatError(f"{where} has format version {found}; this program reads version {PROJECTOR_VERSION}")
    config = parse_record(ProjectorConfig, data, where)
    names = [tower.name for tower in config.towers]
    if not names or len(set(names)) < len(names):
        raise CacheError(f"{where} names its towers {names}; it should name one, or several differently")
    for tower in config.towers:
        if not is_known(tower):
            raise CacheError(f"{where} holds no projector that this program knows: {tower.projector}, {tower.layout}")
    return config


def is_known(tower: Tower) -> bool:
    """Tell whether its samples, layout and projector go together."""
    axes, world_tokens = len(tower.array.shape), tower.tokens - 2 * tower.ends
    if tower.projector == PRETRAINED:
        states = tower.array.shape[0]
        return (tower.layout, axes) == ("token", 2) and tower.norm_eps is not None and divides(world_tokens, states)
    return tower.projector in SHAPES and tower.layout in LAYOUTS and axes == (2 if tower.layout == "token" else 3)


def divides(tokens: int, states: int) -> bool:
    """Tell whether a square of states is cut into squares that give so many tokens."""
    side, pooled = isqrt(states), isqrt(max(tokens, 1))
    return tokens > 0 and side**2 == states and pooled**2 == tokens and side % pooled == 0


class AnyVersion(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """As far as all versions agree."""

    format_version: int


def load_tensors(projectors: Projectors, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give each tower its tensors; CacheError where they are others than it has."""
    for name, each in projectors.items():
        load_tower(each, name, tensors, where)


def load_tower(projector: TowerProjector, tower: str, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give `projector` its tower's tensors; CacheError, and nothing given, where they are others than it has."""
    mine = {name.removeprefix(f"{tower}."): each for name, each in tensors.items() if name.startswith(f"{tower}.")}
    found, expected = ({name: kind(each) for name, each in state.items()} for state in (mine, projector.state_dict()))
    if found != expected:
        name = min(dict(found.items() ^ expected.items()))
        raise CacheError(
            f"{where} does not hold the tensors of its projector: {tower}.{name} should be "
            f"{expected.get(name, 'absent')}, is {found.get(name, 'absent')}"
        )
    projector.load_state_dict(mine, assign=any(each.is_meta for each in projector.state_dict().values()))


def kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class TrainedProjector(Projectors):
    """The projectors as they were trained: on the CPU, in float32, frozen."""

    def __init__(self, path: Path) -> None:
        config, tensors = read_projector_file(path)
        with torch.device("meta"):  # its size is only what the config says, until the tensors agree
            towers = {
                tower.name: without_weights(tower, config.language_model.width, tensors) for tower in config.towers
            }
        super().__init__(towers, config.full)
        self.config, self.path, self.sha256 = config, path, file_sha256(path)
        load_tensors(self, tensors, str(path))
        self.requires_grad_(False).eval()


def without_weights(tower: Tower, width: int, tensors: Mapping[str, Tensor]) -> TowerProjector:
    """A tower's projector as its description says; `tensors` tell how many channels of a sample are read."""
    ends = torch.empty(2, width) if tower.ends else None
    if tower.projector == PRETRAINED:
        assert tower.norm_eps is not None, "as is_known has checked"
        return PretrainedProjector(
            sample_shape=tower.array.shape,
            width=width,
            num_world_tokens=tower.tokens - 2 * tower.ends,
            norm_eps=tower.norm_eps,
            ends=ends,
        )
    mean = tensors.get(f"{tower.name}.mean")
    channels = 1 if mean is None or not mean.ndim else max(1, len(mean))
    return Projector(
        sample_shape=tower.array.shape,
        width=width,
        layout=tower.layout,
        shape=tower.projector,
        mean=[0.0] * channels,
        std=[1.0] * channels,
        seed=0,
        ends=ends,
    )
