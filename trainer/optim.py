"""AdamW over the projector, with a learning rate that is a pure function of the step."""

import math

import torch

from trainer.config import OptimConfig
from trainer.projector import Projector


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """For the update with `step` updates before it: linear warm-up, then the schedule; zero is never reached."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(projector: Projector, config: OptimConfig) -> torch.optim.AdamW:
    """Weight decay on the matrices alone; one fused kernel where there is a GPU."""
    matrices = [layer for name, layer in projector.named_parameters() if name.endswith("weight")]
    others = [layer for name, layer in projector.named_parameters() if not name.endswith("weight")]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, fused=matrices[0].is_cuda)
