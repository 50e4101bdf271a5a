"""The config of `precompute texts`, and the builds that it stands for."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.program.config_file import suggest
from cache_store.storage.store import is_url
from precompute.config import BuildConfig, RunConfig, StoreConfig
from precompute.encoders.encoder_config import ComputeDtype, EncoderConfig
from precompute.encoders.text_presets import PRESETS
from precompute.sources.config import SourceConfig

NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class TextStoreConfig(StoreConfig):
    """How the texts' samples are stored on disk."""

    codec: CodecName = "lz4"
    """lz4 stores the zeros of padding in next to no space, and other values in a little less than none does. A tar
    needs none."""
    samples_per_shard: int = 256
    """Unit of work and of resume; 256 float16 samples of T5's 512 tokens of 4,096 features are 1.1 GB."""


@dataclass(frozen=True, kw_only=True)
class TextsConfig:
    """Encode the captions of a cache's samples with each text encoder of a model, into a cache each."""

    source: str
    """The cache whose samples have the captions: its folder or URL."""
    cache: str
    """The folder of the new caches, or its URL: CACHE/t5, CACHE/pooled and so on, by the names of the encoders."""
    of: str | None = None
    """The model whose text encoders are meant, as its pipeline in diffusers runs them: SDXL, FLUX.1-dev or another of
    those listed below."""
    model: str | None = None
    """With `of`: the hub id of its pipeline, or the pipeline's folder."""
    compute_dtype: ComputeDtype = "bfloat16"
    """With `of`: encoder.compute_dtype of each encoder."""
    batch_size: int = 32
    """With `of`: encoder.batch_size of each encoder."""
    device: str = "auto"
    """With `of`: encoder.device of each encoder."""
    texts: dict[str, EncoderConfig] | None = None
    """Encoders of your own choice instead of `of`: by name, the fields of a build's `encoder:`."""
    store: TextStoreConfig = field(default_factory=TextStoreConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if not self.cache:
            raise ConfigError("cache: the name is empty; name the folder of the new caches")
        if not is_url(self.cache) and resolved(self.cache).is_relative_to(resolved(self.source)):
            raise ConfigError(f"cache: {self.cache} lies in the source {self.source}; name a folder beside it")
        if self.of is not None and self.of not in PRESETS:
            raise ConfigError(f"of: the models are {', '.join(PRESETS)}, not {suggest(self.of, PRESETS)}")
        if (self.of is None) == (not self.texts):
            raise ConfigError("set one of: of, a model such as FLUX.1-dev; or texts, encoders of your own by name")
        if self.of is not None and self.model is None:
            raise ConfigError(f"model is missing: the hub id or the folder of a pipeline of {self.of}")
        if self.of is None and (given := [name for name in FOR_OF if getattr(self, name) != getattr(type(self), name)]):
            raise ConfigError(f"{given[0]} is for of; with texts, set texts.NAME.{given[0]}")
        for name, encoder in (self.texts or {}).items():
            if not NAME.fullmatch(name):
                raise ConfigError(f"texts: {name!r} names a folder; use letters, digits, . _ and -, no . or - first")
            if not encoder.reads_text:
                raise ConfigError(f"texts.{name}.max_tokens is missing: the tokens of each text, 512 say")

    @property
    def encoders(self) -> Mapping[str, EncoderConfig]:
        if self.of is None:
            return self.texts or {}
        common: dict[str, Any] = {name: getattr(self, name) for name in FOR_OF}
        return {name: EncoderConfig(**common, **fields) for name, fields in PRESETS[self.of].items()}

    @property
    def builds(self) -> Mapping[str, BuildConfig]:
        """The config of each cache's build, by the name of its encoder."""
        whole = BuildConfig(
            cache=self.cache,
            source=SourceConfig(kind="cache", path=self.source, text="caption"),
            encoder=next(iter(self.encoders.values())),
            store=StoreConfig(**asdict(self.store)),
            run=self.run,
        )
        folder = self.cache.rstrip("/")
        return {name: replace(whole, cache=f"{folder}/{name}", encoder=each) for name, each in self.encoders.items()}


FOR_OF = ("model", "compute_dtype", "batch_size", "device")
"""Fields that are those of each encoder of a preset."""


def resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()


def write_configs(builds: Mapping[str, BuildConfig], folder: Path) -> list[Path]:
    """Write the config of each build as NAME.yaml; ConfigError if that fails, or if a file was changed since."""
    paths = [folder / f"{name}.yaml" for name in builds]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, config in zip(paths, builds.values(), strict=True):
            record = {section: values for section, values in asdict(config).items() if section != "image"}
            text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise ConfigError(f"--configs: {path} exists and differs; name another folder, or delete it")
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--configs {folder}: {error.strerror}") from None
    return paths


def preset_lines() -> list[str]:
    return [f"  {model:<14}  {', '.join(encoders)}" for model, encoders in PRESETS.items()]
