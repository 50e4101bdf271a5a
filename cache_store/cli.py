"""`cache-store`: look into a cache and verify it, on any machine, without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from cache_store.cache.info import describe
from cache_store.convert.command import run_convert
from cache_store.convert.convert import ConvertConfig
from cache_store.gallery.command import gallery_parser, show_gallery
from cache_store.gallery.config import GalleryConfig
from cache_store.program.command_line import (
    add_commands,
    add_fields,
    cache_parser,
    parse_command,
    program_parser,
    run_program,
    to_config,
)
from cache_store.verify.command import VerifyConfig, run_verify

EXAMPLES = """\
  cache-store info data/cc3m
  cache-store verify data/cc3m                  records, sizes, seal: seconds
  cache-store verify data/cc3m --level full     every byte of every file
  cache-store verify data/cc3m --level deep     each sample too
  cache-store verify data/cc3m --subset 3/20    every byte of one slice a night
  cache-store gallery data/cc3m -o cc3m.html    look at it
  cache-store convert data/cc3m data/tars --format webdataset
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `cache-store`; returns the exit code."""
    return run_program("cache-store", run, argv)


def run(argv: Sequence[str]) -> int:
    arguments = parse_command(build_parser(), argv)
    options = arguments[arguments.command]
    return COMMANDS[arguments.command](options)


def build_parser() -> ArgumentParser:
    parser = program_parser("cache-store", "Look into a cache of latents and verify it; needs no torch.", EXAMPLES)
    commands = add_commands(parser)
    info = cache_parser("Show what a cache holds and how it was made.")
    commands.add_subcommand("info", info, help="The spec, counts, sizes and throughput, in a table.")
    commands.add_subcommand("verify", verify_parser(), help="Is every byte right? Exits 1 if not.")
    commands.add_subcommand("convert", convert_parser(), help="The same cache as tars, as Zarr or with another codec.")
    gallery = gallery_parser(GalleryConfig)
    commands.add_subcommand("gallery", gallery, help="Rows of the cache on an HTML page: random, unusual, rejected.")
    return parser


def convert_parser() -> ArgumentParser:
    operands = {"cache": "The cache's folder; it is read only.", "out": "The new cache's folder; made if need be."}
    parser = cache_parser(ConvertConfig.__doc__, **operands)
    add_fields(parser, ConvertConfig)
    return parser


def verify_parser() -> ArgumentParser:
    parser = cache_parser(VerifyConfig.__doc__)
    add_fields(parser, VerifyConfig)
    return parser


def info_command(options: Any) -> int:
    lines = describe(Path(options.cache).expanduser())
    width = max(len(field) for field, _ in lines)
    for field, value in lines:
        print(f"{field:<{width}}  {value}")
    return 0


def verify_command(options: Any) -> int:
    config = to_config(VerifyConfig, verify_parser(), options)
    return run_verify(Path(options.cache).expanduser(), config)


def convert_command(options: Any) -> int:
    config = to_config(ConvertConfig, convert_parser(), options)
    return run_convert(Path(options.cache).expanduser(), Path(options.out).expanduser(), config)


def gallery_command(options: Any) -> int:
    from cache_store.gallery.gallery import make_gallery  # pulls in matplotlib

    config = to_config(GalleryConfig, gallery_parser(GalleryConfig), options)
    show_gallery(make_gallery(Path(options.cache).expanduser(), config))
    return 0


COMMANDS = {"info": info_command, "verify": verify_command, "gallery": gallery_command, "convert": convert_command}
