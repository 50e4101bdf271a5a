"""The demo's options, and the options that it passes to the programs."""

from dataclasses import dataclass
from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.messages import flatten
from cache_store.program.command_line import parse_config
from cache_store.program.config_file import load_yaml
from precompute.config import BuildConfig
from trainer.config import TrainConfig

BUILD_YAML, TRAIN_YAML = "configs/demo.yaml", "configs/train_demo.yaml"
OUTPUT = "demo-run"
"""The folder that both YAML files name."""

FEWEST_SCENES = 100
"""Fewest scenes: with fewer, the broken files would be too many rejects, and hardly a scene would be held out."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Run all steps in a few minutes on a CPU: draw scenes, make small models, build, verify, look, train, evaluate."""

    output: str = OUTPUT
    """Folder for everything; a previous demo's folder is replaced, any other is left alone."""
    scenes: int = 3_000
    """Scenes to draw, beside some files that are broken or unusual on purpose."""
    text_steps: int = 300
    """Steps in which the small language model learns from text alone."""
    train_steps: int | None = None
    """Steps in which the projector learns, in place of those in configs/train_demo.yaml."""
    seed: int = 0
    """Seed of the scenes and of the models' random weights."""

    def __post_init__(self) -> None:
        for name, least in (("scenes", FEWEST_SCENES), ("text_steps", 1), ("train_steps", 1), ("seed", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for file in (BUILD_YAML, TRAIN_YAML):
            if not Path(file).is_file():
                raise ConfigError(f"{file} is not here; run the demo from the repository's root, as `make demo` does")

    @property
    def root(self) -> Path:
        return Path(self.output)

    @property
    def build_options(self) -> list[str]:
        """Options of `precompute build`: the YAML file, and what differs from it."""
        return self._options(BUILD_YAML)

    @property
    def train_options(self) -> list[str]:
        shorter = [f"--run.max_steps={self.train_steps}", "--optim.warmup_steps=null"]
        return [*self._options(TRAIN_YAML), *(shorter if self.train_steps is not None else [])]

    def _options(self, file: str) -> list[str]:
        """Return the options for a YAML file, with its paths moved if the output folder is another one."""
        given = flatten(load_yaml(Path(file).read_text(encoding="utf-8")))
        paths = {name: Path(value) for name, value in given if str(value).startswith(f"{OUTPUT}/")}
        moved = [f"--{name}={self.root / path.relative_to(OUTPUT)}" for name, path in paths.items()]
        return ["--config", file, *(moved if self.root != Path(OUTPUT) else [])]

    def build_config(self) -> BuildConfig:
        return parse_config(BuildConfig, self.build_options)

    def train_config(self) -> TrainConfig:
        return parse_config(TrainConfig, self.train_options)
