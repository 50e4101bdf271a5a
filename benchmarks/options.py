"""Options that several benchmarks share; each benchmark names the options that it takes, with its own defaults."""

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from cache_store.program.command_line import Parser


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1; otherwise raise ArgumentTypeError, which argparse reports in one line."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "samples": {"type": positive_int, "help": "number of samples, in each form; 20,000 are 0.5 GB"},
    "samples_per_shard": {"type": positive_int, "default": 4_096},
    "images": {"help": "a folder, zip or tar of photographs, in the order of their names; default: smooth noise"},
    "count": {"type": positive_int, "help": "number of images"},
    "mosaic": {"type": positive_int, "default": 1, "help": "photographs along each side of an image"},
    "height": {"type": positive_int, "default": 224},
    "width": {"type": positive_int, "default": 224},
    "batch_size": {"type": positive_int},
    "model": {"help": "a folder with a VAE; default: a VAE of random weights"},
    "vae": {"choices": ("demo", "full"), "default": "demo", "help": "the demo's narrow VAE, or one of full size"},
    "repeats": {"type": positive_int, "default": 5, "help": "rounds that are measured, after one that warms up"},
    "folder": {"help": "where caches are written; default: a temporary folder"},
}


def parser_with(description: str | None, *names: str, **defaults: Any) -> Parser:
    """Return a parser with the options of SHARED that `names` and `defaults` name, with these defaults."""
    parser = Parser(prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}", description=description)
    for name in (each for each in SHARED if each in (*names, *defaults)):
        given = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **SHARED[name] | given)
    return parser
