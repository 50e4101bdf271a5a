"""One optimizer step: gradients of a global batch, over all ranks, and the update from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.data.batches import StepBatch
from trainer.model.model import phase
from trainer.run.figures import Metrics
from trainer.run.parallel import gradient_of
from trainer.run.session import Session

MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm"}
"""Figures of a step, with their names, that are finite unless the run has diverged."""


@dataclass(frozen=True)
class Update:
    """The result of one step."""

    metrics: Metrics
    stops: bool
    """Whether any rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(self.metrics[key]) for key in MUST_BE_FINITE if key in self.metrics)

    @property
    def is_harmless(self) -> bool:
        """Whether the projector is finite; it stayed as it was if loss or gradient is not."""
        return math.isfinite(self.metrics.get("param_norm", 0.0))

    @property
    def figures(self) -> str:
        named = {name: self.metrics[key] for key, name in MUST_BE_FINITE.items() if key in self.metrics}
        return ", ".join(f"{name} {value:g}" for name, value in named.items())


class Updater:
    """The trained parameters and their optimizer."""

    def __init__(self, session: Session, total_steps: int) -> None:
        self.model, self.world, self.config = session.model, session.world, session.config
        self.total_steps = total_steps
        self.groups = parameter_groups(self.model.trained_modules())
        self.parameters = [each for group in self.groups.values() for each in group]
        self.optimizer = make_optimizer(self.groups, self.config.optim)

    def __call__(self, batch: StepBatch, step: int, *, stop: bool = False) -> Update:
        """Do the update after `step` updates; the projector stays as it is if loss or gradient is not finite."""
        losses, stops = self.compute_gradients(batch, step, stop=stop)
        loss, norms = losses["loss"], self.clip()
        metrics: Metrics = {"step": step + 1, **losses, **norms}
        if not (math.isfinite(loss) and math.isfinite(norms["grad_norm"])):
            self.optimizer.zero_grad()
            return Update(metrics, stops)
        lr = learning_rate(self.config.optim, step, self.total_steps)
        with phase("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad()
        with phase("bookkeeping"):
            param_norm = torch.nn.utils.get_total_norm([parameter.detach() for parameter in self.parameters]).item()
        return Update({**metrics, "param_norm": param_norm, "lr": lr}, stops)

    def compute_gradients(self, batch: StepBatch, step: int, *, stop: bool = False) -> tuple[Metrics, bool]:
        """Sum the global batch's gradients over passes and ranks; return its loss per label token, and whether to stop.

        The loss of reconstruction, a mean over samples, is added when it is due. `stop` is summed in the same
        all-reduce: every rank learns whether one was asked to stop.
        """
        reconstruction = self.config.optim.reconstruction
        is_due = reconstruction.is_due(step)
        sums = torch.zeros(3, device=self.world.device)
        sums[0] = float(stop)
        for micro_batch in batch.micro_batches:
            with phase("host to device"):
                on_device = micro_batch.to(self.world.device)
            with phase("forward"):
                loss_L, reconstruction_N = self.model.losses(on_device, reconstructed=is_due)
                part = loss_L.sum() / batch.label_tokens
                sums[1] += part.detach()
                if reconstruction_N is not None:
                    reconstructed = reconstruction_N.sum() / len(batch.numbers)
                    sums[2] += reconstructed.detach()
                    part = part + reconstruction.weight * reconstructed
            with phase("backward"):
                part.backward()  # type: ignore[no-untyped-call]
        with phase("communication"):
            learning = [each for each in self.parameters if each.grad is not None]  # heads do not at every step
            sums = self.world.sum_gradients(learning, sums)
        with phase("bookkeeping"):  # the host waits for the device here
            stops, loss, reconstructed_loss = sums.tolist()
        return {"loss": loss} | ({"reconstruction_loss": reconstructed_loss} if is_due else {}), stops > 0

    def clip(self) -> Metrics:
        """Scale gradients down to `max_grad_norm`; return the norms before."""
        with phase("optimizer"):
            named = [(name, each) for name, group in self.groups.items() for each in group if each.grad is not None]
            squares = [each.double() ** 2 for each in torch._foreach_norm([gradient_of(each) for _, each in named])]
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm or math.inf)
        with phase("bookkeeping"):
            total, *each = torch.stack([norm.double(), *squares]).tolist()
        by_group = {name: 0.0 for name, _ in named}
        for (name, _), square in zip(named, each, strict=True):
            by_group[name] += square
        return {"grad_norm": total, **{f"grad_norm.{name}": square**0.5 for name, square in by_group.items()}}


# AdamW, whose learning rate is a pure function of the step.

MATRICES = "matrices"


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW on copies in the host's memory; its state is AdamW's own, so a run resumes with or without it.

    torchao's offloading takes gradients before ranks have summed and clipped them.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], **options: Any) -> None:
        self.trained = [each for group in groups for each in group["params"]]
        self.copies = [nn.Parameter(torch.empty_like(each, device="cpu")) for each in self.trained]
        copies = iter(self.copies)
        super().__init__([{**group, "params": [next(copies) for _ in group["params"]]} for group in groups], **options)
        self._copy_to_host()

    @torch.no_grad()
    def _copy_to_host(self) -> None:
        for trained, copy in zip(self.trained, self.copies, strict=True):
            copy.copy_(trained)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for trained, copy in zip(self.trained, self.copies, strict=True):
            copy.grad = None if trained.grad is None else trained.grad.to("cpu")
        super().step()
        for trained, copy in zip(self.trained, self.copies, strict=True):
            trained.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in (*self.trained, *self.copies):
            each.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._copy_to_host()


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the rate for the update after `step` updates: linear warm-up, then the schedule; never zero."""
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def parameter_groups(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[nn.Parameter]]:
    """Return each module's trained parameters in two groups: its matrices, and its biases with START and END."""
    groups = dict[str, list[nn.Parameter]]()
    for name, module in modules:
        trained = [(key, each) for key, each in module.named_parameters() if each.requires_grad]
        for kind, is_matrix in ((MATRICES, True), ("vectors", False)):
            if group := [each for key, each in trained if key.endswith("weight") == is_matrix]:
                groups[f"{name}.{kind}"] = group
    return groups


def make_optimizer(groups: Mapping[str, Sequence[nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """Make AdamW, with weight decay only on matrices; fused into one kernel on a GPU."""
    decayed = [
        {"params": [*group], "weight_decay": config.weight_decay if name.endswith(MATRICES) else 0.0}
        for name, group in groups.items()
    ]
    fused = next(iter(groups.values()))[0].is_cuda
    if config.offload:
        return OffloadedAdamW(decayed, lr=config.lr, fused=fused)
    return torch.optim.AdamW(decayed, lr=config.lr, fused=fused)
