"""`trainer`: train a projector from a cache, and evaluate it."""

from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError
from cache_store.program.command_line import Command, Program
from cache_store.program.output_file import refuse_output
from cache_store.storage.store import local_path
from trainer.config import TrainConfig
from trainer.generate.config import GenerateConfig

EXAMPLES = """\
  trainer train --print_config > my.yaml                  a config to edit
  trainer train --config my.yaml                          rerun to resume
  torchrun --nproc-per-node 8 -m trainer train --config my.yaml
  trainer eval --config my.yaml --report eval.json        the newest checkpoint
  trainer profile --config my.yaml --steps 10             where the time goes
  trainer compare a.yaml b.yaml --base my.yaml            is b faster?
  trainer generate runs/mine --rows 7,3                   what it says of them
  trainer generate runs/mine --image photo.jpg --prompt "What is this?"
  trainer export runs/mine exported                       with a model card
"""

EVAL_OPTIONS = {
    "--checkpoint FOLDER": "Its folder; by default the newest of run.output.",
    "--report FILE": "Also write the result to this JSON file.",
}

PROFILE_OPTIONS = {
    "--steps N": "Steps that are recorded, after three of warm-up; 10 if nothing is said.",
    "--out FOLDER": "Where the report goes; by default run.output with -profile at its end.",
    "--live-encoder": "Put the frozen encoder into the step, as without a cache: images are read, decoded and encoded.",
}

MONITOR_OPTIONS = {"--once": "Show it as it is now, and end."}

SIDES = {"a": "A config (YAML).", "b": "Another one, which is compared with it."}

COMPARE_OPTIONS = {
    "--base FILE": "A config that both are read over, so that they may hold what differs alone.",
    "--steps N": "Steps of each, in five turns; 50 if nothing is said.",
    "--ranks N": "Processes of each side, which share the global batch as torchrun's would; 1 if nothing is said.",
    "--min-speedup X": "How many times as fast as A's a step of B has to be.",
    "--max-memory-ratio X": "How much of A's peak memory B may take.",
    "--max-loss-delta X": "How far the losses of a step may be apart.",
    "--report FILE": "Also write the result to this JSON file.",
}

RUN = {"run": "A run's folder (its newest checkpoint), a checkpoint's, or a projector's file."}

EXPORT_OPTIONS = {
    "--push-to-hub REPO": "Then upload the folder to this repository of the Hugging Face Hub: owner/name, or the name "
    "of one of your own.",
    "--private": "Where the repository is new, make it a private one.",
}

# torch and transformers take seconds to import, so the commands import what they need: `--help` stays quick.


def train_command(arguments: Any) -> int:
    """Train the projector; rerun to resume where it stopped. Exits 3 when stopped by a signal."""
    from trainer.run.parallel import join_world
    from trainer.train import train

    with join_world() as world:
        train(arguments.config, world)
    return 0


def eval_command(arguments: Any) -> int:
    """Validation loss with each sample's own latents and with another's: does the projector use the image?

    --cache may name another cache than the run's, of the same image recipe and encoder; its samples are those that
    data.val_fraction holds out of it.
    """
    from trainer.run.parallel import join_world
    from trainer.run.validation import evaluate

    config: TrainConfig = arguments.config
    report = local_path("report", arguments.report) if arguments.report else None
    if report:
        for cache in config.all_caches:
            refuse_output("report", report, cache)
    checkpoint = Path(arguments.checkpoint).expanduser() if arguments.checkpoint else None
    with join_world() as world:
        evaluate(config, world, checkpoint, report)
    return 0


def generate_command(arguments: Any) -> int:
    """Show what the language model says of images, by the projector that a run has trained.

    Of rows of the run's cache, or of image files, which go through the recipe and the encoder of that cache. Without
    --prompt each row's own first question is asked, and the cache's own answer is shown below the model's.
    """
    from trainer.generate.generate import generate

    generate(arguments.run, arguments.config)
    return 0


def export_command(arguments: Any) -> int:
    """Write a trained projector for others: with its config, a model card with figures, and code to use it alone."""
    from trainer.export.export import export

    if arguments.private and not arguments.push_to_hub:
        raise ConfigError("--private is for --push-to-hub; name a repository or leave it out")
    export(arguments.run, local_path("folder", arguments.folder), arguments.push_to_hub, private=arguments.private)
    return 0


def profile_command(arguments: Any) -> int:
    """Show where the time and the memory of a training step go; the run itself is left alone.

    --out gets profile.md, profile.html and trace.json (chrome://tracing, TensorBoard).
    """
    from trainer.insight.profile import profile
    from trainer.run.parallel import join_world

    config: TrainConfig = arguments.config
    folder = local_path("out", arguments.out or f"{config.run.output.rstrip('/')}-profile")
    steps = whole_number("steps", arguments.steps or "10")
    with join_world() as world:
        profile(config, world, steps, folder, live_encoder=arguments.live_encoder)
    return 0


def monitor_command(arguments: Any) -> int:
    """Follow a run in the terminal until it ends; its folder may go away and come back."""
    from trainer.insight.monitor import monitor

    monitor(local_path("run", arguments.run), once=arguments.once)
    return 0


def compare_command(arguments: Any) -> int:
    """Compare two configs: speed, peak memory and losses, step by step on the same batches, in turns.

    Exits 1 where B does not reach a limit. Nothing is trained that is kept.
    """
    from trainer.insight.compare import Limits, compare

    named = {name: getattr(arguments, name) for name in ("min_speedup", "max_memory_ratio", "max_loss_delta")}
    limits = Limits(**{name: number(name, text) for name, text in named.items() if text is not None})
    report = local_path("report", arguments.report) if arguments.report else None
    steps = whole_number("steps", arguments.steps or "50")
    ranks = whole_number("ranks", arguments.ranks or "1")
    return int(bool(compare(arguments.a, arguments.b, arguments.base, steps, limits, report, ranks)))


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} must be a number, got {text[:40]!r}") from None


def whole_number(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"--{name} must be a whole number, got {text[:40]!r}")
    return int(text)


COMMANDS = {
    "train": Command(train_command, TrainConfig),
    "eval": Command(eval_command, TrainConfig, options=EVAL_OPTIONS),
    "profile": Command(profile_command, TrainConfig, options=PROFILE_OPTIONS),
    "compare": Command(compare_command, operands=SIDES, options=COMPARE_OPTIONS),
    "monitor": Command(monitor_command, operands={"run": "The run's folder."}, options=MONITOR_OPTIONS),
    "generate": Command(generate_command, GenerateConfig, RUN),
    "export": Command(export_command, operands=RUN | {"folder": "An empty or a new folder."}, options=EXPORT_OPTIONS),
}

PROGRAM = Program("trainer", "Train a projector from a cache into a frozen language model.", EXAMPLES, COMMANDS)
main = PROGRAM.main
