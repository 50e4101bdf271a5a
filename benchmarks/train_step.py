"""Measure a training step from the cache against the same step from memory, and against the usual loop, in one run.

Three sides take turns, step by step, with the same frozen language model and the same projector:

    cache     latents read from the cache, ahead; logits at label tokens
    memory    the same batches, made before and held on the device
    loop      JPEGs decoded and encoded with diffusers' own encode in the step; logits at every position

The loop joins each fifth turn. A cached step should cost at most 1.02 of a step from memory: the interval of 95 % of
their ratio confirms that, refutes it, or is too wide to tell. Several widths of the language model give the encoder
different shares of the loop. The record also has the loop's time by part, and the cached step's wait for its batch.
"""

import argparse
import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.decode import jpeg, smooth_noise
from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from benchmarks.timing import spread
from cache_store.program.running import run_program
from demo.vae import random_vae
from tests.make_cache import make_cache
from tests.trainer.conftest import save_language_model
from trainer.config import DataConfig, OptimConfig, TrainConfig, TrainRunConfig
from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.insight.compare import ratio_interval
from trainer.model.config import ModelConfig
from trainer.model.model import ModelInput
from trainer.run.inputs import open_inputs
from trainer.run.parallel import World, local_device
from trainer.run.session import Session, open_session
from trainer.run.update import Updater

# Axes: N samples, T positions, D model width, V vocabulary; images [N, 3, 1, Y, X].

LIMIT = 1.02
"""Goal: time of a cached step over that of a step from memory."""

PACKAGES = ("torch", "transformers", "diffusers", "encode-once")
WARM_UP = 2
WORDS = "a red square and blue circle it is a green ring left and right"

LOOP_EVERY = 5
"""Every so many turns include the loop; odd, so that each other side comes first after it equally often."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.train_step", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    rounds = {}
    for width in options.widths:
        with tempfile.TemporaryDirectory(prefix="train-step-") as name:
            rounds[str(width)] = measure(Path(name), width, options)
            print(*lines(width, rounds[str(width)]), sep="\n", flush=True)
    print_record("train_step", PACKAGES, settings=vars(options), limit=LIMIT, widths=rounds)
    return 0


def option_parser() -> argparse.ArgumentParser:
    own = {"repeats": 40, "batch_size": 8, "height": 64, "width": 64}
    parser = parser_with(__doc__, **own)
    parser.add_argument(
        "--widths", type=positive_int, nargs="+", default=[128, 256, 512], help="widths of the language model"
    )
    parser.add_argument("--layers", type=positive_int, default=6)
    parser.add_argument("--vocabulary", type=positive_int, default=32_768)
    parser.add_argument("--samples", type=positive_int, default=256)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    return parser


def measure(folder: Path, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the three sides in turns; return the record of one width."""
    session = make_session(folder, width, options)
    steps = WARM_UP + options.repeats
    memory = [on_device(session, session.loader(step)) for step in range(steps)]
    loop = Loop(session, options)
    seconds: dict[str, dict[int, float]] = {"cache": {}, "memory": {}, "loop": {}}
    waits = list[float]()
    updaters = {name: Updater(session, steps) for name in ("cache", "memory")}
    with closing(prefetched(session.loader, range(steps), session.loader.threads)) as batches:
        for step in range(steps):

            def cached(step: int = step) -> float:
                began = time.perf_counter()
                batch = next(batches)
                waits.append(time.perf_counter() - began)
                return do_step(updaters["cache"], batch, step)

            sides: dict[str, Callable[[], float]] = {
                "cache": cached,
                "memory": partial(do_step, updaters["memory"], memory[step], step),
                "loop": partial(loop, memory[step]),
            }
            for name in order_of(step):
                began = time.perf_counter()
                sides[name]()
                seconds[name][step] = time.perf_counter() - began
    kept = {name: {step: each for step, each in times.items() if step >= WARM_UP} for name, times in seconds.items()}
    over_memory = ratio_interval([*kept["cache"].values()], [*kept["memory"].values()])
    beside_loop = [kept["cache"][step] for step in kept["loop"]]
    return {
        "seconds": {name: spread([*each.values()], 5) for name, each in kept.items()},
        "cache_over_memory": over_memory,
        "verdict": verdict(*over_memory),
        "loop_over_cache": ratio_interval([*kept["loop"].values()], beside_loop),
        "cache_waits_s": spread(waits[WARM_UP:], 6),
        "loop_parts_s": {name: spread(each[1:], 5) for name, each in loop.parts.items()},
        "encoder_over_language_model": statistics.median(loop.parts["encode"])
        / statistics.median(kept["memory"].values()),
    }


def order_of(step: int) -> list[str]:
    """Order the sides of a turn: cache and memory each come first, and after the loop, equally often.

    The side after the loop finds less of the language model in the processor's caches: in a fixed rotation, the side
    that always came after it seemed slower by a seventh.
    """
    pair = ["cache", "memory"] if step % 2 else ["memory", "cache"]
    return ["loop", *pair] if step == 0 or step % LOOP_EVERY == WARM_UP else pair


def do_step(updater: Updater, batch: StepBatch, step: int) -> float:
    """Do a step and return its loss."""
    return float(updater(batch, step).metrics["loss"])


def verdict(ratio: float, low: float, high: float) -> str:
    if high <= LIMIT:
        return "confirmed"
    return "refuted" if low > LIMIT else "not decided: the interval holds the limit"


def make_session(folder: Path, width: int, options: argparse.Namespace) -> Session:
    """Make a cache of random latents and a language model of random weights, and open a session on them."""
    save_model(folder / "lm", width, options.layers, options.vocabulary)
    cells = (options.height // 8, options.width // 8)
    latents = np.random.default_rng(0).standard_normal((options.samples, 16, *cells), np.float32)
    make_cache(folder / "cache", latents, conversations=[conversation(WORDS)] * options.samples, samples_per_shard=64)
    config = TrainConfig(
        cache=str(folder / "cache"),
        model=ModelConfig(language_model=str(folder / "lm")),
        data=DataConfig(batch_size=options.batch_size, val_fraction=0.0),
        optim=OptimConfig(),
        run=TrainRunConfig(
            output=str(folder / "run"), precision=options.precision, max_steps=WARM_UP + options.repeats
        ),
    )
    return open_session(open_inputs(config, World(rank=0, size=1, device=local_device(0))))


def save_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    """Save a Gemma 3 of random weights, and a tokenizer of words."""
    save_language_model(
        folder, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        layer_types=["full_attention"] * layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=max(16, width // 4), vocab_size=vocabulary, max_position_embeddings=4_096,
    )  # fmt: skip


def conversation(words: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": words}]


def on_device(session: Session, batch: StepBatch) -> StepBatch:
    parts = [each.to(session.world.device) for each in batch.micro_batches]
    return StepBatch(batch.numbers, batch.label_tokens, batch.text_tokens, parts)


@dataclass
class Loop:
    """The usual loop, with everything in the step."""

    session: Session
    options: argparse.Namespace
    parts: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.vae = random_vae(0).to(self.session.world.device)
        self.jpegs = [jpeg(smooth_noise(number)) for number in range(self.options.batch_size)]
        self.parameters = [each for each in self.session.model.projectors.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0)

    def __call__(self, batch: StepBatch) -> float:
        """Do a step from images and return its loss; its learning rate is 0, so the projector stays the same."""
        marks = [time.perf_counter()]
        pixels = self.decode()
        marks.append(self.now())
        latents = self.encode(pixels)
        marks.append(self.now())
        loss = self.train(batch.micro_batches[0], latents)
        marks.append(self.now())
        for name, start, end in zip(("decode", "encode", "language model"), marks[:-1], marks[1:], strict=True):
            self.parts.setdefault(name, []).append(end - start)
        return loss

    def now(self) -> float:
        if self.session.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def decode(self) -> Tensor:
        size = (self.options.width, self.options.height)
        images = [np.asarray(Image.open(io.BytesIO(each)).convert("RGB").resize(size)) for each in self.jpegs]
        pixels = torch.from_numpy(np.stack(images)).to(self.session.world.device).float() / 127.5 - 1
        return pixels.permute(0, 3, 1, 2)[:, :, None]

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        latents: Tensor = self.vae.encode(pixels).latent_dist.mean[:, :, 0]
        return latents

    def train(self, batch: ModelInput, latents: Tensor) -> float:
        model = self.session.model
        hidden = model.hidden({"world": latents}, batch.tokens_NT)
        logits = model.language.logits(hidden).float()
        targets = torch.full(logits.shape[:2], -100, device=logits.device)
        targets[batch.sample_L, batch.column_L + model.projectors.num_tokens - 1] = batch.target_L
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def lines(width: int, found: dict[str, Any]) -> list[str]:
    """Return the lines that show one width."""
    (over, low, high), (loop, *_) = found["cache_over_memory"], found["loop_over_cache"]
    parts = ", ".join(f"{name} {each['median']:.4f}" for name, each in found["loop_parts_s"].items())
    times = ", ".join(f"{name} {each['median']:.4f}" for name, each in found["seconds"].items())
    return [
        f"width {width}: encoder / step {found['encoder_over_language_model']:.2f}",
        f"  seconds a step     {times}",
        f"  cache / memory     {over:.4f} (95 %: {low:.4f} to {high:.4f}), at most {LIMIT}: {found['verdict']}",
        f"  loop / cache       {loop:.2f}",
        f"  of the loop        {parts}",
        f"  the cache waits    {found['cache_waits_s']['median']:.6f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
