"""Small training runs: their configs, their losses, and runs in processes of their own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from trainer.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainer.parallel import World

ROOT = Path(__file__).parents[2]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def make_config(cache: Path, language_model: Path, output: Path, **changes: Any) -> TrainConfig:
    """Twelve steps of 8 of about 30 samples; `changes` go to whichever section has the field."""
    sections = {
        "model": ModelConfig(language_model=str(language_model)),
        "data": DataConfig(max_text_tokens=64, val_fraction=0.2, text_dir=str(output.parent / "text")),
        "optim": OptimConfig(lr=1e-3),
        "run": RunConfig(output=str(output), epochs=3, precision="fp32", save_every=5, eval_every=5),
    }
    for name, section in sections.items():
        mine = {field.name for field in fields(section)} & set(changes)
        sections[name] = replace(section, **{key: changes.pop(key) for key in mine})
    assert not changes
    return TrainConfig(cache=str(cache), **sections)


def command(config: TrainConfig, name: str = "train") -> list[str]:
    options = [f"--cache={config.cache}"]
    for section in ("model", "data", "optim", "run"):
        for key, value in vars(getattr(config, section)).items():
            options.append(f"--{section}.{key}={json.dumps(value) if not isinstance(value, str) else value}")
    return [name, *options]


def metrics(output: Path, key: str = "loss") -> dict[int, Any]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line[key] for line in lines if key in line}


def start_process(config: TrainConfig, environment: Mapping[str, str] = {}) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *command(config)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_ranks(config: TrainConfig, size: int) -> "list[subprocess.Popen[str]]":
    """What torchrun does: one process a rank, told by environment variables where to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [start_process(config, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]
