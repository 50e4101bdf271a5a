"""Measure what each switch of training does to a step: `trainer compare` of pairs of configs/compare, as a table.

The cache, a Gemma 3 of random weights and texts of different lengths are made for it. The sides of a pair take turns on
the same batches, each in a process of its own; parallel runs on two ranks. `--pairs` chooses among the pairs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from benchmarks.harness import ROOT, parser_with, positive_int, print_record, program
from benchmarks.train_step import WORDS, conversation, save_model
from tests.make_cache import make_cache
from trainer.insight.compare import config_options, take_turns

CONFIGS = ROOT / "configs" / "compare"

PAIRS = {
    "checkpointing: selective": ("checkpointing-none", "checkpointing-selective"),
    "checkpointing: full": ("checkpointing-none", "checkpointing-full"),
    "loss_chunk": ("loss-whole", "loss-chunked"),
    "fit_memory": ("passes-one-sample", "passes-fitted"),
    "attention": ("attention-math", "attention-auto"),
    "reconstruction: every 4": ("reconstruction-none", "reconstruction-every-4"),
    "reconstruction: every 1": ("reconstruction-none", "reconstruction-every-1"),
    "offload": ("optimizer-device", "optimizer-offloaded"),
    "parallel": ("parallel-ddp", "parallel-fsdp2"),
    "precision": ("precision-fp32", "precision-bf16"),
    "compile: layers": ("compile-none", "compile-layers"),
    "compile: whole": ("compile-none", "compile-whole"),
}
"""Files of configs/compare, A and B."""

RANKS = {"parallel": 2}
"""Ranks of the pairs that need more than one."""

COMPILED = ("compile: layers", "compile: whole")
"""Pairs left out unless they are named: they take minutes."""

PACKAGES = ("torch", "transformers", "encode-once")


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    found = {}
    print("| A, B | seconds a step | speed-up (95 %) | peak memory | losses differ by |\n" + "| --- " * 5 + "|")
    with tempfile.TemporaryDirectory(prefix="switches-") as name:
        base = make_inputs(Path(name), options)
        for pair in options.pairs:
            options_of_sides = [config_options(str(CONFIGS / f"{side}.yaml"), str(base)) for side in PAIRS[pair]]
            each = take_turns(options_of_sides, options.steps, RANKS.get(pair, 1))
            losses = "other batches" if each.max_loss_delta is None else f"{each.max_loss_delta:.2g}"
            print(
                f"| {', '.join(PAIRS[pair])} | {each.step_s[0]:.3f}, {each.step_s[1]:.3f} | {each.speedup:.2f} "
                f"({each.low:.2f} to {each.high:.2f}) | {each.memory_ratio:.2f} | {losses} |",
                flush=True,
            )
            found[pair] = asdict(each)
    print_record(options, PACKAGES, pairs=found)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "layers", samples=512, batch_size=8, height=64, width=64, vocabulary=8_192)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[each for each in PAIRS if each not in COMPILED])
    parser.add_argument("--model-width", type=positive_int, default=256)
    parser.add_argument("--steps", type=positive_int, default=50, help="steps of each side, in five turns")
    return parser


def make_inputs(folder: Path, options: argparse.Namespace) -> Path:
    """Write cache, language model and the config that all sides are read over; return that config's path."""
    save_model(folder / "lm", options.model_width, options.layers, options.vocabulary)
    cells = (options.height // 8, options.width // 8)
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((options.samples, 16, *cells), np.float32)
    texts = [" ".join([WORDS] * 4).split()[: 4 + int(each)] for each in rng.integers(0, 50, options.samples)]
    conversations = [conversation(" ".join(words)) for words in texts]
    make_cache(folder / "cache", latents, conversations=conversations, samples_per_shard=64)
    config = {
        "cache": str(folder / "cache"),
        "model": {"language_model": str(folder / "lm")},
        "data": {"batch_size": options.batch_size, "val_fraction": 0.0},
        "run": {"precision": "fp32", "output": str(folder / "run")},
    }
    file = folder / "base.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
