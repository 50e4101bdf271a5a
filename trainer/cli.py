"""`trainer`: train a projector from a cache, and evaluate it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError
from cache_store.program.command_line import Command, Program
from cache_store.program.output_file import refuse_output, write_output
from trainer.config import TrainConfig

EXAMPLES = """\
  trainer train --config configs/train_llava_cc3m.yaml    rerun to resume
  trainer train --print_config > my.yaml                  a config to edit
  torchrun --nproc-per-node 8 -m trainer train --config my.yaml
  trainer eval --config my.yaml --report eval.json        the newest checkpoint
"""

EVAL_OPTIONS = {
    "--checkpoint": "Its folder; by default the newest of run.output.",
    "--report": "Also write the result to this JSON file.",
}

# torch and transformers take seconds to import, so the commands import what they need: `--help` stays quick.


def train_command(arguments: Any) -> int:
    """Train the projector; rerun to go on where it stopped. Exits 3 when stopped by a signal."""
    from trainer.run.loop import train
    from trainer.run.parallel import join_world

    with join_world() as world:
        train(arguments.config, world)
    return 0


def eval_command(arguments: Any) -> int:
    """Validation loss with each sample's own latents and with another's: does the projector use the image?

    --cache may name another cache than the run's, of the same image recipe and encoder; its samples are those that
    data.val_fraction holds out of it.
    """
    from trainer.commands.evaluate import announce_other_cache, compare
    from trainer.run.checkpoint import CheckpointFolder, read_state, refuse_other_projector
    from trainer.run.inputs import open_inputs
    from trainer.run.parallel import join_world
    from trainer.run.session import open_session

    config: TrainConfig = arguments.config
    report = Path(arguments.report).expanduser() if arguments.report else None
    if report:
        refuse_output("report", report, Path(config.cache).expanduser())
    newest = CheckpointFolder(config.run.folder / "checkpoints", config.run.keep_last).newest()
    checkpoint = Path(arguments.checkpoint).expanduser() if arguments.checkpoint else newest
    if checkpoint is None:
        raise ConfigError(f"run.output: {config.run.output} holds no checkpoint; run `trainer train` first")
    state = read_state(checkpoint)
    with join_world() as world:
        inputs = open_inputs(config, world)
        refuse_other_projector(checkpoint, state, inputs.must_match)
        session = open_session(inputs, trained=checkpoint)
        announce_other_cache(session, state)
        comparison = compare(session)
        if comparison is not None and world.is_main:
            record = {"checkpoint": str(checkpoint), "step": state.step, **asdict(comparison)}
            record |= {"difference": comparison.difference, "verdict": comparison.verdict}
            print(comparison, json.dumps(record, allow_nan=False), sep="\n")
            if report:
                write_output(report, json.dumps(record, indent=1).encode() + b"\n")
    return 0


COMMANDS = {
    "train": Command(train_command, TrainConfig),
    "eval": Command(eval_command, TrainConfig, options=EVAL_OPTIONS),
}

PROGRAM = Program("trainer", "Train a projector from a cache into a frozen language model.", EXAMPLES, COMMANDS)
main = PROGRAM.main
