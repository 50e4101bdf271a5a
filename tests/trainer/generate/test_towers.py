"""A VAE's latents and Gemma 3's own vision tower, built, trained, and spoken of: from images as from cached rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store import open_joined
from precompute.cli import main as precompute
from tests.precompute.conftest import GOOD, image_bytes, make_vae, run_build, sample_name, write_source
from tests.precompute.encoders.towers import CLIP_PROCESSOR, save_model
from tests.trainer.answers import export_and_ask, reported
from tests.trainer.conftest import GEMMA_TEMPLATE, MakeConfig, make_tokenizer
from tests.trainer.models import PROMPTS, word_by_word
from tests.trainer.multimodal import save_gemma
from tests.trainer.runs import ALONE, Caches, end_well, fork_ranks, metrics
from trainer import load_projector
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.data.stream import as_tensor
from trainer.generate.config import GenerateConfig
from trainer.generate.generator import Generator, TurnEnd
from trainer.model.config import TowerConfig
from trainer.model.load_language_model import load_with_whole
from trainer.model.model import WorldModel
from trainer.text.chat import ChatTokenizer
from trainer.train import train


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two caches of one source, whose images lie beside it as files too, and the models that made them."""
    home = tmp_path_factory.mktemp("home")
    vae, multimodal = make_vae(home / "vae"), save_gemma(home / "multimodal")
    (home / "world").mkdir()
    first = run_build(home / "world", write_source(home / "source"), vae)
    second = [f"--cache={home}/siglip", "--source.kind=cache", f"--source.path={first}", "--image.height=64"]
    encoder = [f"--encoder.model={multimodal}", "--encoder.batch_size=3", "--encoder.compute_dtype=float32"]
    others = ["--image.width=64", "--run.max_reject_fraction=0.2", "--encoder.device=cpu"]
    assert precompute(["build", *second, *encoder, *others]) == 0
    for number in GOOD:
        image_file(home, number).write_bytes(image_bytes(number))
    return home


@pytest.fixture(scope="module")
def caches(home: Path) -> Caches:
    return {"siglip": str(home / "siglip"), "world": str(home / "world/cache")}


@pytest.fixture(scope="module")
def trained(home: Path, caches: Caches, configured_here: MakeConfig) -> TrainConfig:
    """Gemma 3's own projector first, as it is, then one that learns."""
    towers = {"siglip": TowerConfig(projector="pretrained")}
    options = {"language_model": home / "multimodal", "towers": towers, "max_steps": 3, "sample_captions": 1}
    config = configured_here("trained", cache=caches, **options)
    train(config, ALONE)
    return config


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": "full"}, {"accumulate": 4}, {"ranks": 2}], ids=str)
def test_masks_change_no_loss_however_a_step_is_cut_up(home, trained, caches, configured_here, changes):
    options = {name: value for name, value in changes.items() if name != "ranks"}
    towers = {"siglip": TowerConfig(projector="pretrained")}
    model = {"cache": caches, "language_model": home / "multimodal", "towers": towers}
    config = configured_here("-".join(changes), **model, **options, max_steps=3)
    end_well(*fork_ranks(config)) if "ranks" in changes else train(config, ALONE)
    for key in ("loss", "val_loss", "val_loss_shuffled"):
        assert metrics(config.run.folder, key) == pytest.approx(metrics(trained.run.folder, key), rel=1e-4)


def test_a_clip_and_a_vae_train_together_and_speak_of_an_image(home, configured_here, tmp_path):
    """CLIP's images are as its own processor prepares them, at another size than the VAE's."""
    clip = home / "clip"
    save_model("CLIPVisionModel", clip)
    CLIP_PROCESSOR.save_pretrained(clip)
    where = [f"--cache={home}/clip-cache", "--source.kind=cache", f"--source.path={home}/world/cache"]
    encoder = [f"--encoder.model={clip}", "--image.from_model=true", "--encoder.device=cpu"]
    assert precompute(["build", *where, *encoder, "--run.max_reject_fraction=0.2"]) == 0
    caches = {"clip": f"{home}/clip-cache", "world": f"{home}/world/cache"}
    config = configured_here("clip-and-vae", cache=caches, language_model=home / "multimodal", max_steps=3)
    train(config, ALONE)
    trained = load_projector(config.run.folder)
    assert [(tower.name, tower.tokens) for tower in trained.config.towers] == [("clip", 18), ("world", 22)]
    image = image_file(home, 7)
    rows = said(config.run.folder, tmp_path / "report", "--rows=7")
    assert said(config.run.folder, tmp_path / "report", f"--image={image}") == rows


def image_file(home: Path, number: int) -> Path:
    return home / f"{sample_name(number)}.png"


def said(place: Path, report: Path, *options: str) -> list[str]:
    asked = reported(place, report, "--prompt=what is this", "--max_tokens=12", *options)
    return [each["answer"] for each in asked]


def test_an_image_file_is_answered_as_its_rows_of_two_caches(home, trained, tmp_path):
    """Each tower encodes it by the recipe and model of its own cache; one that has moved is named."""
    images = ",".join(str(image_file(home, row)) for row in (0, 7, 21))
    rows = said(trained.run.folder, tmp_path / "report", "--rows=0,7,21")
    assert said(trained.run.folder, tmp_path / "report", f"--image={images}") == rows
    moved = json.dumps({"world": str(home / "vae")})
    assert said(trained.run.folder, tmp_path / "report", f"--image={images}", f"--encoders={moved}") == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows=1", "--cache=a"], "cache: the projector has several towers; name one for each with --caches '{sig"),
        (["--rows=1", "--caches={worl: a}"], "caches: the projector has no tower worl; did you mean world?"),
        (["--rows=1", "--caches={world: WORLD}"], "caches: name one for the tower siglip too"),
        (
            ["--image=IMAGE", "--prompt=a", "--encoder=b"],
            "encoder: the projector has several towers; name",
        ),
        (["--rows=1", "--cache=a", "--caches={world: a}"], "--cache is for one tower, --caches for several"),
    ],
)
def test_towers_are_named_each(home, trained, caches, capsys, options, message):
    places = {"WORLD": caches["world"], "IMAGE": str(image_file(home, 0))}
    for name, place in places.items():
        options = [each.replace(name, place) for each in options]
    assert main(["generate", str(trained.run.folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_encoder_that_is_gone_or_another_is_named_by_tower(home, trained, capsys):
    ask = ["generate", str(trained.run.folder), f"--image={image_file(home, 0)}", "--prompt=a"]
    assert main([*ask, f"--encoders={{siglip: {home / 'vae'}}}"]) == 1
    assert f"{home / 'vae'} is not the encoder that made the cache\n" in capsys.readouterr().err
    gone = (home / "vae").rename(home / "gone")
    assert main(ask) == 2
    gone.rename(home / "vae")
    error = capsys.readouterr().err
    assert f"tower world: encoder.model {home / 'vae'} is neither" in error
    assert error.endswith("; if it has moved, name its new place with --encoders '{world: …}'\n")


def test_a_frozen_tower_is_whole_in_the_file_and_as_it_was(home, trained):
    projector = load_projector(trained.run.folder)
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
    config = configured_here(
        "learns", cache={"siglip": caches["siglip"]}, language_model=home / "multimodal", towers=towers
    )
    train(config, ALONE)
    (tower,) = (projector := load_projector(config.run.folder)).config.towers
    language, _ = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    moved = projector["siglip"].state_dict()
    assert tower.trained
    assert not torch.equal(moved["weight"], language.image_parts.weight_FD)
    assert not torch.equal(moved["norm"], language.image_parts.norm_F)


def test_prompts_under_full_attention_go_in_padded_batches(home, trained, caches):
    """With cached keys: the words are those of whole sequences, one by one, as training reads them."""
    language, whole = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    model = WorldModel(language, load_projector(trained.run.folder), begins_with_bos=True)
    chat = ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, 64)
    generator = Generator(model, whole, chat, TurnEnd((), ""), GenerateConfig(rows="0", max_tokens=12))
    samples = {name: as_tensor(each) for name, each in open_joined(caches).read(np.arange(len(PROMPTS))).items()}
    alone = []
    for row, messages in enumerate(PROMPTS):
        own = {name: each[[row]] for name, each in samples.items()}
        alone.append(word_by_word(generator, own, messages, 12))
    assert generator.generate_tokens(samples, PROMPTS) == alone
    assert len({tuple(each) for each in alone}) > 1


def test_the_card_of_a_pretrained_tower_says_what_generate_says(trained, tmp_path):
    assert "its tokens attend to each other; not trained here" in export_and_ask(trained, tmp_path, [0])
