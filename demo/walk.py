"""Run the demo from end to end; each command runs as a user would type it, in its own process."""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from cache_store.errors import EncodeOnceError
from demo.config import DemoConfig
from demo.dataset import Sample, is_held_out
from demo.inputs import make_data, prepare_folder, save_language_model, save_vae
from demo.measure import word_accuracy
from demo.special_files import BROKEN, UNUSUAL
from demo.summary import show

CAPTIONED = 3
"""Held-out scenes that the exported projector is asked about."""


class StepFailedError(EncodeOnceError):
    """A command of the demo did not succeed; the demo ends with its exit code."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(f"`{command}` ended with exit code {exit_code}; its output is above")
        self.exit_code = exit_code


class Walk:
    """Announces, runs and times one step after the other."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, title: str, explanation: str) -> Iterator[None]:
        self.console.print(f"\n[bold]{len(self.seconds) + 1}. {title}[/bold]\n{explanation}")
        began = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - began

    def run(self, module: str, *arguments: str) -> None:
        """Run `python -m module arguments`, with its output in ours."""
        typed = shlex.join(["python", "-m", module, *arguments])
        self.console.print(f"[cyan]$ {typed}[/cyan]")
        exit_code = run_process([sys.executable, "-m", module, *arguments])
        if exit_code:
            raise StepFailedError(typed, exit_code)


def run_process(command: Sequence[str]) -> int:
    """Run a child and return its exit code; pass a stop on as one SIGTERM, so that it can stop cleanly."""
    # Start a new session: otherwise the child gets Ctrl-C twice, and the second one kills it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def walk(config: DemoConfig, console: Console) -> None:
    """Run the demo and show its results."""
    replaced = prepare_folder(config.root)
    console.print(f"Everything goes into {config.root}/" + (", in place of the previous demo." if replaced else "."))
    steps = Walk(console)
    drawn = make_inputs(config, steps)
    make_cache(config, steps)
    train(config, steps)
    with steps.step("Ask for colours and shapes", "Held-out scenes, with their own latents and with another scene's."):
        words = word_accuracy(config.train_config())
    use_projector(config, steps, drawn)
    show(console, config, words, steps.seconds)


def make_inputs(config: DemoConfig, steps: Walk) -> list[Sample]:
    """Return the data set that was drawn."""
    odd = len(BROKEN) + len(UNUSUAL)
    with steps.step(
        "Draw a data set",
        f"{config.scenes:,} scenes as JPEGs in a zip with LLaVA's chat.json, and {odd} odd files: "
        f"{', '.join(BROKEN)} (to be rejected); {', '.join(UNUSUAL)} (to be read).",
    ):
        drawn = make_data(config)
    with steps.step(
        "Make a small VAE", "The Cosmos VAE's architecture, narrow, with random weights that are never trained."
    ):
        save_vae(config, drawn)
    with steps.step(
        "Make a small language model",
        "Gemma 3's architecture, trained on the captions of the training part alone; then frozen. "
        "It never meets an image.",
    ):
        loss = save_language_model(config, drawn)
        folder = config.train_config().model.language_model
        steps.console.print(f"text loss {loss:.3f} after {config.text_steps:,} steps, saved in {folder}")
    return drawn


def make_cache(config: DemoConfig, steps: Walk) -> None:
    cache, page = config.build_config().cache, str(config.root / "gallery.html")
    with steps.step("Build the cache", "Every image is decoded and encoded once; unreadable images are rejected."):
        steps.run("precompute", "build", *config.build_options)
    with steps.step("Verify it", "Every byte, by the hash of its file."):
        steps.run("cache_store", "verify", cache, "--level", "full")
    with steps.step("Look into it", "Source images beside their latents: random rows and rejects."):
        steps.run("cache_store", "gallery", cache, "-o", page)


def train(config: DemoConfig, steps: Walk) -> None:
    with steps.step(
        "Train the projector",
        "From cached latents to the frozen language model; no image is read again. Each validation compares the loss "
        "of held-out scenes with that of other scenes' latents.",
    ):
        steps.run("trainer", "train", *config.train_options)


def use_projector(config: DemoConfig, steps: Walk, drawn: list[Sample]) -> None:
    """Export the projector, and describe held-out scenes with it."""
    train_config, exported = config.train_config(), str(config.root / "projector")
    ids = [sample.id for sample in drawn[: config.scenes] if is_held_out(sample.id, train_config.data.val_fraction)]
    with steps.step("Export the projector", "A folder to share: self-describing weights and a model card."):
        steps.run("trainer", "export", train_config.run.output, exported)
    with steps.step("Let it answer", "The language model's descriptions of held-out scenes, beside the true ones."):
        last = ",".join(ids[-CAPTIONED:])  # training has shown the first
        model = ["--language_model", train_config.model.language_model]
        steps.run("trainer", "generate", exported, "--ids", last, "--cache", config.build_config().cache, *model)
