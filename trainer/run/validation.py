"""Does the projector use the image? The command `eval` compares validation losses with own and with shuffled latents.

The shuffle gives every sample the latents of the next one in validation order, so that no sample keeps its own.
"""

import json
import shlex
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from cache_store.errors import ConfigError, EncodeOnceError, Interrupted
from trainer.config import TrainConfig
from trainer.data.buckets import parts_alike
from trainer.data.prefetch import prefetched
from trainer.run.checkpoint import CheckpointState, is_of_another_cache, read_state, refuse_other_projector
from trainer.run.figures import Metrics
from trainer.run.folder import checkpoints_of
from trainer.run.parallel import World
from trainer.run.session import Session

SIGNIFICANT = 2.0
"""Standard errors beyond which a difference counts as real."""

NAMED_SAMPLES = 16
"""Most samples named in one message."""


class CutShortError(Interrupted):
    """A validation was cut short on all ranks."""

    def __init__(self) -> None:
        super().__init__("within a validation; run the same command to go on")


@dataclass(frozen=True)
class Scores:
    """Sums over each validation sample's label tokens; float64 [samples]."""

    loss: np.ndarray
    right: np.ndarray
    """Number of label tokens predicted right."""
    label_tokens: np.ndarray

    @property
    def mean_loss(self) -> float:
        return float(self.loss.sum() / self.label_tokens.sum())

    @property
    def accuracy(self) -> float:
        return float(self.right.sum() / self.label_tokens.sum())


@dataclass(frozen=True)
class ShuffleTest:
    """Loss per label token, and share of them predicted right, with own and with shuffled latents."""

    samples: int
    label_tokens: int
    own: float
    shuffled: float
    standard_error: float
    """Of the difference between the losses, over samples."""
    own_accuracy: float
    shuffled_accuracy: float

    @property
    def difference(self) -> float:
        return self.shuffled - self.own

    @property
    def verdict(self) -> str:
        if self.difference > SIGNIFICANT * self.standard_error:
            return "the model uses the image: another image makes the text less likely"
        if self.difference < -SIGNIFICANT * self.standard_error:
            return "the image misleads the model: another image makes the text more likely"
        return "no sign that the model uses the image: own and other images do equally well"

    @property
    def metrics(self) -> Metrics:
        return {
            "val_loss": self.own,
            "val_loss_shuffled": self.shuffled,
            "val_standard_error": self.standard_error,
            "val_accuracy": self.own_accuracy,
            "val_accuracy_shuffled": self.shuffled_accuracy,
        }

    @property
    def on_one_line(self) -> str:
        return (
            f"validation loss {self.own:.4f}, shuffled {self.shuffled:.4f}, difference {self.difference:.4f} ± "
            f"{self.standard_error:.4f}; tokens right {self.own_accuracy:.1%}, shuffled {self.shuffled_accuracy:.1%}"
        )

    def __str__(self) -> str:
        return (
            f"validation loss per label token ({self.samples:,} samples, {self.label_tokens:,} tokens)\n"
            f"  own image        {self.own:.4f}, {self.own_accuracy:.1%} of tokens right\n"
            f"  another's image  {self.shuffled:.4f}, {self.shuffled_accuracy:.1%} of tokens right\n"
            f"  difference       {self.difference:.4f} ± {self.standard_error:.4f}: {self.verdict}"
        )


def never() -> bool:
    return False


def shuffle_test(session: Session, stopped: Callable[[], bool] = never) -> ShuffleTest:
    """Compare own with shuffled latents; raise CutShortError if a rank was stopped."""
    numbers = session.split.validation
    if len(numbers) < 2:
        raise ConfigError(
            f"data.val_fraction {session.config.data.val_fraction} holds out {len(numbers)} of "
            f"{len(numbers) + len(session.split.train)} samples; shuffled latents need at least 2"
        )
    return make_shuffle_test(*(sample_scores(session, each, stopped) for each in (numbers, np.roll(numbers, -1))))


def make_shuffle_test(own: Scores, shuffled: Scores) -> ShuffleTest:
    """Combine the samples' sums; the standard error is that of a ratio of two sums over samples."""
    tokens, samples = int(own.label_tokens.sum()), len(own.loss)
    difference = (shuffled.loss - own.loss).sum() / tokens
    residuals = (shuffled.loss - own.loss) - difference * own.label_tokens
    return ShuffleTest(
        samples=samples,
        label_tokens=tokens,
        own=own.mean_loss,
        shuffled=shuffled.mean_loss,
        standard_error=float(np.sqrt((residuals**2).sum() * samples / (samples - 1)) / tokens),
        own_accuracy=own.accuracy,
        shuffled_accuracy=shuffled.accuracy,
    )


@torch.no_grad()
def sample_scores(session: Session, latents_of: np.ndarray, stopped: Callable[[], bool] = never) -> Scores:
    """Score each validation sample with the latents of `latents_of`; CutShortError if a rank was stopped."""
    numbers, world = session.split.validation, session.world
    # The last column counts the ranks that were stopped.
    sums = torch.zeros(2, len(numbers) + 1, dtype=torch.float64, device=world.device)
    sizes = session.loader.stream.sizes.indices(latents_of)
    by_rank = [rank_parts(sizes, session.config.run.eval_batch_size, rank, world.size) for rank in range(world.size)]
    parts = by_rank[world.rank]
    counted = len(parts)
    if session.in_step:  # ranks with fewer passes score sample 0, uncounted, to keep step
        parts = parts + [slice(0, 1)] * (max(map(len, by_rank)) - counted)
    stopped = session.stop_check(stopped)
    loads = prefetched(lambda part: session.loader.load(numbers[part], latents_of[part]), parts, session.loader.threads)
    compiled = session.config.run.compile == "layers"  # for the few lengths of training alone
    with closing(loads) as batches, torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        for place, (part, batch) in enumerate(zip(parts, batches, strict=True)):
            if stopped():
                sums[:, -1] = 1
                break
            on_device = batch.to(world.device)
            scores = session.model.score(on_device).double()
            if place < counted:
                sums[:, part].index_add_(1, on_device.sample_L, scores)
    world.sum(sums)
    if sums[0, -1] > 0:
        raise CutShortError
    loss, right = sums[:, :-1].cpu().numpy()
    refuse_nonfinite_losses(session, loss)
    return Scores(loss, right, np.asarray(session.text.num_labels[numbers]))


def refuse_nonfinite_losses(session: Session, losses: np.ndarray) -> None:
    faulty = session.split.validation[~np.isfinite(losses)]
    if not len(faulty):
        return
    paths = session.config.towers.values()
    checks = " and ".join(f"`cache-store verify {shlex.quote(path)} --level deep`" for path in paths)
    raise EncodeOnceError(
        f"validation: the loss of {len(faulty):,} of {len(losses):,} held-out samples is not finite\n"
        f"  samples  {sample_names(session, faulty)}\n"
        f"  run {checks}; if that finds nothing, the projector has diverged: try a lower optim.lr"
    )


def sample_names(session: Session, numbers: np.ndarray) -> str:
    ids = session.cache.samples(numbers[:NAMED_SAMPLES], columns=["id"])["id"].to_pylist()
    return ", ".join(ids) + (f" and {len(numbers) - len(ids):,} more" if len(numbers) > len(ids) else "")


def rank_parts(sizes_N: np.ndarray, batch_size: int, rank: int, world_size: int) -> list[slice]:
    first, last = (len(sizes_N) * each // world_size for each in (rank, rank + 1))
    return [slice(first + part.start, first + part.stop) for part in parts_alike(sizes_N[first:last], batch_size)]


def evaluate(config: TrainConfig, world: World, checkpoint: Path | None) -> None:
    """Print the result for `checkpoint`, by default the newest; the last line is JSON."""
    checkpoint = checkpoint or checkpoints_of(config.run).newest()
    if checkpoint is None:
        raise ConfigError(f"run.output: {config.run.output} holds no checkpoint; run `trainer train` first")
    state = read_state(checkpoint)
    session = Session(config, world)
    refuse_other_projector(checkpoint, state, session.must_match)
    session.prepare(trained=checkpoint)
    announce_other_cache(session, state)
    result = shuffle_test(session)
    if world.is_main:
        record = {"checkpoint": str(checkpoint), "step": state.step, **asdict(result)}
        record |= {"difference": result.difference, "verdict": result.verdict}
        print(result, json.dumps(record, allow_nan=False), sep="\n")


def announce_other_cache(session: Session, state: CheckpointState) -> None:
    if not is_of_another_cache(state, session.must_match):
        return
    here, then = session.config.data.val_fraction, state.config["data"]["val_fraction"]
    trained_on = "" if here <= then else f"; training held out {then}: ids of both may have been trained on"
    session.world.say(
        f"the checkpoint was trained from another cache; evaluating the {len(session.split.validation):,} samples that "
        f"data.val_fraction {here} holds out of this one, by id as in training{trained_on}"
    )
