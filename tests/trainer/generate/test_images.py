"""An image file is its cached row: through the same recipe and encoder it gives the same latent and the same words."""

import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as changed

from cache_store import open_cache
from cache_store.cache.images import open_image_encoder
from cache_store.errors import ConfigError, SourceError, StaleError
from precompute.encode_images import encode_images, round_to_dtype
from tests.precompute.conftest import GOOD, image_bytes, make_vae, run_build, sample_name, write_source
from tests.trainer.answers import reported
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.train import train


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A VAE, a source whose images lie beside it as files too, and the cache built of it."""
    home = tmp_path_factory.mktemp("home")
    run_build(home, write_source(home / "source"), make_vae(home / "model"))
    for number in GOOD:
        image_file(home, number).write_bytes(image_bytes(number))
    return home


@pytest.fixture(scope="module")
def trained(home: Path, configured_here: MakeConfig) -> TrainConfig:
    config = configured_here("of-images", cache=home / "cache", max_steps=2)
    train(config, ALONE)
    return config


def image_file(home: Path, number: int) -> Path:
    return home / f"{sample_name(number)}.png"


@pytest.mark.parametrize(
    "changes",
    [{}, {"encoder__posterior": "moments"}, {"encoder__fold": False, "store__dtype": "bfloat16", "image__fit": "pad"}],
    ids=str,
)
def test_an_image_encodes_to_the_bits_of_its_row(home, tmp_path, changes):
    """Alone, with others, and where its planned batch was short."""
    cache = open_cache(run_build(tmp_path, home / "source", home / "model", **changes) if changes else home / "cache")
    paths = [image_file(home, number) for number in GOOD]
    rows = cache.read(np.arange(len(GOOD)))
    assert np.array_equal(encode_images(cache, paths), rows)
    assert np.array_equal(encode_images(cache, [str(paths[5])]), rows[5:6])
    assert len(encode_images(cache, [])) == 0


def test_an_image_file_is_answered_as_its_cached_row(home, trained, tmp_path, capsys):
    report, asked = tmp_path / "report.json", ["--prompt=what is this", "--max_tokens=12"]
    rows = [0, 7, 21]
    images = ",".join(str(image_file(home, row)) for row in rows)
    said = []
    for options in ["--rows=0,7,21"], [f"--image={images}"]:
        said.append([each["answer"] for each in reported(trained.run.folder, report, *options, *asked)])
    assert said[0] == said[1]
    assert (
        f"image {image_file(home, 7)}\n  prompt     what is this\n  answer     {said[0][1]}" in capsys.readouterr().out
    )


def test_an_image_that_cannot_be_is_one_message(home, trained, tmp_path, capsys):
    (tmp_path / "torn.png").write_bytes(image_bytes(0)[:99])
    (tmp_path / "page.html").write_text("<html>")
    other = make_vae(tmp_path / "other", seed=1)
    good = image_file(home, 0)
    for code, options, message in [
        (2, [f"--image={tmp_path}/none.png"], f"image: there is no file {tmp_path}/none.png"),
        (2, [f"--image={good},"], "image: there is no file ."),
        (1, [f"--image={good},{tmp_path}/torn.png"], f"{tmp_path}/torn.png: cannot decode"),
        (1, [f"--image={tmp_path}/page.html"], f"{tmp_path}/page.html: cannot decode"),
        (1, [f"--image={good}", f"--encoder={other}"], f"{other} is not the encoder that made the cache"),
        (2, [f"--image={good}", f"--encoder={tmp_path}/none"], f"encoder.model {tmp_path}/none is neither a folder"),
        (2, [f"--image={good}", "--rows=1"], "exactly one of --rows 7,3, --ids ID,ID and --image FILE"),
        (2, [f"--image={good}", "--cache=c"], "--cache is for --rows and --ids; leave it out with --image"),
        (2, ["--rows=1", "--encoder=c"], "--encoder is for --image; rows are encoded already"),
    ]:
        assert main(["generate", str(trained.run.folder), *options, "--prompt=what is this"]) == code
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert main(["generate", str(trained.run.folder), f"--image={good}"]) == 2
    assert "--image needs a question: give one with --prompt" in capsys.readouterr().err


def test_a_moved_encoder_is_asked_for(home, trained, capsys):
    command = ["generate", str(trained.run.folder), f"--image={image_file(home, 0)}", "--prompt=what is this"]
    moved = (home / "model").rename(home / "elsewhere")
    assert main(command) == 2
    assert main([*command, f"--encoder={moved}"]) == 0
    moved.rename(home / "model")
    error = capsys.readouterr().err
    assert f"{home / 'model'} is neither a folder here nor a hub id" in error
    assert "; if it has moved, name its new place with --encoder\n" in error


def test_an_unknown_recipe_and_a_latent_too_large_are_refused(home, monkeypatch):
    array = open_cache(home / "cache").spec.array
    for image in (changed(array.image, fit="stretch"), changed(array.image, alpha="on black")):
        with pytest.raises(ConfigError, match="this version of precompute cannot follow the cache.s image recipe"):
            open_image_encoder(changed(array, image=image), str(home / "model"))
    with pytest.raises(StaleError, match="is not the encoder that made the cache"):
        open_image_encoder(
            changed(array, encoder=changed(array.encoder, latents_mean=(0.0,) * 16)), str(home / "model")
        )
    with pytest.raises(SourceError, match="a.png: its latent is not finite in float16"):
        round_to_dtype(np.full((1, *array.shape), 1e6, np.float32), [Path("a.png")], array)
    monkeypatch.setitem(sys.modules, "precompute.encode_images", None)
    with pytest.raises(ConfigError, match="images cannot be encoded here: .*; run `pip install "):
        open_image_encoder(array, str(home / "model"))
