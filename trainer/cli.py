"""`trainer`: train a projector from a cache, and evaluate it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from cache_store.errors import ConfigError
from cache_store.program.command_line import (
    add_commands,
    command_parser,
    parse_command,
    program_parser,
    run_program,
    to_config,
)
from cache_store.program.output_file import refuse_output, write_output
from trainer.config import TrainConfig

EXAMPLES = """\
  trainer train --config configs/train_llava_cc3m.yaml    rerun to resume
  trainer train --print_config > my.yaml                  a config to edit
  torchrun --nproc-per-node 8 -m trainer train --config my.yaml
  trainer eval --config my.yaml --report eval.json        the newest checkpoint
"""

TRAIN = "Train the projector; rerun to go on where it stopped. Exits 3 when stopped by a signal."
EVAL = (
    "Validation loss with each sample's own latents and with another's: does the projector use the image? "
    "--cache may name another cache than the run's, of the same image recipe and encoder; its samples are those that "
    "data.val_fraction holds out of it."
)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `trainer`; returns the exit code."""
    return run_program("trainer", run, argv)


def run(argv: Sequence[str]) -> int:
    parser, commands = build_parser()
    arguments = parse_command(parser, argv)
    options = arguments[arguments.command]
    config = to_config(TrainConfig, commands[arguments.command], options)
    COMMANDS[arguments.command](config, options)
    return 0


def build_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    parser = program_parser("trainer", "Train a projector from a cache of latents into a frozen model.", EXAMPLES)
    commands = {"train": command_parser(TrainConfig, TRAIN), "eval": command_parser(TrainConfig, EVAL)}
    commands["eval"].add_argument(
        "--checkpoint", type=str | None, help="Its folder; by default the newest of run.output."
    )
    commands["eval"].add_argument("--report", type=str | None, help="Also write the result to this JSON file.")
    subcommands = add_commands(parser)
    subcommands.add_subcommand("train", commands["train"], help="Train the projector, or go on training it.")
    subcommands.add_subcommand("eval", commands["eval"], help="Does the projector use the image?")
    return parser, commands


# torch and transformers take seconds to import, so the commands import what they need: `--help` stays quick.


def train_command(config: TrainConfig, options: Any) -> None:
    from trainer.run.loop import train
    from trainer.run.parallel import join_world

    with join_world() as world:
        train(config, world)


def eval_command(config: TrainConfig, options: Any) -> None:
    from trainer.commands.evaluate import announce_other_cache, compare
    from trainer.run.checkpoint import CheckpointFolder, read_state, refuse_other_projector
    from trainer.run.inputs import open_inputs
    from trainer.run.parallel import join_world
    from trainer.run.session import open_session

    report = Path(options.report).expanduser() if options.report else None
    if report:
        refuse_output("report", report, Path(config.cache).expanduser())
    newest = CheckpointFolder(config.run.folder / "checkpoints", config.run.keep_last).newest()
    checkpoint = Path(options.checkpoint).expanduser() if options.checkpoint else newest
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


COMMANDS: dict[str, Callable[[TrainConfig, Any], None]] = {"train": train_command, "eval": eval_command}
