"""Renders the public names of encode_once from their docstrings: `make docs`."""

import sys
from pathlib import Path

import pdoc
import pdoc.render

import encode_once


def render(folder: Path) -> None:
    """Write a page of them into `folder`."""
    for name in encode_once.__all__:
        getattr(encode_once, name)  # imports it: pdoc sees only what is there
    pdoc.render.configure(show_source=False)
    pdoc.pdoc("encode_once", r"!encode_once\.", output_directory=folder)


if __name__ == "__main__":
    render(Path(sys.argv[1]))
