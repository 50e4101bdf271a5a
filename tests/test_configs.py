"""Every config in the repository, and every command line in the comments of one, is what its program accepts."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import precompute.cli
import trainer.cli

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

WHOLE = ["trainer", "train", "--config", "configs/train_llava_cc3m.yaml"]
PROGRAMS = {"precompute": precompute.cli.PROGRAM, "trainer": trainer.cli.PROGRAM}


def parse(arguments: list[str]) -> Any:
    """The config that `PROGRAM COMMAND OPTIONS…` stands for."""
    program, *options = arguments
    return PROGRAMS[program].parse(options).config


def command_lines(config: Path) -> list[list[str]]:
    """Those in its comments: three spaces in, up to what is said of them further right; launchers left out."""
    comments = "\n".join(line for line in config.read_text().splitlines() if line.startswith("#"))
    joined = re.sub(r" \\\n#\s+", " ", comments)
    lines = re.findall(r"^#   (?:torchrun .* -m )?((?:precompute|trainer) .+?)(?:   .*)?$", joined, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def variant(config: str, word: str) -> Any:
    (line,) = [line for line in command_lines(ROOT / "configs" / config) if any(word in part for part in line)]
    return parse(line)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the comments' command lines are meant to be run."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_config_and_each_command_line_in_its_comments_parse(config: Path) -> None:
    program = ["trainer", "train"] if config.name.startswith("train_") else ["precompute", "build"]
    parse([*program, "--config", str(config)])
    lines = command_lines(config)
    assert lines
    for line in lines:
        assert f"configs/{config.name}" in line
        parse(line)


def test_a_training_config_reads_its_build_configs_cache() -> None:
    for build in (path for path in CONFIGS if not path.name.startswith("train_")):
        written = parse(["precompute", "build", "--config", str(build)]).cache
        assert parse(["trainer", "train", "--config", f"configs/train_{build.name}"]).cache == written


def test_the_512_variants_belong_together() -> None:
    build, train = variant("llava_cc3m.yaml", "cache-512"), variant("train_llava_cc3m.yaml", "cache-512")
    assert (build.image.height, build.image.width) == (512, 512)
    assert train.cache == build.cache
    assert train.run.output != parse(WHOLE).run.output
    assert train.run.gradient_checkpointing


def test_the_global_batch_divides_as_the_comments_say() -> None:
    variant("train_llava_cc3m.yaml", "--data.accumulate=2").data.refuse_undivided(world_size=8)
    for config in (variant("train_llava_cc3m.yaml", "cache-512"), parse(WHOLE)):
        config.data.refuse_undivided(world_size=1)
