"""Two caches of one source, the models that made them, and a run trained from both."""

from pathlib import Path

import pytest

from precompute.cli import main
from tests.precompute.conftest import GOOD, image_bytes, make_vae, run_build, sample_name, write_source
from tests.trainer.conftest import MakeConfig
from tests.trainer.multimodal import save_gemma
from tests.trainer.runs import Caches, train_alone
from trainer.config import TrainConfig
from trainer.model.model_config import TowerConfig


def build_tower(home: Path, name: str, model: Path, *options: str) -> str:
    """Build a cache of the plan of `world/cache`."""
    source = [f"--cache={home / name}", "--source.kind=cache", f"--source.path={home}/world/cache"]
    encoder = [f"--encoder.model={model}", "--encoder.device=cpu", "--run.max_reject_fraction=0.2"]
    assert main(["build", *source, *encoder, *options]) == 0
    return str(home / name)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of source, models and caches; the source's images lie there as files too."""
    home = tmp_path_factory.mktemp("home")
    (home / "world").mkdir()
    run_build(home / "world", write_source(home / "source"), make_vae(home / "vae"))
    size = "--image.height=64", "--image.width=64"
    options = "--encoder.batch_size=3", "--encoder.compute_dtype=float32"
    build_tower(home, "siglip", save_gemma(home / "multimodal"), *size, *options)
    for number in GOOD:
        image_file(home, number).write_bytes(image_bytes(number))
    return home


def image_file(home: Path, number: int) -> Path:
    return home / f"{sample_name(number)}.png"


@pytest.fixture(scope="session")
def caches(home: Path) -> Caches:
    return {"siglip": str(home / "siglip"), "world": str(home / "world/cache")}


@pytest.fixture(scope="module")
def towers(home: Path, caches: Caches, configured_here: MakeConfig) -> TrainConfig:
    """Gemma 3's own projector as it is, then a trained one."""
    pretrained = {"siglip": TowerConfig(projector="pretrained")}
    options = {"language_model": home / "multimodal", "towers": pretrained, "max_steps": 3, "sample_captions": 1}
    return train_alone(configured_here("towers", cache=caches, **options))
