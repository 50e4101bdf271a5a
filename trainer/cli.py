"""The program `trainer`: train, evaluate and export a projector, and generate through it."""

from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError
from cache_store.program.command_line import Command, Program
from cache_store.storage.store import local_path
from trainer.config import TrainConfig
from trainer.generate.generate_config import GenerateConfig

EXAMPLES = """\
  trainer train --print-config > my.yaml                  a config to edit
  trainer train --config my.yaml                          rerun to resume
  torchrun --nproc-per-node 8 -m trainer train --config my.yaml
  trainer eval --config my.yaml                           the newest checkpoint
  trainer profile --config my.yaml --steps 10             where the time goes
  trainer compare a.yaml b.yaml --base my.yaml            is b faster?
  trainer generate runs/mine --rows 7,3                   answers about rows
  trainer generate runs/mine --image photo.jpg --prompt "What is this?"
  trainer export runs/mine exported                       with a model card
"""

EVAL_OPTIONS = {"--checkpoint FOLDER": "The checkpoint's folder; default: the newest in run.output."}

PROFILE_OPTIONS = {
    "--steps N": "Steps that are recorded, after three of warm-up; default: 10.",
    "--out FOLDER": "Folder of the report; default: run.output with -profile at its end.",
}

MONITOR_OPTIONS = {"--once": "Show the run as it is now, and end."}

SIDES = {"a": "A config (YAML).", "b": "The config that is compared with it."}

COMPARE_OPTIONS = {
    "--base FILE": "A config that both are read over, so that each need only hold what differs.",
    "--steps N": "Steps of each, in five turns; default: 50.",
    "--ranks N": "Processes of each side, which share the global batch as under torchrun; default: 1.",
    "--min-speedup X": "Least speed of B's steps, as a multiple of A's.",
    "--max-memory-ratio X": "Largest peak memory of B, as a multiple of A's.",
    "--max-loss-delta X": "Largest difference between the losses of one step.",
}

RUN = {"run": "A run's folder (the newest checkpoint is used), a checkpoint's folder, or a projector file."}

# torch and transformers take seconds to import. Each command imports what it needs, so that `--help` is quick.


def train_command(arguments: Any) -> int:
    """Train the projector; rerun to resume where it stopped. Exits 3 when stopped by a signal."""
    from trainer.run.parallel import join_world
    from trainer.train import train

    with join_world() as world:
        train(arguments.config, world)
    return 0


def eval_command(arguments: Any) -> int:
    """Measure whether the projector uses the image: validation loss with own and with another sample's latents.

    The last line is JSON. --cache may name another cache of the same image recipe and encoder. The samples that
    data.val_fraction holds out of it are evaluated.
    """
    from trainer.run.parallel import join_world
    from trainer.run.validation import evaluate

    checkpoint = Path(arguments.checkpoint).expanduser() if arguments.checkpoint else None
    with join_world() as world:
        evaluate(arguments.config, world, checkpoint)
    return 0


def generate_command(arguments: Any) -> int:
    """Print the language model's answers about images that it reads through a trained projector.

    The images are rows of the run's cache, or image files, which are encoded as that cache was. Without --prompt, each
    row is asked its own first question, and the cache's answer is shown below the model's.
    """
    from trainer.generate.generate import generate

    generate(arguments.run, arguments.config)
    return 0


def export_command(arguments: Any) -> int:
    """Write a trained projector for others: weights, config, a model card with figures, code to use it alone."""
    from trainer.export.export import export

    export(arguments.run, local_path("folder", arguments.folder))
    return 0


def profile_command(arguments: Any) -> int:
    """Show where the time and memory of a training step go; the run itself stays as it is.

    --out gets profile.md, profile.json and profile.pt.trace.json (chrome://tracing, TensorBoard).
    """
    from trainer.insight.profile import profile
    from trainer.run.parallel import join_world

    config: TrainConfig = arguments.config
    folder = local_path("out", arguments.out or f"{config.run.output.rstrip('/')}-profile")
    steps = whole_number("steps", arguments.steps or "10")
    with join_world() as world:
        profile(config, world, steps, folder)
    return 0


def monitor_command(arguments: Any) -> int:
    """Show a run's progress in the terminal until it ends."""
    from trainer.insight.monitor import monitor

    monitor(local_path("run", arguments.run), once=arguments.once)
    return 0


def compare_command(arguments: Any) -> int:
    """Compare two configs: speed, peak memory and losses, step by step on the same batches, in turns.

    The steps are the first ones of each run; nothing that is trained is kept. The last line is JSON. Exits 1 if B
    breaks a limit, or if a loss of either side is not finite.
    """
    from trainer.insight.compare import compare

    named = {name: getattr(arguments, name) for name in ("min_speedup", "max_memory_ratio", "max_loss_delta")}
    limits = {name: number(name, text) for name, text in named.items() if text is not None}
    steps = whole_number("steps", arguments.steps or "50")
    ranks = whole_number("ranks", arguments.ranks or "1")
    return int(bool(compare(arguments.a, arguments.b, arguments.base, steps, limits, ranks)))


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
    "export": Command(export_command, operands=RUN | {"folder": "An empty or a new folder."}),
}

PROGRAM = Program(
    "trainer", "Train a projector from a cache of latents for a frozen language model.", EXAMPLES, COMMANDS
)
main = PROGRAM.main
