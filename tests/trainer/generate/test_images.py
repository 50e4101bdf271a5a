"""An image file is answered as its cached row: each tower encodes it by the recipe and the model of its own cache."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache_store import open_cache
from precompute.encode_images import encode_images
from tests.named import assert_names
from tests.precompute.conftest import GOOD, image_bytes, run_build, sample_name, write_source
from tests.trainer.answers import filled, reported
from tests.trainer.conftest import MakeConfig
from tests.trainer.generate.conftest import image_file
from tests.trainer.runs import train_alone
from trainer.cli import main
from trainer.config import TrainConfig


@pytest.fixture(scope="module")
def world(home: Path, configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("world", cache=home / "world/cache", max_steps=2))


CHANGES = [
    {},
    {"encoder__posterior": "moments"},
    {"encoder__fold": False, "store__dtype": "bfloat16", "image__fit": "pad"},
    {"image": {"buckets": {"preset": "ours", "resolution": 48, "min": 32, "step": 8}}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_an_image_encodes_to_its_row(home, tmp_path, changes):
    """To the bit in its planned batch; elsewhere the batch, or the place in it, may round otherwise."""
    tall = io.BytesIO()
    Image.open(image_file(home, GOOD[2])).transpose(Image.Transpose.ROTATE_90).save(tall, "PNG")
    source = write_source(tmp_path / "source", sample_002=tall.getvalue())
    cache = open_cache(run_build(tmp_path, source, home / "vae", **changes))
    assert len(cache.arrays) == (2 if "image" in changes else 1)
    paths = [image_file(home, number) for number in GOOD]
    paths[2] = tmp_path / "tall.png"
    paths[2].write_bytes(tall.getvalue())
    place = {name: place for place, name in enumerate(cache.samples(np.arange(len(GOOD)), ["id"])["id"].to_pylist())}
    rows = [cache.read(np.array([place[sample_name(number)]]))[0] for number in GOOD]
    encoded = encode_images(cache, paths)
    assert len(cache.arrays) > 1 or all(map(np.array_equal, encoded[:3], rows[:3]))
    for found, expected in zip([*encoded, *encode_images(cache, [str(paths[5])])], [*rows, rows[5]], strict=True):
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=1e-3)
    assert encode_images(cache, []) == []


@pytest.mark.parametrize("run", ["world", "towers"])
def test_an_image_file_is_answered_as_its_cached_row(home, run, request, tmp_path, capsys):
    folder, report = request.getfixturevalue(run).run.folder, tmp_path / "report.json"
    asked = "--prompt=what is this", "--max_tokens=12"
    images = ",".join(str(image_file(home, row)) for row in (0, 7, 21))
    of_rows, of_images = (
        [each["answer"] for each in reported(folder, report, option, *asked)]
        for option in ("--rows=0,7,21", f"--image={images}")
    )
    assert of_images == of_rows
    printed = f"image {image_file(home, 7)}\n  prompt     what is this\n  answer     {of_rows[1]}"
    assert printed in capsys.readouterr().out


REFUSED = [
    ("world", 1, ["--image=IMAGE,TMP/torn.png"], "TMP/torn.png"),
    ("world", 2, ["--image=IMAGE", "--encoder=TMP/none"], "encoder.model TMP/none"),
    ("towers", 1, ["--image=IMAGE", "--encoders={siglip: HOME/vae}"], "HOME/vae"),
    ("towers", 2, ["--rows=1", "--cache=a"], "cache --caches"),
    ("towers", 2, ["--rows=1", "--caches={world: HOME/world/cache}"], "caches siglip"),
]


@pytest.mark.parametrize(("run", "code", "options", "names"), REFUSED)
def test_an_image_that_cannot_be_encoded_is_one_message(home, run, code, options, names, request, tmp_path, capsys):
    (tmp_path / "torn.png").write_bytes(image_bytes(0)[:99])
    *options, names = filled([*options, names], IMAGE=image_file(home, 0), TMP=tmp_path, HOME=home)
    folder = request.getfixturevalue(run).run.folder
    assert main(["generate", str(folder), *options, "--prompt=what is this"]) == code
    assert_names(capsys.readouterr().err, names)


def test_a_moved_encoder_is_asked_for(home, towers, capsys):
    command = ["generate", str(towers.run.folder), f"--image={image_file(home, 0)}", "--prompt=what is this"]
    moved = (home / "vae").rename(home / "moved")
    codes = main(command), main([*command, f"--encoders={{world: {moved}}}"])
    moved.rename(home / "vae")
    assert codes == (2, 0)
    assert_names(capsys.readouterr().err, f"encoder.model {home / 'vae'} world --encoders")
