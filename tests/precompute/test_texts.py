"""One command builds a cache for each text encoder of a model, over the samples of a cache of images."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from cache_store import open_cache, open_joined
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.text_presets import PRESETS
from tests.precompute.conftest import SAMPLES, Project, timeless_files
from tests.precompute.encoders.text_models import FEATURES, save_text_encoder

SMALL = ("--compute_dtype", "float32", "--batch_size", 4, "--device", "cpu", "--store.samples_per_shard", 8)


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text encoders of a small FLUX.1."""
    folder = save_text_encoder("CLIPTextModel", tmp_path_factory.mktemp("flux"))
    return save_text_encoder("T5EncoderModel", folder, "_2")


def texts(project: Project, *options: object, code: int = 0) -> str:
    place = ["--source", project.cache, "--cache", project.folder / "text"]
    return project.run(main, "texts", *place, *options, code=code)


def of_flux(project: Project, flux: Path, *options: object, code: int = 0) -> str:
    return texts(project, "--of", "FLUX.1-dev", "--model", flux, *SMALL, *options, code=code)


def test_one_command_builds_the_texts_of_a_model_and_resumes(built, flux):
    """Run again, it restores the same bytes: of a cache that has lost a shard, and of one that is gone."""
    said, out = of_flux(built, flux), built.folder / "text"
    assert said.count(f"sealed {out}/") == 2
    joined = open_joined({"world": built.cache, "t5": out / "t5", "pooled": out / "pooled"})
    read = joined.read(np.arange(3))
    assert read["t5"].shape == (3, 512, FEATURES)
    assert read["pooled"].shape == (3, FEATURES)
    array = open_cache(out / "t5").spec.array
    assert (array.encoder.compute_dtype, array.codec) == ("float32", "lz4")
    before = {name: timeless_files(out / name) for name in PRESETS["FLUX.1-dev"]}
    next((out / "t5" / "commits").glob("*1.json")).unlink()
    (out / "t5" / "seal.json").unlink()
    shutil.rmtree(out / "pooled")
    assert "1 shard" in of_flux(built, flux)
    assert {name: timeless_files(out / name) for name in before} == before
    assert of_flux(built, flux).count("nothing to encode") == 2
    assert "--cache NEW" in of_flux(built, flux, "--batch_size", 3, code=1)
    assert not any(verify(out / name, "full").findings for name in before)


def test_configs_are_those_of_ordinary_builds_for_ranks(built, flux, monkeypatch):
    with monkeypatch.context() as rank:
        rank.setenv("RANK", "1")
        rank.setenv("WORLD_SIZE", "2")
        assert "--configs" in of_flux(built, flux, code=2)
    said, folder = of_flux(built, flux, "--configs", built.folder / "configs"), built.folder / "configs"
    assert not (built.folder / "text").exists()
    for name in PRESETS["FLUX.1-dev"]:
        config = folder / f"{name}.yaml"
        assert f"precompute build --config {config}" in said
        for line in ("plan", "build --rank 1 --world-size 2", "build --rank 0 --world-size 2", "seal"):
            built.run(main, *line.split(), "--config", config)
    assert of_flux(built, flux).count("nothing to encode") == 2


def test_new_samples_are_added_to_all_texts(project, flux):
    project.has(range(16))
    project.build()
    of_flux(project, flux)
    project.has()
    project.build("--extend")
    assert "precompute texts" in of_flux(project, flux, code=1)
    of_flux(project, flux, "--extend")
    assert [open_cache(project.folder / "text" / name).spec.rows for name in ("t5", "pooled")] == [SAMPLES] * 2


def test_encoders_of_ones_own_choice_are_a_mapping_in_the_config(built, flux):
    common = {"model": str(flux), "device": "cpu", "compute_dtype": "float32"}
    chosen = {"a": {**common, "subfolder": "text_encoder_2", "max_tokens": 9}, "b": {**common, "max_tokens": 20}}
    config = built.folder / "texts.yaml"
    config.write_text(yaml.safe_dump({"source": str(built.cache), "cache": str(built.folder / "own"), "texts": chosen}))
    built.run(main, "texts", "--config", config)
    assert [open_cache(built.folder / "own" / name).spec.arrays[0].shape[0] for name in chosen] == [9, 20]
