"""`precompute`: from images to a sealed cache of latents."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console

from cache_store.command_line import command_parser, program_parser, run_program, stop_on_signals, to_config

EXAMPLES = """\
  precompute build --config configs/llava_cc3m.yaml
  precompute build --config configs/llava_cc3m.yaml --store.codec zstd --cache data/llava-cc3m/cache-zstd
  precompute repair data/llava-cc3m/cache --report report.json
  precompute build --print_config > my.yaml          a complete config to edit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `precompute`; returns the exit code."""
    return run_program("precompute", run, argv)


def run(argv: Sequence[str]) -> int:
    parser, commands = build_parsers()
    arguments = parser.parse_args(list(argv))
    return COMMANDS[arguments.command](commands[arguments.command], arguments[arguments.command])


def build_parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The program's parser and those of its commands."""
    from precompute.config import BuildConfig  # pulls in torch
    from precompute.repair import RepairConfig

    parser = program_parser("precompute", "Encode every image once, with a frozen VAE, into a cache.", EXAMPLES)
    repair = ArgumentParser(exit_on_error=False, description="Build damaged shards again, to the same bytes; reseal.")
    repair.add_argument("cache", type=str, help="the cache's folder")
    repair.add_class_arguments(RepairConfig, None)
    commands = {
        "build": command_parser(BuildConfig, "Plan, encode and seal a cache; run again to resume."),
        "repair": repair,
    }
    subcommands = parser.add_subcommands(dest="command", title="commands", metavar="COMMAND")
    for name, command in commands.items():
        subcommands.add_subcommand(name, command, help=command.description)
    return parser, commands


def build_command(parser: ArgumentParser, options: Any) -> int:
    from precompute.build import build
    from precompute.config import BuildConfig

    config = to_config(BuildConfig, parser, options)
    stop = threading.Event()
    with stop_on_signals(stop.set):
        summary = build(config, stop)
    show(summary, config.cache)
    return 0


def repair_command(parser: ArgumentParser, options: Any) -> int:
    from precompute.repair import RepairConfig, repair

    config = to_config(RepairConfig, parser, options)
    stop = threading.Event()
    with stop_on_signals(stop.set):
        summary = repair(Path(options.cache).expanduser(), config, stop)
    show(summary, options.cache)
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
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(seal.reasons.items()))
    why = f" ({reasons})" if reasons else ""
    console.print(f"{seal.planned:,} planned = {seal.cached:,} cached + {seal.rejected:,} rejected{why}")
    size = sum(array.bytes for array in seal.arrays.values())
    console.print(f"sealed {cache}: {size:,} bytes of latents, cache identity {seal.identity}")
    console.print(f"next: cache-store verify {cache} --level full")


COMMANDS = {"build": build_command, "repair": repair_command}
