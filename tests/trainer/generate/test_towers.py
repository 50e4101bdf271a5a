"""A VAE's latents and Gemma 3's own vision tower train together, are exported, and answer about rows and files."""

from pathlib import Path

import pytest
import torch

from precompute.cli import main as precompute
from tests.named import assert_names
from tests.precompute.conftest import GOOD, image_bytes, make_vae, run_build, sample_name, write_source
from tests.trainer.answers import export_and_ask, filled, reported
from tests.trainer.conftest import MakeConfig
from tests.trainer.models import save_gemma
from tests.trainer.runs import Caches, assert_near_run, train_alone, train_on_two_ranks
from trainer import load_projector
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.model.load_language_model import load_with_whole
from trainer.model.model_config import TowerConfig


def build_tower(home: Path, name: str, model: Path, *options: str) -> str:
    """Build a cache of the plan of `world/cache`."""
    source = [f"--cache={home / name}", "--source.kind=cache", f"--source.path={home}/world/cache"]
    encoder = [f"--encoder.model={model}", "--encoder.device=cpu", "--run.max_reject_fraction=0.2"]
    assert precompute(["build", *source, *encoder, *options]) == 0
    return str(home / name)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def caches(home: Path) -> Caches:
    return {"siglip": str(home / "siglip"), "world": str(home / "world/cache")}


@pytest.fixture(scope="module")
def towers(home: Path, caches: Caches, configured_here: MakeConfig) -> TrainConfig:
    """Gemma 3's own projector as it is, then a trained one."""
    pretrained = {"siglip": TowerConfig(projector="pretrained")}
    options = {"language_model": home / "multimodal", "towers": pretrained, "max_steps": 3, "sample_captions": 1}
    return train_alone(configured_here("towers", cache=caches, **options))


@pytest.mark.parametrize(
    ("ranks", "changes"), [(1, {"gradient_checkpointing": "full", "accumulate": 2}), (2, {"parallel": "fsdp2"})]
)
def test_masks_change_no_loss_however_a_step_is_cut_up(home, towers, caches, configured_here, changes, ranks):
    pretrained = {"siglip": TowerConfig(projector="pretrained")}
    model = {"cache": caches, "language_model": home / "multimodal", "towers": pretrained}
    config = configured_here("-".join(changes) + str(ranks), **model, **changes, max_steps=3)
    (train_alone if ranks == 1 else train_on_two_ranks)(config)
    assert_near_run(config, towers, "loss", "val_loss", "val_loss_shuffled")


def test_a_frozen_tower_is_whole_in_the_file_and_as_it_was(home, towers):
    projector = load_projector(towers.run.folder)
    siglip, world = projector.config.towers
    assert (siglip.trained, siglip.attention, siglip.ends_from, siglip.tokens) == (False, "full", "checkpoint", 18)
    assert (world.trained, world.attention, world.ends_from, world.tokens) == (True, "causal", "learned", 22)
    language, _ = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    parts, own = language.image_parts, projector["siglip"].state_dict()
    assert torch.equal(own["weight"], parts.weight_FD)
    assert torch.equal(own["norm"], parts.norm_F)
    assert torch.equal(own["ends"], language.embed(torch.tensor([parts.boi, parts.eoi])))


def test_a_pretrained_tower_may_learn_too(home, caches, configured_here):
    towers = {"siglip": TowerConfig(projector="pretrained", trained=True)}
    config = train_alone(
        configured_here("learns", cache={"siglip": caches["siglip"]}, language_model=home / "multimodal", towers=towers)
    )
    (tower,) = (projector := load_projector(config.run.folder)).config.towers
    language, _ = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    moved = projector["siglip"].state_dict()
    assert tower.trained
    assert not torch.equal(moved["norm"], language.image_parts.norm_F)


def test_the_exported_code_of_a_pretrained_tower_says_what_generate_says(towers, tmp_path):
    assert "its tokens attend to each other; not trained here" in export_and_ask(towers, tmp_path, [0])


@pytest.fixture(scope="module")
def world(home: Path, configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("world", cache=home / "world/cache", max_steps=2))


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
