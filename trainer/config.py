"""The config of a training run, without torch, so that `--help` and config errors are quick."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache_store.errors import ConfigError
from cache_store.storage.kept_blocks import LEAST_BYTES
from cache_store.storage.store import is_url, local_path
from trainer.model.model_config import WORLD, ModelConfig, refuse_other_towers, refuse_tower_names

# Values beyond these are typing errors: nothing trains with them, or memory or int64 overflows.
MAX_BATCH_SIZE, MAX_SHUFFLE_BLOCK, MAX_LR, MAX_STEPS = 1_000_000, 65_536, 1_000, 10**9
MAX_EPOCHS, MAX_TOKENS, MAX_CAPTIONS, MAX_SEED, LEAST = 10**6, 2**20, 256, 2**63 - 1, 1e-12

TEXT = "text"
"""Folder in run.output for tokenised text, if the cache is at a URL."""

WARMUP_STEPS = 100
"""Default warm-up; a run of fewer than ten times as many steps warms up for a tenth of them."""


def refuse_outside(section: str, config: object, **ranges: tuple[float, float]) -> None:
    """Raise ConfigError for a field that is outside its range, both ends included; None is in every range."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{section}{name} must be in [{low:,}, {high:,}], got {str(value)[:40]}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training samples: which ones, in which order, in batches of which size."""

    batch_size: int = 8
    """Samples per optimizer step, over all ranks and accumulation steps."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step on each rank."""
    max_text_tokens: int = 512
    """Most tokens of a text; longer texts are cut. World tokens are not counted."""
    val_fraction: float = 0.01
    """Share of samples held out, by a hash of the id; 1 holds out all, to evaluate on another cache."""
    where: str | None = None
    """Which samples are trained on and held out, by their columns: `score > 5 and split == "train"`, with and, or, not,
    in [...], is null and parentheses; null: all."""
    seed: int = 0
    """Seed of the order of samples and of the projector's initial weights."""
    shuffle_block: int = 1
    """Neighbouring samples that are read at once and shuffled as a block, for object stores and slow disks; 1: single
    samples. 32 sends 30 times fewer requests to a URL. Three windows of at least 128 blocks are held in memory, divided
    among the ranks."""
    posterior: Literal["sample", "mean"] | None = None
    """How training reads a cache of posterior moments: `sample` draws a new latent each time, `mean` takes the mean;
    null: `sample` if the cache has moments. Validation, captions and generation read the mean."""
    views: list[str | dict[str, str]] | None = field(default=None, metadata={"option": "--data.views [CACHE,…]"})
    """In place of `cache`: caches of one plan that show the same images flipped or cropped differently. Training shows
    each sample's views in turn, validation the first. With several towers, each view is a mapping such as `caches`."""
    text_dir: str | None = None
    """Folder for tokenised text; default: CACHE.text beside the cache, or for a cache at a URL `text` in run.output."""
    cache_dir: str | None = None
    """Folder on this machine that keeps what was read from caches at URLs; processes share it."""
    cache_bytes: int = 100 * 10**9
    """Most bytes that `cache_dir` holds; the least recently used blocks are deleted first."""

    def __post_init__(self) -> None:
        refuse_outside("data.", self, cache_bytes=(LEAST_BYTES, MAX_SEED), batch_size=(1, MAX_BATCH_SIZE))
        refuse_outside("data.", self, accumulate=(1, self.batch_size), max_text_tokens=(2, MAX_TOKENS))
        refuse_outside("data.", self, val_fraction=(0, 1), shuffle_block=(1, MAX_SHUFFLE_BLOCK), seed=(0, MAX_SEED))
        if self.views is not None and len(self.views) < 2:
            raise ConfigError(f"data.views must be null, or two caches or more, got {str(self.views)[:40]}")
        for name in ("text_dir", "cache_dir"):
            local_path(f"data.{name}", getattr(self, name) or "")

    def refuse_undivided(self, world_size: int) -> None:
        parts = world_size * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"data.batch_size {self.batch_size} is the global batch and must divide by world size × "
                f"data.accumulate = {world_size} × {self.accumulate} = {parts}"
            )


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig:
    """An auxiliary loss: the language model's last hidden states at world tokens predict the latent."""

    weight: float = 0.0
    """Weight of the loss of a linear head that predicts the standardised latent, beside the text's loss; 0: no head."""
    every: int = 4
    """Steps from one computation of this loss to the next; steps between leave it out."""
    kind: Literal["cosine", "mse"] = "cosine"
    """cosine: one minus the cosine between prediction and latent; mse: their mean square difference."""

    def __post_init__(self) -> None:
        refuse_outside("optim.reconstruction.", self, weight=(0, MAX_LR), every=(1, MAX_STEPS))

    def is_due(self, step: int) -> bool:
        return self.weight > 0 and (step + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning rate, and an auxiliary loss."""

    lr: float = 1e-4
    """Learning rate at its peak."""
    weight_decay: float = 0.01
    """Weight decay of the projector's matrices; biases, START and END have none."""
    warmup_steps: int | None = None
    """Steps of linear warm-up, fewer than the run's; null: 100, or a tenth of the run if that is less."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After warm-up the learning rate falls towards zero at the last step along a cosine, or stays constant."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; null: never."""
    offload: bool = False
    """Keep AdamW's moments and copies of the trained parameters in the host's memory, and compute the update there; of
    use only on a GPU."""
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)

    def __post_init__(self) -> None:
        refuse_outside("optim.", self, lr=(LEAST, MAX_LR), weight_decay=(0, MAX_LR), warmup_steps=(0, MAX_STEPS))
        refuse_outside("optim.", self, max_grad_norm=(LEAST, 1 / LEAST))

    def warmup(self, total_steps: int) -> int:
        return min(WARMUP_STEPS, total_steps // 10) if self.warmup_steps is None else self.warmup_steps

    def refuse_endless_warmup(self, total_steps: int) -> None:
        if self.warmup_steps is not None and self.warmup_steps >= total_steps:
            raise ConfigError(
                f"optim.warmup_steps {self.warmup_steps:,} must be less than the run's steps, {total_steps:,}; "
                f"set it lower, or to null, which is {min(WARMUP_STEPS, total_steps // 10):,} here"
            )


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig:
    """How long a run trains, in what precision, and what it saves and reports."""

    output: str
    """Folder of checkpoints, logs, the resolved config and the trained projector; a rerun resumes from the newest
    checkpoint in it."""
    epochs: float = 1.0
    """Passes over the training samples; a fraction is fine."""
    max_steps: int | None = None
    """Optimizer steps in place of `epochs`."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the language model's weights and of the projector's products; its master weights are float32."""
    compile: Literal["none", "layers", "whole"] = "none"
    """Compile the language model with torch.compile, each layer by itself or all at once. `layers` pads texts to a few
    lengths, so that nothing is compiled again."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Kernel of the language model's attention in training and validation; auto: the fastest that can run. A kernel
    that cannot run at the run's length is refused. A CPU has flash and math; math holds all weights in memory."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute layers in the backward pass: selective recomputes norms, activations, gates and small products, full
    all of a layer. Selective keeps less than half of a layer's memory, full a twentieth."""
    loss_chunk: int | None = None
    """Label tokens whose logits are made at once; null: all of a pass. 512 tokens with a vocabulary of 262 k take
    1.6 GB."""
    fit_memory: bool = False
    """In place of `data.accumulate`, take as few passes a step as fit into memory, tried before the first step on the
    longest texts."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """After a step whose loss or gradient is not finite, stop, or skip its update and go on; ten such steps in a row
    stop the run too."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """Under torchrun every rank holds the whole language model (ddp), or a part of each of its weights, gathered layer
    by layer (fsdp2)."""
    save_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 3
    """Checkpoints kept."""
    eval_every: int = 500
    """Steps between validations; the last step always has one."""
    eval_batch_size: int = 8
    """Samples per forward pass on each rank in validation."""
    sample_captions: int = 4
    """Held-out samples, always the same, that are captioned at each validation; 0: none."""
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    """Trackers that get figures and captions, besides metrics.jsonl; []: none. wandb reads TensorBoard's event files,
    so both are written for it."""

    def __post_init__(self) -> None:
        steps = dict.fromkeys(("save_every", "keep_last", "eval_every", "max_steps"), (1, MAX_STEPS))
        refuse_outside("run.", self, epochs=(LEAST, MAX_EPOCHS), sample_captions=(0, MAX_CAPTIONS), **steps)
        refuse_outside("run.", self, eval_batch_size=(1, MAX_BATCH_SIZE), loss_chunk=(1, MAX_STEPS))
        if self.parallel == "fsdp2" and self.fit_memory:
            raise ConfigError("run.fit_memory must be false with run.parallel: fsdp2; set data.accumulate")
        if self.parallel == "fsdp2" and self.compile == "whole":
            raise ConfigError("run.compile must be none or layers with run.parallel: fsdp2, got whole")
        self.folder  # noqa: B018 (a URL is an error here)

    @property
    def folder(self) -> Path:
        return local_path("run.output", self.output)

    def total_steps(self, samples: int, batch_size: int) -> int:
        return self.max_steps or math.ceil(self.epochs * samples / batch_size)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    cache: str | None = None
    """The sealed cache to train from."""
    caches: dict[str, str] | None = None
    """In place of `cache`: caches of one plan by their tower's name, in the order in which the language model reads
    them: {world: FOLDER, siglip: FOLDER}."""
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: TrainRunConfig

    def __post_init__(self) -> None:
        if [self.cache, self.caches, self.data.views].count(None) != 2:
            raise ConfigError(
                "set exactly one of cache: FOLDER, caches: {world: FOLDER, …} and "
                "data.views: [FOLDER, FOLDER]; leave the others out, or set them to null"
            )
        for view in self.views:
            refuse_tower_names(view)
        refuse_other_towers(self.views)
        self.model.refuse_unfit(self.towers)

    @property
    def views(self) -> list[dict[str, str]]:
        return views_of(self.cache, self.caches, self.data.views)

    @property
    def towers(self) -> dict[str, str]:
        return self.views[0]

    @property
    def all_caches(self) -> list[str]:
        return [cache for view in self.views for cache in view.values()]

    @property
    def text_dir(self) -> str | None:
        """`data.text_dir`, else `text` in run.output if the first cache is at a URL; None: beside that cache."""
        if self.data.text_dir is None and is_url(self.all_caches[0]):
            return str(self.run.folder / TEXT)
        return self.data.text_dir


def views_of(
    cache: str | None, caches: Mapping[str, str] | None, views: Sequence[str | Mapping[str, str]] | None
) -> list[dict[str, str]]:
    return [{WORLD: each} if isinstance(each, str) else dict(each) for each in views or [cache or caches or {}]]


def caches_by_option(views: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    named = [view[WORLD] if [*view] == [WORLD] else view for view in views]
    if len(named) > 1:
        return {"data.views": {str(place): each for place, each in enumerate(named, 1)}}
    return {"cache" if isinstance(named[0], str) else "caches": named[0]}


def views_of_run(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return each view's caches from a run's resolved config, which an older version may have written."""
    return views_of(config.get("cache"), config.get("caches"), config.get("data", {}).get("views"))
