"""Options that several benchmarks have, each written once; a benchmark names those that it takes, with its defaults."""

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from cache_store.program.command_line import Parser


def positive(text: str) -> int:
    """The number that is typed; ArgumentTypeError below 1, which makes it an error of one line."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "samples": {"type": positive, "help": "in each form; 20,000 are 0.5 GB"},
    "samples_per_shard": {"type": positive, "default": 4_096},
    "images": {"help": "a folder, zip or tar of photographs, in the order of their names; smooth noise without it"},
    "count": {"type": positive, "help": "images"},
    "mosaic": {"type": positive, "default": 1, "help": "photographs along each side of an image"},
    "height": {"type": positive, "default": 224},
    "width": {"type": positive, "default": 224},
    "batch_size": {"type": positive},
    "model": {"help": "a folder with a VAE, in place of one of random weights"},
    "vae": {"choices": ("demo", "full"), "default": "demo", "help": "the demo's narrow one, or full size"},
    "repeats": {"type": positive, "default": 5, "help": "rounds measured after the first, which warms up"},
    "folder": {"help": "where caches are written; default a temporary folder"},
}


def parser_with(description: str | None, *names: str, **defaults: Any) -> Parser:
    """Of a benchmark's options: those of SHARED by these names, and those with a default of its own."""
    parser = Parser(prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}", description=description)
    for name in (each for each in SHARED if each in (*names, *defaults)):
        given = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **SHARED[name] | given)
    return parser
