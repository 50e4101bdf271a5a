"""Does the projector use the image? Validation loss with each sample's own latents and with another's.

The shuffle gives every sample the latents of the next one in validation order, so none keeps its own.
"""

import shlex
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from cache_store.errors import ConfigError, EncodeOnceError
from trainer.data.prefetch import prefetched
from trainer.run.parallel import World
from trainer.run.session import Session

SIGNIFICANT = 2.0
"""Standard errors beyond which a difference counts."""

NAMED_SAMPLES = 16
"""Most samples named in one message."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class ShuffleTest:
    """The result: validation loss per label token, with own and with shuffled latents."""

    samples: int
    label_tokens: int
    own: float
    shuffled: float
    standard_error: float
    """Of the difference, estimated over samples."""

    @property
    def difference(self) -> float:
        return self.shuffled - self.own

    @property
    def verdict(self) -> str:
        if self.difference > SIGNIFICANT * self.standard_error:
            return "the model uses the image: another image's latents make the text less likely"
        if self.difference < -SIGNIFICANT * self.standard_error:
            return "the image misleads the model: another image's latents make the text more likely"
        return "no sign that the model uses the image: own and other latents do equally well"

    def __str__(self) -> str:
        return (
            f"validation loss per label token ({self.samples:,} samples, {self.label_tokens:,} tokens)\n"
            f"  own latents       {self.own:.4f}\n"
            f"  shuffled latents  {self.shuffled:.4f}\n"
            f"  difference        {self.difference:.4f} ± {self.standard_error:.4f}: {self.verdict}"
        )


def shuffle_test(session: Session, stopped: Callable[[], bool] = never) -> ShuffleTest | None:
    """Compare own with shuffled latents; None where a rank was stopped."""
    numbers = session.split.validation
    if len(numbers) < 2:
        raise ConfigError(
            f"data.val_fraction {session.config.data.val_fraction} holds out {len(numbers)} of "
            f"{len(numbers) + len(session.split.train)} samples; shuffled latents need at least 2"
        )
    own = sample_losses(session, numbers, stopped)
    shuffled = None if own is None else sample_losses(session, np.roll(numbers, -1), stopped)
    if own is None or shuffled is None:
        return None
    return make_shuffle_test(own, shuffled, session.text.num_labels[numbers])


def make_shuffle_test(own: np.ndarray, shuffled: np.ndarray, label_tokens: np.ndarray) -> ShuffleTest:
    """Combine each sample's summed losses; the error is that of a ratio of sums over samples."""
    tokens, samples = int(label_tokens.sum()), len(own)
    difference = (shuffled - own).sum() / tokens
    residuals = (shuffled - own) - difference * label_tokens
    return ShuffleTest(
        samples=samples,
        label_tokens=tokens,
        own=float(own.sum() / tokens),
        shuffled=float(shuffled.sum() / tokens),
        standard_error=float(np.sqrt((residuals**2).sum() * samples / (samples - 1)) / tokens),
    )


def validation_loss(session: Session, stopped: Callable[[], bool] = never) -> float | None:
    """Measure the loss per label token with own latents; None where nothing is held out or a rank was stopped."""
    numbers = session.split.validation
    losses = sample_losses(session, numbers, stopped) if len(numbers) else None
    return None if losses is None else float(losses.sum() / session.text.label_tokens(numbers))


@torch.no_grad()
def sample_losses(session: Session, latents_of: np.ndarray, stopped: Callable[[], bool] = never) -> np.ndarray | None:
    """Sum each validation sample's loss, in float64, with the latents of `latents_of`; ranks share the work.

    None where a rank was stopped.
    """
    numbers, world = session.split.validation, session.world
    # The last value counts the ranks that were stopped.
    sums = torch.zeros(len(numbers) + 1, dtype=torch.float64, device=world.device)
    parts = rank_parts(len(numbers), session.config.run.eval_batch_size, world)
    loads = prefetched(lambda part: session.loader.load(numbers[part], latents_of[part]), parts)
    with closing(loads) as batches:
        for part, batch in zip(parts, batches, strict=True):
            if stopped():
                sums[-1] = 1
                break
            on_device = batch.to(world.device)
            sums[part.start : part.stop].index_add_(0, on_device.sample_L, session.model(on_device).double())
    world.sum(sums)
    if sums[-1] > 0:
        return None
    losses = sums[:-1].cpu().numpy()
    refuse_nonfinite_losses(session, losses)
    return losses


def refuse_nonfinite_losses(session: Session, losses: np.ndarray) -> None:
    """Raise EncodeOnceError that names the validation samples whose loss is NaN or infinite."""
    faulty = session.split.validation[~np.isfinite(losses)]
    if not len(faulty):
        return
    raise EncodeOnceError(
        f"validation: the loss of {len(faulty):,} of {len(losses):,} held-out samples is not finite\n"
        f"  samples  {sample_names(session, faulty)}\n"
        f"  run `cache-store verify {shlex.quote(session.config.cache)} --level deep`; where it finds nothing, "
        "the projector has diverged: try a lower optim.lr"
    )


def sample_names(session: Session, numbers: np.ndarray) -> str:
    ids = session.cache.samples(numbers[:NAMED_SAMPLES], columns=["id"])["id"].to_pylist()
    return ", ".join(ids) + (f" and {len(numbers) - len(ids):,} more" if len(numbers) > len(ids) else "")


def rank_parts(count: int, batch_size: int, world: World) -> list[slice]:
    """Cut this rank's contiguous share of [0, count) into batches."""
    first, last = (count * rank // world.size for rank in (world.rank, world.rank + 1))
    return [slice(start, min(start + batch_size, last)) for start in range(first, last, batch_size)]
