"""The config of each `precompute` command, from YAML or the command line.

This module does not import torch, so that `--help` and config errors are fast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from cache_store.errors import ConfigError, MissingPathError, ModelError, SourceError, install
from cache_store.format.array import CodecName, ImageRecipe, Size, StoreDtype
from cache_store.format.layout import BUILD_FILE
from cache_store.format.schema import MAX_SAMPLES_PER_SHARD, StoreFormat
from cache_store.options import GalleryConfig
from cache_store.program.running import usable_cores
from cache_store.storage.store import Address, is_url, open_store
from precompute.clips.config import ClipConfig
from precompute.encoders.encoder_config import TEXT_FIELDS, EncoderConfig
from precompute.images.buckets import example_sizes
from precompute.images.config import ImageConfig
from precompute.sources.config import FieldNames, SourceConfig

if TYPE_CHECKING:
    from precompute.sources.media import Media


MAX_PART_ROWS = 2**24
"""A part is planned in memory, which takes some 400 bytes a row."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How latents are stored on disk."""

    format: StoreFormat = "zarr"
    """zarr: one Zarr v3 shard file per shard. webdataset: one uncompressed tar per shard, which webdataset,
    Hugging Face datasets and Megatron-Energon read directly."""
    dtype: StoreDtype = "float16"
    """float16 stores bfloat16 latents of ordinary size exactly; a latent that overflows it is rejected, never made
    infinite. zarr-python and xarray do not read bfloat16. uint8 takes half the space of float16: latents are rounded to
    256 values for each latent and channel (0.5 to 0.7 % of their root mean square), and are read as float32."""
    codec: CodecName = "none"
    """none reads fastest; zstd saves a third of the disk space of real latents; lz4 saves a little less and reads
    faster."""
    samples_per_shard: int = 4_096
    """Unit of work and of resume; 4,096 float16 latents of 16 x 28 x 28 are 103 MB."""
    rows_per_part: int = 2**18
    """Samples that are planned together, and sorted by size; shards end where a part does. A part of tars or Parquet
    files is whole files with some so many samples. Two caches of one list join only if their parts are alike."""

    def __post_init__(self) -> None:
        if not 1 <= self.rows_per_part <= MAX_PART_ROWS:
            bounds = f"in [1, {MAX_PART_ROWS:,}]"
            raise ConfigError(f"store.rows_per_part must be {bounds}, got {self.rows_per_part:,}")
        if not 1 <= self.samples_per_shard <= MAX_SAMPLES_PER_SHARD:
            bounds = f"in [1, {MAX_SAMPLES_PER_SHARD:,}]"
            raise ConfigError(f"store.samples_per_shard must be {bounds}, got {self.samples_per_shard:,}")
        from cache_store.format.formats import FORMATS  # needs codecs, as `--help` does not

        if problem := FORMATS[self.format].unsupported(self.dtype, self.codec):
            raise ConfigError(f"store.format {self.format}: {problem}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a build runs; nothing here changes a cache's bytes."""

    engine: Literal["local", "ray"] = "local"
    """local: worker processes on this machine. ray: workers on every node of the Ray cluster at RAY_ADDRESS (HOST:PORT,
    or auto for one that runs here)."""
    workers: int | Literal["auto"] = "auto"
    """Processes, each with its own encoder. auto: up to four per GPU, by its cores and memory, or one for every two CPU
    cores. With Ray, a number is the maximum, and auto uses all nodes that the cluster has or gains."""
    decode_threads: int | Literal["auto"] = "auto"
    """Decode threads in each worker; auto shares the machine's cores among the workers."""
    max_reject_fraction: float = 0.01
    """The build fails if more than this fraction is rejected; the usual cause is a wrong folder or a lost mount."""

    def __post_init__(self) -> None:
        for name in ("workers", "decode_threads"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least 1 or auto, got {getattr(self, name)}")
        if self.engine == "ray" and find_spec("ray") is None:
            raise ConfigError(f"run.engine: ray is not installed; run {install('ray')}")
        if not 0.0 <= self.max_reject_fraction <= 1.0:
            raise ConfigError(f"run.max_reject_fraction must be in [0, 1], got {self.max_reject_fraction}")

    def threads(self, workers: int) -> int:
        if self.decode_threads != "auto":
            return self.decode_threads
        return max(1, usable_cores() // workers)


SECTIONS = {
    "source": SourceConfig,
    "encoder": EncoderConfig,
    "image": ImageConfig,
    "clip": ClipConfig,
    "store": StoreConfig,
}
"""Config sections that a cache records about its build."""

Kind = Literal["image", "clip", "text"]

KINDS: dict[Kind, str] = {
    "image": "neither clip.frames nor encoder.max_tokens is set",
    "clip": "clip.frames is set",
    "text": "encoder.max_tokens is set",
}
"""Kinds of samples, and what makes a build one of them."""

SUITS: dict[str, tuple[Kind, ...]] = {
    "image": ("image", "clip"),
    "clip": ("clip",),
    **dict.fromkeys(("image.from_model", "image.decode", "encoder.fold", "encoder.compile"), ("image",)),
    **{f"encoder.{name}": ("text",) for name in TEXT_FIELDS},
    **{f"source.{name}": ("text",) for name in ("text", "caption", "shuffle_tags", "keep_tags")},
}
"""Sections and fields that suit some kinds of samples alone."""


def default_of(each: Field[Any]) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Encode every image, or clip of video, of a source once, into a sealed cache; run again to resume."""

    cache: str
    """The cache's folder, created if needed, or its URL: s3://BUCKET/FOLDER, gs://…, az://…"""
    source: SourceConfig
    encoder: EncoderConfig
    image: ImageConfig = field(default_factory=ImageConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if not self.cache:
            raise ConfigError("cache: the name is empty; name the cache's folder")
        if self.encoder.reads_text and self.source.text is None:
            raise ConfigError("encoder.max_tokens is for a text encoder, which reads texts; set source.text: caption")
        self._refuse_unsuited_fields()
        if self.clip.is_on and find_spec("av") is None:
            raise ConfigError(f"clip: PyAV, which decodes videos, is not installed; run {install('video')}")
        folder = Path(str(open_store(self.cache))).resolve()  # refuses a URL of another kind, whatever the source
        if self.source.kind == "cache" and Path(self.source.path).expanduser().resolve() == folder:
            raise ConfigError(f"source.path: {self.source.path} is the cache itself; name another one of the same plan")
        if self.run.engine == "ray" and self.encoder.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"encoder.device: Ray assigns the GPUs; use auto, cpu or cuda, not {self.encoder.device}")

    @property
    def kind(self) -> Kind:
        return "text" if self.encoder.reads_text else "clip" if self.clip.is_on else "image"

    def _refuse_unsuited_fields(self) -> None:
        """Raise ConfigError for a field that the kind of samples has no use for."""
        for section in SECTIONS:
            values: Any = getattr(self, section)
            for each in fields(values):
                kinds = SUITS.get(f"{section}.{each.name}") or SUITS.get(section) or KINDS
                if self.kind not in kinds and getattr(values, each.name) != default_of(each):
                    raise ConfigError(
                        f"{section}.{each.name} is for {' and '.join(f'{kind}s' for kind in kinds)}, and this build "
                        f"encodes {self.kind}s, since {KINDS[self.kind]}; leave it out"
                    )

    def prepared(self) -> Self:
        """Return the config with the kind of the source, and with `image:` from the model's files if it asks for that.

        It may download these. Clips are encoded one at a time, so that a batch is one clip.
        """
        from precompute.sources.opening import recognised  # needs Arrow, as `--help` does not

        source = recognised(self.source)
        if self.clip.is_on:
            return replace(self, source=source, encoder=replace(self.encoder, batch_size=1))
        if not self.image.from_model:
            return replace(self, source=source)
        from precompute.encoders.preprocessing import recipe_of_model  # needs huggingface_hub, as `--help` does not

        chosen = replace(self.image, from_model=False)
        return replace(self, source=source, image=replace(chosen, **recipe_of_model(self.encoder.model)))

    @property
    def media(self) -> "Media":
        from precompute.sources.media import IMAGES, VIDEOS  # needs Pillow, as `--help` does not

        return VIDEOS if self.clip.is_on else IMAGES

    @property
    def image_recipe(self) -> ImageRecipe | None:
        if self.encoder.reads_text:
            return None
        recipe = self.image.recipe
        return msgspec.structs.replace(recipe, clip=self.clip.recipe) if self.clip.is_on else recipe

    @property
    def example_sizes(self) -> list[Size]:
        """Sizes of samples: all that are listed, or two of a rule of buckets that differ in every respect."""
        if self.encoder.max_tokens is not None:
            return [Size(1, 1, self.encoder.max_tokens)]
        sizes = example_sizes(self.image.rule)
        return [Size(frames, *sides) for frames in self.clip.counts or [1] for sides in sizes]

    @property
    def planning_encoder(self) -> EncoderConfig:
        """The planning process's encoder config; with Ray it uses the CPU, because all GPUs may be elsewhere."""
        return replace(self.encoder, device="cpu") if self.run.engine == "ray" else self.encoder

    @classmethod
    def of_cache(cls, cache: Address) -> Self:
        """Read the config of an existing cache, as `recorded` wrote it; raise CacheError if this version cannot."""
        from precompute.sources.opening import recorded_section  # needs Arrow, as `--help` does not

        store = open_store(cache)
        made: dict[str, Any] = {name: recorded_section(store, name, kind) for name, kind in SECTIONS.items()}
        return cls(cache=str(store), **made)

    def recorded(self) -> dict[str, Any]:
        """Return the part that a cache records: everything that names the inputs, but not `cache` and `run`.

        Paths become absolute, because a later program may run in any folder.
        """
        record = {name: values for name, values in asdict(self).items() if name not in ("cache", "run")}
        for section, name in (("source", "path"), ("source", "images"), ("encoder", "model")):
            value = record[section][name]
            # A source may be a pattern, and a model a hub id.
            if value is not None and not is_url(value) and (section == "source" or Path(value).expanduser().exists()):
                record[section][name] = str(Path(value).expanduser().absolute())
        return record


@contextmanager
def advising_on_moved_paths(cache: Address) -> Iterator[None]:
    """Add advice to errors about a moved source or encoder whose path comes from `build.json`.

    A moved path is not a usage error here, so MissingPathError becomes SourceError.
    """
    try:
        yield
    except (SourceError, ModelError, MissingPathError) as error:
        kind = SourceError if isinstance(error, MissingPathError) else type(error)
        raise kind(
            f"{error}. The path comes from {open_store(cache).where(BUILD_FILE)}; if it has moved, run the "
            "`precompute build` of this cache with the new path: committed shards are kept, and the new path is "
            "recorded"
        ) from None


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Restore lost and damaged metadata, rebuild damaged shards to the same bytes, and reseal.

    Damaged metadata, and files that are missing or of another size, are found without a report.
    """

    report: str | None = None
    """A report of `cache-store verify --report`; every shard that it names is read again, and rebuilt unless sound."""
    shards: int | list[int] | None = None
    """Shards to rebuild, by number, with or without a report: 17, or [3, 17]."""
    run: RunConfig = field(default_factory=RunConfig)
    """As of a build, but without a limit of rejects: they were accepted once."""

    @property
    def shard_numbers(self) -> list[int]:
        return [self.shards] if isinstance(self.shards, int) else self.shards or []


@dataclass(frozen=True, kw_only=True)
class CaptionSource(SourceConfig):
    """Where the texts are; by default in the cache's own source."""

    path: str = ""
    """Another source, whose samples have the same ids; its other fields are those of a build's `source`."""


@dataclass(frozen=True, kw_only=True)
class CaptionsConfig:
    """Read the texts and extra columns of a cache's samples again; every latent stays."""

    source: CaptionSource = field(default_factory=CaptionSource)
    keep_missing: bool = False
    """Samples that the source lacks keep their texts; without it, they are refused."""

    def __post_init__(self) -> None:
        if not self.source.path and replace(self.source, fields=FieldNames()) != CaptionSource():
            raise ConfigError("source.path is missing; of the cache's own source, only source.fields can change")


def option(typed: str, default: Any = None) -> Any:
    return field(default=default, metadata={"option": typed})


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(BuildConfig):
    """Measure how long a build would take here and after how many epochs its cache pays off; write nothing."""

    seconds: float = 60.0
    """Seconds to measure, without the time to list the samples and load the encoder."""
    samples_per_s: float | None = option("--samples-per-s NUMBER")
    """Samples per second of a training that need not encode, as `trainer train` prints; default: three speeds."""
    gpus: int = 1
    """GPUs that share the training; each encodes its share of a batch."""
    epochs: float | None = None
    """Number of times that training will see each sample, over all runs on this cache."""
    read_mb_per_s: float = option("--read-mb-per-s NUMBER", 200.0)
    """Read speed of the cache in MB/s; 200 is a slow network disk."""
    dollars_per_gpu_hour: float | None = option("--dollars-per-gpu-hour NUMBER")
    """Price of a GPU-hour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seconds", "samples_per_s", "gpus", "epochs", "read_mb_per_s", "dollars_per_gpu_hour"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Encode a random draw of a cache's samples again and compare; exit 1 if any differs or its image changed."""

    samples: int = 300
    """Samples to draw; each is encoded with its whole planned batch. If none of 300 differs, fewer than 1 % of all
    samples do (95 % confidence)."""
    seed: int | None = None
    """Seed of the draw, to repeat it; chosen at random and printed if not given."""
    device: str | None = None
    """Where to encode: auto, cpu, cuda or cuda:N; default: as in the cache's build."""
    report: str | None = None
    """Also write the result to this JSON file, in the shape of `cache-store verify --report`."""

    def __post_init__(self) -> None:
        for name, smallest in (("samples", 1), ("seed", 0)):
            if (value := getattr(self, name)) is not None and value < smallest:
                raise ConfigError(f"{name} must be at least {smallest}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DecodedGalleryConfig(GalleryConfig):
    """A gallery's config, with decoded images."""

    decode: bool = field(default=False, metadata={"option": "--decode"})
    """Add decoded images and their PSNR; a full-size VAE takes seconds an image on a CPU."""
    model: str | None = None
    """The VAE's hub id or folder, if it is not where the build found it."""
    device: str = "auto"
    """Where to decode: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decode and (self.model is not None or self.device != "auto"):
            raise ConfigError("--model and --device need --decode; add --decode or leave them out")
