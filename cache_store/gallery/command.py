"""The command `gallery`, which two programs share: its options and its last words."""

from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from cache_store.gallery.config import GalleryConfig
from cache_store.program.command_line import add_fields, cache_parser

if TYPE_CHECKING:
    from cache_store.gallery.gallery import Gallery


def gallery_parser(config_class: type[GalleryConfig], **flags: str) -> ArgumentParser:
    """The options of a gallery; `flags` are fields that are switched on by naming them, and what they do."""
    parser = cache_parser(config_class.__doc__)
    parser.add_argument(
        "-o",
        "--output",
        type=str,
        default=GalleryConfig.output,
        help="The page; an older one is replaced whole, its folder must exist.",
    )
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    add_fields(parser, config_class, skip={"output", *flags})
    return parser


def show_gallery(gallery: "Gallery") -> None:
    print(
        f"{gallery.random:,} random rows, the {gallery.unusual:,} most unusual of {gallery.surveyed:,} surveyed, "
        f"{gallery.rejected:,} rejected rows"
    )
    if gallery.source_problem:
        print(f"without source images: {gallery.source_problem}")
    if gallery.mean_psnr is not None:
        print(f"mean PSNR of the random rows, decoded: {gallery.mean_psnr:.1f} dB")
    print(f"wrote {gallery.page}, {kilobytes(gallery.page)}, open it in any browser")
    for sheet in gallery.sheets:
        print(f"wrote {sheet}, {kilobytes(sheet)}")


def kilobytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e3:,.0f} KB"
