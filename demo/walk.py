"""The demo from end to end; what a user would type is run as typed, in a process of its own."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from cache_store import open_cache
from cache_store.errors import EncodeOnceError
from cache_store.program.stop_signals import stop_on_signals
from demo.config import DemoConfig
from demo.inputs import make_data, prepare_folder, save_language_model, save_vae
from demo.measure import word_accuracy
from demo.special_files import BROKEN, UNUSUAL
from demo.summary import show

REPORT = "eval.json"


class StepFailedError(EncodeOnceError):
    """A command of the demo did not succeed; the demo ends with its exit code."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(f"`{command}` ended with exit code {exit_code}; what it said stands above")
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
        """`python -m module arguments`, with its output where ours goes."""
        typed = shlex.join(["python", "-m", module, *arguments])
        self.console.print(f"[cyan]$ {typed}[/cyan]")
        exit_code = run_process([sys.executable, "-m", module, *arguments])
        if exit_code:
            raise StepFailedError(typed, exit_code)


def run_process(command: Sequence[str]) -> int:
    """Exit code of a child that gets our stop signals as one SIGTERM, so that it can end in good order."""
    # A session of its own: otherwise Ctrl-C reaches the child twice, and the second one kills.
    process = subprocess.Popen(command, start_new_session=True)
    with stop_on_signals(process.terminate):
        code = process.wait()
    return code if code >= 0 else 128 - code


def walk(config: DemoConfig, console: Console) -> None:
    """Run the demo and show what came of it."""
    replaced = prepare_folder(config.root)
    console.print(f"Everything goes into {config.root}/" + (", in place of the previous demo." if replaced else "."))
    steps = Walk(console)
    make_inputs(config, steps)
    run_commands(config, steps)
    with steps.step("Ask for colours and shapes", "Held-out scenes, with their own latents and with another scene's."):
        words = word_accuracy(config.train_config())
    losses = json.loads((config.root / REPORT).read_text(encoding="utf-8"))
    show(console, open_cache(config.build_config().cache), losses, words, steps.seconds)


def make_inputs(config: DemoConfig, steps: Walk) -> None:
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


def run_commands(config: DemoConfig, steps: Walk) -> None:
    cache, page, report = config.build_config().cache, str(config.root / "gallery.html"), str(config.root / REPORT)
    with steps.step("Build the cache", "Every image is decoded and encoded once; what cannot be read is rejected."):
        steps.run("precompute", "build", *config.build_options)
    with steps.step("Verify it", "Every byte, by the hash of its file."):
        steps.run("cache_store", "verify", cache, "--level", "full")
    with steps.step("Look into it", "Sources beside what their latents hold: random rows, unusual ones, rejects."):
        steps.run("cache_store", "gallery", cache, "-o", page)
    with steps.step("Train the projector", "From cached latents to the frozen language model; no image is read again."):
        steps.run("trainer", "train", *config.train_options)
    with steps.step("Evaluate it", "Loss on held-out scenes with their own latents, and with another scene's."):
        steps.run("trainer", "eval", *config.train_options, "--report", report)
