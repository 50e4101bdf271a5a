"""What the command `gallery` prints, in both programs that have it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache_store.gallery.gallery import Gallery


def print_gallery(gallery: "Gallery") -> None:
    print(
        f"{gallery.random:,} random rows, the {gallery.unusual:,} most unusual of {gallery.surveyed:,} surveyed, "
        f"{gallery.rejected:,} rejected rows"
    )
    if gallery.source_problem:
        print(f"without source images: {gallery.source_problem}")
    if gallery.no_pictures:
        print(f"without pictures of samples: {gallery.no_pictures}")
    if gallery.mean_psnr is not None:
        print(f"mean PSNR of the random rows, decoded: {gallery.mean_psnr:.1f} dB")
    print(f"wrote {gallery.page}, {kilobytes(gallery.page)}, open it in any browser")
    for sheet in gallery.sheets:
        print(f"wrote {sheet}, {kilobytes(sheet)}")


def kilobytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e3:,.0f} KB"
