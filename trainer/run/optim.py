"""AdamW for the projectors, with a learning rate that is a pure function of the step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config import OptimConfig

MATRICES = "matrices"


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW on copies in the host's memory, which holds the moments and computes each update.

    Its state is AdamW's own, so a run resumes with or without it. torchao's offloading takes each gradient in the
    backward pass, before ranks have summed it and before it is clipped, and needs a GPU.
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
    """Return the rate for the update after `step` updates: linear warm-up, then the schedule; never zero.

    A run that is extended continues at the rate that the longer run has at this step.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def parameter_groups(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[nn.Parameter]]:
    """Return two groups of each module's trained parameters, by name: its matrices, and its biases with START and END.

    Everything that a run trains, clips, counts and saves is in them, in this order.
    """
    groups = dict[str, list[nn.Parameter]]()
    for name, module in modules:
        trained = [(key, each) for key, each in module.named_parameters() if each.requires_grad]
        for kind, is_matrix in ((MATRICES, True), ("vectors", False)):
            if group := [each for key, each in trained if key.endswith("weight") == is_matrix]:
                groups[f"{name}.{kind}"] = group
    return groups


def make_optimizer(groups: Mapping[str, Sequence[nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """Make AdamW for all trained parameters, with weight decay only on matrices; fused into one kernel on a GPU."""
    decayed = [
        {"params": [*group], "weight_decay": config.weight_decay if name.endswith(MATRICES) else 0.0}
        for name, group in groups.items()
    ]
    fused = next(iter(groups.values()))[0].is_cuda
    if config.offload:
        return OffloadedAdamW(decayed, lr=config.lr, fused=fused)
    return torch.optim.AdamW(decayed, lr=config.lr, fused=fused)
