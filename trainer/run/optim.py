"""AdamW over the projectors, with a learning rate that is a pure function of the step."""

import math

import torch
from torch import nn

from trainer.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the rate for the update with `step` updates before it: linear warm-up, then the schedule; never zero.

    A run that is extended continues at the rate that the longer run has at this step.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(projectors: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Make AdamW for all that is trained, with weight decay on matrices alone; fused into one kernel on a GPU."""
    trained = {name: each for name, each in projectors.named_parameters() if each.requires_grad}
    matrices = [each for name, each in trained.items() if name.endswith("weight")]
    others = [each for name, each in trained.items() if not name.endswith("weight")]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, fused=matrices[0].is_cuda)
