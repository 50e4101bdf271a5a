"""Processes forked from one that has loaded the libraries: loading them takes far longer than a small run.

Python has one such server for all tests of a process, so it loads what each of them needs.
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
        "precompute.rerun.steps",
        "precompute.encoders.vaes.wan",
        "trainer.train",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.gemma3.modeling_gemma3",
    ]
)
Image.init()  # all formats: it imports forty modules


class Forked(FORKED.Process):
    """One that has its maker's environment, as if it were started anew; the server has that of its first day."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._environment = {**os.environ}

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()
