"""The config of a training run: frozen dataclasses, filled from YAML and options, checked once.

They stand here and in `model/config.py`, without torch, so that `--help` and a config error take no time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache_store.errors import ConfigError
from cache_store.storage.kept import LEAST_BYTES
from cache_store.storage.store import is_url, local_path
from trainer.model.config import WORLD, ModelConfig, refuse_other_towers, refuse_tower_names

MAX_BATCH_SIZE = 1_000_000
"""A larger one is a typing error, refused before memory runs out."""

MAX_SHUFFLE_BLOCK = 65_536
"""128 such blocks are 8 million samples, which are held in memory."""

MAX_GROUPS = 1_024
"""A window of so many batches is drawn anew for each batch."""

MAX_LR = 1e3
"""Far above any that trains, far below those that overflow float32; the weight decay's limit too."""

MAX_STEPS = 10**9
"""Steps times samples per step stay far below 2^63; a second a step, they take thirty years."""

MAX_EPOCHS = 10**6

MAX_TOKENS = 2**20
"""Longest text in tokens: longer than any model reads."""

TEXT = "text"
"""Folder of a run."""

MAX_CAPTIONS = 256
"""Nobody reads more at each validation."""

WARMUP_STEPS = 100
"""The default; a run of fewer than ten times as many warms up for a tenth of its steps."""


def require(condition: bool, key: str, expected: str, found: object) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {str(found)[:40]}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples, in which order, in batches of what size."""

    batch_size: int = 8
    """Samples per optimizer step, over all ranks and accumulation steps."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step on each rank."""
    max_text_tokens: int = 512
    """Longer texts are cut; world tokens are not counted."""
    val_fraction: float = 0.01
    """Share of samples held out, by hash of the sample id; 1 holds out all, to evaluate on another cache."""
    seed: int = 0
    """Seed of the order of samples and of the projector's initial weights."""
    shuffle_block: int = 1
    """Neighbours in the cache that are read as one, of a shuffle in blocks, for caches far away; 1: none, each sample
    may come from anywhere. With 32, a URL is asked 30 times less often. Ranks share in holding three windows of 128
    blocks, or of as many as the batch has samples, in memory."""
    group_lengths: int = 1
    """Batches that are drawn together and cut by the length of their texts, so that little of a pass is padding; 1:
    each is drawn alone. The order is then another one, and as exact."""
    posterior: Literal["sample", "mean"] | None = None
    """Of caches of posterior moments, what training shows: `sample` draws a latent anew each time; null: sample where
    there are moments. Validation, captions and generation read the mean."""
    views: list[str | dict[str, str]] | None = field(default=None, metadata={"option": "--data.views [CACHE,…]"})
    """In place of `cache`, caches of one plan that show the same images flipped or cropped otherwise; each sample shows
    them in turn, and validation the first. Of several towers, a mapping for each view, as `caches` is one."""
    text_dir: str | None = None
    """Where tokenised text is kept; default: CACHE.text beside the cache, or, of one at a URL, `text` in run.output."""
    cache_dir: str | None = None
    """Folder of this machine that keeps what was read of caches at URLs; its processes share it."""
    cache_bytes: int = 100 * 10**9
    """Most that `cache_dir` holds; what was used the longest ago is deleted first."""

    def __post_init__(self) -> None:
        size = self.batch_size
        require(self.cache_bytes >= LEAST_BYTES, "data.cache_bytes", f"at least {LEAST_BYTES:,}", self.cache_bytes)
        require(1 <= size <= MAX_BATCH_SIZE, "data.batch_size", f"in [1, {MAX_BATCH_SIZE:,}]", size)
        require(1 <= self.accumulate <= size, "data.accumulate", f"in [1, data.batch_size {size:,}]", self.accumulate)
        tokens = self.max_text_tokens
        require(2 <= tokens <= MAX_TOKENS, "data.max_text_tokens", f"in [2, {MAX_TOKENS:,}]", tokens)
        require(0 <= self.val_fraction <= 1, "data.val_fraction", "in [0, 1]", self.val_fraction)
        block = self.shuffle_block
        require(1 <= block <= MAX_SHUFFLE_BLOCK, "data.shuffle_block", f"in [1, {MAX_SHUFFLE_BLOCK:,}]", block)
        groups = self.group_lengths
        require(1 <= groups <= MAX_GROUPS, "data.group_lengths", f"in [1, {MAX_GROUPS:,}]", groups)
        require(groups == 1 or block == 1, "data.group_lengths", "1 with a data.shuffle_block", groups)
        require(0 <= self.seed < 2**63, "data.seed", "in [0, 2^63)", self.seed)
        require(self.views is None or len(self.views) > 1, "data.views", "null, or two caches or more", self.views)
        for name in ("text_dir", "cache_dir"):
            local_path(f"data.{name}", getattr(self, name) or "")

    def refuse_undivided(self, world_size: int) -> None:
        """Raise ConfigError where the global batch does not divide among the forward passes of all ranks."""
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
    """Weight of a linear head's loss on the standardised latent, added to the loss of the text; 0: no head, no loss."""
    every: int = 4
    """Steps from one computation of it to the next; at steps between it is left out."""
    kind: Literal["cosine", "mse"] = "cosine"
    """One less the cosine between prediction and latent, or their mean square difference."""

    def __post_init__(self) -> None:
        weight, every = self.weight, self.every
        require(0 <= weight <= MAX_LR, "optim.reconstruction.weight", f"in [0, {MAX_LR:g}]", weight)
        require(1 <= every <= MAX_STEPS, "optim.reconstruction.every", f"in [1, {MAX_STEPS:,}]", every)

    def is_due(self, step: int) -> bool:
        """Tell whether the update with `step` updates before it computes the loss."""
        return self.weight > 0 and (step + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning rate, and what is learned beside the text."""

    lr: float = 1e-4
    """Learning rate at its peak."""
    weight_decay: float = 0.01
    """On the projector's matrices; biases and the two learned vectors have none."""
    warmup_steps: int | None = None
    """Steps of linear warm-up, fewer than the run has; null: 100, or a tenth of the run where that is less."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After warm-up: down to zero at the last step along a cosine, or constant."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; null: never."""
    offload: bool = False
    """AdamW's moments and float32 copies of what learns lie in the host's memory, where the update is computed; of use
    on a GPU alone."""
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)

    def __post_init__(self) -> None:
        require(0 < self.lr <= MAX_LR, "optim.lr", f"above 0 and at most {MAX_LR:g}", self.lr)
        decay = self.weight_decay
        require(0 <= decay <= MAX_LR, "optim.weight_decay", f"in [0, {MAX_LR:g}]", decay)
        steps = self.warmup_steps
        require(steps is None or steps >= 0, "optim.warmup_steps", "at least 0 or null", steps)
        norm = self.max_grad_norm
        require(norm is None or 0 < norm < math.inf, "optim.max_grad_norm", "above 0 and finite, or null", norm)

    def warmup(self, total_steps: int) -> int:
        """Return the steps of warm-up in a run of `total_steps`."""
        return min(WARMUP_STEPS, total_steps // 10) if self.warmup_steps is None else self.warmup_steps

    def refuse_endless_warmup(self, total_steps: int) -> None:
        """Raise ConfigError where the peak learning rate would never be reached."""
        if self.warmup_steps is not None and self.warmup_steps >= total_steps:
            raise ConfigError(
                f"optim.warmup_steps {self.warmup_steps:,} must be less than the run's steps, {total_steps:,}; "
                f"set it lower, or to null, which is {min(WARMUP_STEPS, total_steps // 10):,} here"
            )


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig:
    """How long, in what precision, and what is kept."""

    output: str
    """Folder of checkpoints, logs, report.html, the resolved config and the trained projector."""
    epochs: float = 1.0
    """Passes over the training samples; a fraction is fine."""
    max_steps: int | None = None
    """Optimizer steps in place of `epochs`."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the language model's weights and of the projector's matrix products; its master weights are float32."""
    compile: Literal["none", "layers", "whole"] = "none"
    """Compile the language model with torch.compile, each layer by itself or all at once; of layers, texts are padded
    to a few lengths, so that nothing is compiled again."""
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Kernel of the language model's attention in training and validation; auto: torch takes the fastest that can. One
    that cannot run at the run's length is refused. A CPU has flash and math; math holds all weights in memory."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: of each layer norms, activations, gates and small products, or all of it.
    Selective keeps less than half of a layer's memory, full a twentieth, for a fifth to a third more time."""
    loss_chunk: int | None = None
    """Label tokens whose logits are made at once; null: all of a pass. 512 of a vocabulary of 262 k take 1.6 GB."""
    fit_memory: bool = False
    """In place of `data.accumulate`, as few passes a step as fit into memory; tried before the first step, on the
    longest texts. A run that goes on with another number of passes is the same to rounding."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a step whose loss or gradient is not finite: the run stops, or leaves the projector as it was and
    goes on; after ten such steps in a row it stops too."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """Under torchrun every rank holds the model (ddp), or a part of each of the language model's weights, which are
    gathered layer by layer (fsdp2); the projector's gradients are summed. Without torchrun one process trains."""
    save_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 3
    """Checkpoints kept."""
    eval_every: int = 500
    """Steps between validations; the last step always has one."""
    eval_batch_size: int = 8
    """Samples per forward pass on each rank in validation."""
    sample_captions: int = 4
    """Held-out samples, always the same, whose captions are generated with each validation; 0: none."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] | None = None
    """Where figures and captions go besides metrics.jsonl and report.html; null: to tensorboard; [] goes nowhere."""
    resume: str = "auto"
    """`auto`: from the newest checkpoint in `output`, if any; `never`; or the folder of a checkpoint."""

    def __post_init__(self) -> None:
        require(0 < self.epochs <= MAX_EPOCHS, "run.epochs", f"above 0 and at most {MAX_EPOCHS:,}", self.epochs)
        for name in ("save_every", "keep_last", "eval_every"):
            require(getattr(self, name) >= 1, f"run.{name}", "at least 1", getattr(self, name))
        captions = self.sample_captions
        require(0 <= captions <= MAX_CAPTIONS, "run.sample_captions", f"in [0, {MAX_CAPTIONS}]", captions)
        size, steps = self.eval_batch_size, self.max_steps
        require(1 <= size <= MAX_BATCH_SIZE, "run.eval_batch_size", f"in [1, {MAX_BATCH_SIZE:,}]", size)
        require(steps is None or 1 <= steps <= MAX_STEPS, "run.max_steps", f"in [1, {MAX_STEPS:,}] or null", steps)
        require(
            self.loss_chunk is None or self.loss_chunk >= 1, "run.loss_chunk", "at least 1 or null", self.loss_chunk
        )
        if self.parallel == "fsdp2":
            alone = "false with run.parallel: fsdp2, where no rank can try a pass alone; set data.accumulate"
            require(not self.fit_memory, "run.fit_memory", alone, self.fit_memory)
            require(self.compile != "whole", "run.compile", "none or layers with run.parallel: fsdp2", self.compile)
        self.folder  # noqa: B018 (a URL is an error here)

    @property
    def folder(self) -> Path:
        """`output` as a path, with `~` replaced by the user's home."""
        return local_path("run.output", self.output)

    @property
    def trackers(self) -> list[str]:
        return ["tensorboard"] if self.report_to is None else [*dict.fromkeys(self.report_to)]

    def total_steps(self, samples: int, batch_size: int) -> int:
        return self.max_steps or math.ceil(self.epochs * samples / batch_size)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    cache: str | None = field(default=None, metadata={"alternatives": ("caches", "data.views")})
    """The sealed cache to train from."""
    caches: dict[str, str] | None = None
    """In place of `cache`, several of one plan, by the name of their tower, in the order in which the language model
    reads them: {world: FOLDER, siglip: FOLDER}."""
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: TrainRunConfig

    def __post_init__(self) -> None:
        if [self.cache, self.caches, self.data.views].count(None) != 2:
            raise ConfigError(
                "name what to train from by one of cache: FOLDER, caches: {world: FOLDER, …} and "
                "data.views: [FOLDER, FOLDER]; leave the others out, or set them to null"
            )
        for view in self.views:
            refuse_tower_names(view)
        refuse_other_towers(self.views)
        self.model.refuse_unfit(self.towers)

    @property
    def views(self) -> list[dict[str, str]]:
        """Each view's caches, by the tower's name; one view where `data.views` names none."""
        return views_of(self.cache, self.caches, self.data.views)

    @property
    def towers(self) -> dict[str, str]:
        """Each tower's cache, by the tower's name; of several views the first's."""
        return self.views[0]

    @property
    def all_caches(self) -> list[str]:
        return [cache for view in self.views for cache in view.values()]

    @property
    def text_dir(self) -> str | None:
        """`data.text_dir`, or the run's own where nothing lies beside the first cache; None: beside that."""
        if self.data.text_dir is None and is_url(self.all_caches[0]):
            return str(self.run.folder / TEXT)
        return self.data.text_dir


def views_of(
    cache: str | None, caches: Mapping[str, str] | None, views: Sequence[str | Mapping[str, str]] | None
) -> list[dict[str, str]]:
    """Each view's caches, of a config; none where it names none."""
    return [{WORLD: each} if isinstance(each, str) else dict(each) for each in views or [cache or caches or {}]]


def caches_by_option(views: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Views' caches as the fields of a config name them."""
    named = [view[WORLD] if [*view] == [WORLD] else view for view in views]
    if len(named) > 1:
        return {"data.views": {str(place): each for place, each in enumerate(named, 1)}}
    return {"cache" if isinstance(named[0], str) else "caches": named[0]}


def views_of_run(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each view's caches, of a run's resolved config, which may be an older version's."""
    return views_of(config.get("cache"), config.get("caches"), config.get("data", {}).get("views"))
