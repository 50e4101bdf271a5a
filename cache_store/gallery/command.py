"""The `gallery` command of both programs: its options, which are checked before any work, and its printed text."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.storage.store import local_path

if TYPE_CHECKING:
    from cache_store.gallery.page import Gallery

MAX_ROWS = 256
"""Most rows of each kind; a page with this many is 20 MB."""


@dataclass(frozen=True, kw_only=True)
class GalleryConfig:
    """Options of a gallery: the rows that it shows, and the files that it writes."""

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
    sheets: str | None = None
    """Folder for the contact sheets; by default the folder of the page."""

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ConfigError(f"--rows must be in [1, {MAX_ROWS}], got {self.rows}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, got {self.seed}")
        if not self.page.name or self.page.is_dir():
            raise ConfigError(f"--output: {self.output} is a folder; name a file, as {self.page / 'gallery.html'}")
        if self.sheets is not None and not self.sheet_folder.is_dir():
            raise ConfigError(f"--sheets: {self.sheets} is not a folder that exists")

    @property
    def page(self) -> Path:
        return local_path("--output", self.output)

    @property
    def sheet_folder(self) -> Path:
        return self.page.parent if self.sheets is None else local_path("--sheets", self.sheets)

    def sheet(self, kind: str) -> Path:
        """Return the path of the contact sheet for one kind of rows."""
        return self.sheet_folder / f"{self.page.stem}.{kind}.png"


def print_gallery(gallery: "Gallery") -> None:
    content = gallery.content
    print(f"{len(content.shown):,} {content.kind} rows, {len(content.rejected):,} rejected rows")
    if content.source_problem:
        print(f"without source {content.cache.spec.array.made_of}s: {content.source_problem}")
    if content.no_pictures:
        print(f"without pictures of samples: {content.no_pictures}")
    if content.mean_psnr is not None:
        print(f"mean PSNR of the {content.kind} rows, decoded: {content.mean_psnr:.1f} dB")
    print(f"wrote {gallery.page}, {kilobytes(gallery.page)}, open it in any browser")
    for sheet in gallery.sheets:
        print(f"wrote {sheet}, {kilobytes(sheet)}")


def kilobytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e3:,.0f} KB"
