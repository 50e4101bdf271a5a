"""`precompute`: from images to a sealed cache of latents."""

import argparse
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jsonargparse import ArgumentParser
from rich.console import Console

from cache_store.errors import ConfigError, Interrupted
from cache_store.gallery.command import gallery_parser, show_gallery
from cache_store.program.command_line import (
    add_commands,
    add_fields,
    cache_parser,
    command_parser,
    parse_command,
    program_parser,
    run_program,
    stop_on_signals,
    to_config,
)
from cache_store.program.output_file import refuse_output, write_output
from precompute.audit.bar import AuditBar
from precompute.config import AuditConfig, BuildConfig, DecodedGalleryConfig, RepairConfig
from precompute.encoders.spatial_factor import refuse_unfit_for
from precompute.resume.request import Acts

EXAMPLES = """\
  precompute build --config configs/llava_cc3m.yaml   run again to resume
  precompute build --print_config > my.yaml           a complete config to edit
  precompute build --config my.yaml --store.codec zstd --cache data/cc3m-zstd
  precompute build --config my.yaml --extend          the sample list has grown
  precompute build --config my.yaml --retry-rejected  images are back, or mended
  precompute build --config my.yaml --check-sources   are they those encoded?
  precompute repair data/cc3m --report report.json    what verify has named
  precompute audit data/cc3m --seconds 600            encode some again, compare
  precompute gallery data/cc3m --decode               look at it
"""


FLAGS = {
    "--extend": "Add the samples that the source's list has gained; of the shards, only a partly filled last one is "
    "written again.",
    "--retry-rejected": "Try rejected samples again; shards in which one can be read now are built again.",
    "--check-sources": "Read every image again and compare it with what was encoded, not only those that look changed.",
}
"""Acts of one run of `build`, which no config holds."""


DECODE = "Add decoded images, error maps and PSNR; a full-size VAE takes seconds an image on a CPU."


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `precompute`; returns the exit code."""
    return run_program("precompute", run, argv)


def run(argv: Sequence[str]) -> int:
    parser, commands = build_parsers()
    arguments = parse_command(parser, argv)
    return COMMANDS[arguments.command](commands[arguments.command], arguments[arguments.command], argv)


def build_parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The program's parser and those of its commands."""
    parser = program_parser("precompute", "Encode every image once, with a frozen VAE, into a cache.", EXAMPLES)
    build = command_parser(BuildConfig, "Plan, encode and seal a cache; run again to resume.")
    for flag, meaning in FLAGS.items():
        build.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meaning)
    repair, audit = cache_parser(RepairConfig.__doc__), cache_parser(AuditConfig.__doc__)
    add_fields(repair, RepairConfig)
    add_fields(audit, AuditConfig)
    commands = {
        "build": build,
        "repair": repair,
        "audit": audit,
        "gallery": gallery_parser(DecodedGalleryConfig, decode=DECODE),
    }
    subcommands = add_commands(parser)
    for name, command in commands.items():
        subcommands.add_subcommand(name, command, help=command.description)
    return parser, commands


def build_command(parser: ArgumentParser, options: Any, argv: Sequence[str]) -> int:
    config, acts = to_config(BuildConfig, parser, options), read_acts(options, argv)
    refuse_unfit_for(config.encoder.model, config.image.height, config.image.width)
    from precompute.build import build  # torch takes seconds to import

    show(build(config, acts), config.cache)
    return 0


def read_acts(options: Any, argv: Sequence[str]) -> Acts:
    """The flags that were typed; a config file cannot hold them."""
    given = {flag: bool(options.get(flag.removeprefix("--").replace("-", "_"))) for flag in FLAGS}
    for flag in (flag for flag, is_given in given.items() if is_given and flag not in argv):
        raise ConfigError(f"{flag} is an act of one run; give it on the command line, not in a config file")
    return Acts(
        new_samples="append" if given["--extend"] else "refuse",
        retry_rejected=given["--retry-rejected"],
        check_sources=given["--check-sources"],
        command=("precompute", *argv),
    )


def repair_command(parser: ArgumentParser, options: Any, argv: Sequence[str]) -> int:
    from precompute.resume.repair import repair

    config = to_config(RepairConfig, parser, options)
    show(repair(Path(options.cache).expanduser(), config), options.cache)
    return 0


def audit_command(parser: ArgumentParser, options: Any, argv: Sequence[str]) -> int:
    from precompute.audit.audit import audit
    from precompute.audit.report import report_lines

    config = to_config(AuditConfig, parser, options)
    if config.report:
        refuse_output("report", Path(config.report).expanduser(), Path(options.cache).expanduser())
    stop = threading.Event()
    with stop_on_signals(stop.set), AuditBar(config) as bar:
        report = audit(Path(options.cache).expanduser(), config, stop, bar)
    try:
        print(*report_lines(report), sep="\n")
    finally:  # also where the reader of our output has gone, as `| head` does
        if config.report:
            text = msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=1)
            write_output(Path(config.report).expanduser(), text)
    if stop.is_set() and len(report.drawn) < report.asked:
        raise Interrupted(
            f"{len(report.drawn)} of {report.asked} samples were drawn; --seed repeats them from the start"
        )
    return 1 if report.findings else 0


def gallery_command(parser: ArgumentParser, options: Any, argv: Sequence[str]) -> int:
    from precompute.gallery.gallery import gallery

    show_gallery(gallery(Path(options.cache).expanduser(), to_config(DecodedGalleryConfig, parser, options)))
    return 0


def show(summary: Any, cache: str) -> None:
    """The build's last words: what there is now and what to do with it."""
    seal, console = summary.seal, Console(highlight=False, soft_wrap=True)
    if summary.built_shards:
        console.print(
            f"encoded {summary.built_images:,} images in {summary.built_shards:,} shards, "
            f"{summary.images_per_s:.1f} images/s, encoder waited for images {summary.waiting_share:.0%} of the time"
        )
    else:
        console.print("nothing to encode: every shard is committed and fits")
    if summary.tried_again:
        console.print(f"recovered {summary.recovered:,} of {summary.tried_again:,} rejected samples tried again")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(seal.reasons.items()))
    why = f" ({reasons})" if reasons else ""
    console.print(f"{seal.planned:,} planned = {seal.cached:,} cached + {seal.rejected:,} rejected{why}")
    if passed_over := str(summary.passed_over):
        console.print(passed_over, markup=False, emoji=False)  # it holds file names
    console.print(f"sealed {cache}: {seal.array.bytes:,} bytes of latents, cache identity {seal.identity}")
    console.print(f"next: cache-store verify {shlex.quote(cache)} --level full")


COMMANDS = {"build": build_command, "repair": repair_command, "audit": audit_command, "gallery": gallery_command}
