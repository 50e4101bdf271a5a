"""Processes forked from one that has loaded the libraries: loading them takes far longer than a small run.

Python has one such server for all tests of a process, so it loads what each of them needs.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "pytest",
        "tests.guarantees.programs",
        "precompute.encoders.vaes.wan",
        "trainer.commands.train",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.gemma3.modeling_gemma3",
    ]
)
