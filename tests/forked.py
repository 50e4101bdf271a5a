"""Fork processes from a server that has loaded the libraries, which takes far longer than a small run.

Python has one such server per process, so it loads the libraries of all tests.
"""

import multiprocessing
import os
from typing import Any

from PIL import Image

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "pytest",
        "pandas",  # pyarrow imports it, where it is installed, for the first table
        "tests.guarantees.programs",
        "precompute.build.steps",
        "precompute.encoders.vaes.families",
        "trainer.train",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.gemma3.modeling_gemma3",
    ]
)
Image.init()  # all formats: it imports forty modules


class Forked(FORKED.Process):
    """A forked process with its parent's environment; the server has the environment of its own start."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._environment = {**os.environ}

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()
