"""One optimizer step: gradients of a global batch, over all ranks, and what is made of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.batches import StepBatch
from trainer.model.phases import phase
from trainer.run.observers import Metrics
from trainer.run.optim import learning_rate, make_optimizer
from trainer.run.session import Session

MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm"}
"""Figures of a step, and their names, without which a run has diverged."""


@dataclass(frozen=True)
class Update:
    """What came of one."""

    metrics: Metrics
    stops: bool
    """Whether any rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(self.metrics[key]) for key in MUST_BE_FINITE if key in self.metrics)

    @property
    def is_harmless(self) -> bool:
        """Whether the projector is finite: it stays as it was where the loss or its gradient is not."""
        return math.isfinite(self.metrics.get("param_norm", 0.0))

    @property
    def figures(self) -> str:
        named = {name: self.metrics[key] for key, name in MUST_BE_FINITE.items() if key in self.metrics}
        return ", ".join(f"{name} {value:g}" for name, value in named.items())


class Updater:
    """The parameters that learn, and their optimizer."""

    def __init__(self, session: Session, total_steps: int) -> None:
        self.model, self.world, self.config = session.model, session.world, session.config
        self.total_steps = total_steps
        self.named = {name: each for name, each in self.model.projectors.named_parameters() if each.requires_grad}
        self.parameters = list(self.named.values())
        self.groups = dict(parameter_groups(session))
        self.optimizer = make_optimizer(self.model.projectors, self.config.optim)

    def __call__(self, batch: StepBatch, step: int, *, stop: bool = False) -> Update:
        """Do the update with `step` updates before it; the projector stays as it is where the loss is not finite."""
        loss, stops = self.compute_gradients(batch, stop=stop)
        norms = self.clip()
        metrics: Metrics = {"step": step + 1, "loss": loss, **norms}
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

    def compute_gradients(self, batch: StepBatch, *, stop: bool = False) -> tuple[float, bool]:
        """Sum the global batch's gradients over its passes and ranks; return its loss per label token.

        It is the same whatever share each rank has. Here ranks also learn whether one of them was asked to stop.
        """
        loss = torch.zeros((), device=self.world.device)
        for micro_batch in batch.micro_batches:
            with phase("host to device"):
                on_device = micro_batch.to(self.world.device)
            with phase("forward"):
                part = self.model(on_device).sum() / batch.label_tokens
            with phase("backward"):
                part.backward()
            loss += part.detach()
        with phase("communication"):
            flag = torch.tensor(float(stop), device=self.world.device)
            sums = self.world.sum_gradients(self.parameters, torch.stack([loss, flag]))
        with phase("bookkeeping"):  # where the host waits for the device
            total_loss, stops = sums.tolist()
        return total_loss, stops > 0

    def clip(self) -> Metrics:
        """Scale gradients down to `max_grad_norm`; return their norms before, of all and of each group."""
        with phase("optimizer"):
            names = [name for name, group in self.groups.items() for _ in group]
            parameters = [each for group in self.groups.values() for each in group]
            squares = [each.double() ** 2 for each in torch._foreach_norm([grad_of(each) for each in parameters])]
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm or math.inf)
        with phase("bookkeeping"):
            total, *each = torch.stack([norm.double(), *squares]).tolist()
        by_group = dict.fromkeys(names, 0.0)
        for name, square in zip(names, each, strict=True):
            by_group[name] += square
        return {"grad_norm": total, **{f"grad_norm.{name}": square**0.5 for name, square in by_group.items()}}


def grad_of(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the projector takes part in every forward pass"
    return parameter.grad


def parameter_groups(session: Session) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """Parameter groups of each trained tower: its matrices, and its biases with START and END."""
    for name, tower in session.model.projectors.items():
        trained = [(key, each) for key, each in tower.named_parameters() if each.requires_grad]
        kinds = {"matrices": True, "vectors": False}
        for kind, is_matrix in kinds.items():
            if group := [each for key, each in trained if key.endswith("weight") == is_matrix]:
                yield f"{name}.{kind}", group
