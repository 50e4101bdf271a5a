"""The options of `copy`, `withdraw` and `gallery`. Imports little: a help shows them."""

from dataclasses import dataclass, field
from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.format.schema import StoreFormat
from cache_store.storage.store import local_path

MAX_ROWS = 256
"""Most rows of each kind; a page with this many is 10 MB."""


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """The form of the copy."""

    format: StoreFormat | None = None
    """zarr: one Zarr v3 shard file per shard. webdataset: one uncompressed tar per shard. Default: the cache's own."""
    codec: CodecName | None = None
    """Codec of the copy's samples; by default that of the cache, or none for tars, which support no other."""


@dataclass(frozen=True, kw_only=True)
class WithdrawConfig:
    """Take samples out of sealed caches."""

    ids: str = field(metadata={"option": "--ids FILE"})
    """A text file with the ids of the samples as the plan has them, one a line; one with a line break as JSON text."""


@dataclass(frozen=True, kw_only=True)
class GalleryConfig:
    """Options of a gallery: the rows that it shows, and the file that it writes."""

    output: str = field(default="gallery.html", metadata={"option": "-o,--output OUTPUT"})
    """The HTML file to write; its folder must exist, and an older file is replaced."""
    rows: int = 24
    """Number of random rows to show, and the most rejected rows."""
    where: str | None = None
    """Show the first samples for which this is true in place of random ones, such as `row in [12, 98]` or
    `id == "a.jpg"`, over the columns of the cache.
    """
    seed: int = 0
    """Equal seeds draw equal rows."""

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ConfigError(f"--rows must be in [1, {MAX_ROWS}], got {self.rows}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, got {self.seed}")
        if not self.page.name or self.page.is_dir():
            raise ConfigError(f"--output: {self.output} is a folder; name a file, as {self.page / 'gallery.html'}")

    @property
    def page(self) -> Path:
        return local_path("--output", self.output)
