"""Renders the public names of the three packages from their docstrings: `make docs`."""

import sys
from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render

PACKAGES = ("cache_store", "precompute", "trainer")


def render(folder: Path) -> None:
    """Write a page a package into `folder`."""
    for package in map(import_module, PACKAGES):
        for name in package.__all__:
            getattr(package, name)  # imports it: pdoc sees only what is there
    pdoc.render.configure(show_source=False)
    pdoc.pdoc(*PACKAGES, *(rf"!{package}\." for package in PACKAGES), output_directory=folder)


if __name__ == "__main__":
    render(Path(sys.argv[1]))
