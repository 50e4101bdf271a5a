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
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.harness import parser_with, positive_int, print_record, program, spread, spreads
from benchmarks.photographs import jpeg, smooth_noise
from demo.vae import random_vae
from tests.make_cache import Conversation, make_cache
from tests.trainer.conftest import save_language_model
from trainer.config import DataConfig, OptimConfig, TrainConfig, TrainRunConfig
from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.insight.compare import ratio_interval
from trainer.model.model_config import ModelConfig
from trainer.run.parallel import World, local_device
from trainer.run.session import Session
from trainer.run.update import Updater

# Axes: N samples, T positions; images [N, 3, 1, Y, X].

LIMIT = 1.02
"""Goal: time of a cached step over that of a step from memory."""

PACKAGES = ("torch", "transformers", "diffusers", "encode-once")
WARM_UP = 2
WORDS = "a red square and blue circle it is a green ring left and right"

LOOP_EVERY = 5
"""Every so many turns include the loop; odd, so that each other side comes first after it equally often."""


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    rounds = {}
    for width in options.widths:
        with tempfile.TemporaryDirectory(prefix="train-step-") as name:
            rounds[str(width)] = measure(Path(name), width, options)
        print(f"width {width}", *(f"  {name:<30}{each}" for name, each in rounds[str(width)].items()), sep="\n")
    print_record(options, PACKAGES, limit=LIMIT, widths=rounds)
    return 0


def option_parser() -> argparse.ArgumentParser:
    own = {"samples": 256, "batch_size": 8, "height": 64, "width": 64, "vocabulary": 32_768, "repeats": 40}
    parser = parser_with(__doc__, "layers", **own)
    widths = "widths of the language model"
    parser.add_argument("--widths", type=positive_int, nargs="+", default=[128, 256, 512], help=widths)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    return parser


def measure(folder: Path, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the three sides in turns; return the record of one width."""
    steps = WARM_UP + options.repeats
    session = make_session(folder, width, steps, options)
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
    ratio, low, high = ratio_interval([*kept["cache"].values()], [*kept["memory"].values()])
    beside_loop = [kept["cache"][step] for step in kept["loop"]]
    return {
        "seconds": spreads({name: [*each.values()] for name, each in kept.items()}),
        "cache_over_memory": (ratio, low, high),
        "verdict": "confirmed" if high <= LIMIT else "refuted" if low > LIMIT else "not decided",
        "loop_over_cache": ratio_interval([*kept["loop"].values()], beside_loop),
        "cache_waits_s": spread(waits[WARM_UP:]),
        "loop_parts_s": spreads({name: each[1:] for name, each in loop.parts.items()}),
        "encoder_over_memory": round(median(loop.parts["encode"]) / median(kept["memory"].values()), 2),
    }


def order_of(step: int) -> list[str]:
    """Order the sides of a turn: cache and memory each come first, and after the loop, equally often.

    The side after the loop finds less of the language model in the processor's caches: in a fixed rotation, the side
    that always came after it seemed slower by a seventh.
    """
    pair = ["cache", "memory"] if step % 2 else ["memory", "cache"]
    return ["loop", *pair] if step == 0 or step % LOOP_EVERY == WARM_UP else pair


def do_step(updater: Updater, batch: StepBatch, step: int) -> float:
    return float(updater(batch, step).metrics["loss"])


def make_session(folder: Path, width: int, steps: int, options: argparse.Namespace) -> Session:
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
        run=TrainRunConfig(output=str(folder / "run"), precision=options.precision, max_steps=steps),
    )
    return Session(config, World(rank=0, size=1, device=local_device(0))).prepare()


def save_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    """Save a Gemma 3 of random weights, and a tokenizer of words."""
    save_language_model(
        folder, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        layer_types=["full_attention"] * layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=max(16, width // 4), vocab_size=vocabulary, max_position_embeddings=4_096,
    )  # fmt: skip


def conversation(words: str) -> Conversation:
    return [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": words}]


def on_device(session: Session, batch: StepBatch) -> StepBatch:
    parts = [each.to(session.world.device) for each in batch.micro_batches]
    return StepBatch(batch.numbers, batch.label_tokens, batch.text_tokens, parts)


class Loop:
    """The usual loop, with everything in the step; its learning rate is 0, so the projector stays the same."""

    def __init__(self, session: Session, options: argparse.Namespace) -> None:
        self._session, self._device, self._size = session, session.world.device, (options.width, options.height)
        self._vae = random_vae(0).to(self._device)
        self._jpegs = [jpeg(smooth_noise(number)) for number in range(options.batch_size)]
        self._parameters = [each for each in session.model.projectors.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0)
        self.parts = defaultdict[str, list[float]](list)

    def __call__(self, batch: StepBatch) -> float:
        """Do a step from images and return its loss."""
        pixels = self._timed("decode", self._decode)
        latents = self._timed("encode", partial(self._encode, pixels))
        loss: float = self._timed("language model", partial(self._train, batch, latents))
        return loss

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        began, result = time.perf_counter(), work()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.parts[part].append(time.perf_counter() - began)
        return result

    def _decode(self) -> Tensor:
        images = [np.asarray(Image.open(io.BytesIO(each)).convert("RGB").resize(self._size)) for each in self._jpegs]
        pixels = torch.from_numpy(np.stack(images)).to(self._device).float() / 127.5 - 1
        return pixels.permute(0, 3, 1, 2)[:, :, None]

    @torch.no_grad()
    def _encode(self, pixels: Tensor) -> Tensor:
        latents: Tensor = self._vae.encode(pixels).latent_dist.mean[:, :, 0]
        return latents

    def _train(self, batch: StepBatch, latents: Tensor) -> float:
        model, (inputs, *_) = self._session.model, batch.micro_batches
        logits = model.language.logits(model.hidden({"world": latents}, inputs.tokens_NT)).float()
        targets = torch.full(logits.shape[:2], -100, device=logits.device)
        targets[inputs.sample_L, inputs.column_L + model.projectors.num_tokens - 1] = inputs.target_L
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
