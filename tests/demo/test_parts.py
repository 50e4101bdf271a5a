"""The demo's inputs: scenes, odd files, a data set, and models that can learn the task."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast

from cache_store.format.array import Size
from demo import dataset, language_model
from demo.language_model import Caption, Lesson
from demo.scenes import COLOURS, RELATIONS, SHAPES, SIDE, compose, draw
from demo.special_files import BROKEN, ORIENTATION_TAG, UNUSUAL, recoloured
from demo.tokenizer import make_tokenizer
from demo.vae import encode, make_vae
from precompute.images.config import ImageConfig
from precompute.images.decode import decode_image
from trainer.text.tokenizer import load_chat_tokenizer

SCENES = [compose(7, number) for number in range(60)]
FILLED_SHARE = {"circle": 0.785, "square": 1.0, "triangle": 0.5, "cross": 0.556, "ring": 0.52}
"""Share of the bounding box that each shape fills; a ring's width is 0.42 of its radius."""


def test_what_the_caption_names_is_drawn_inside_and_in_its_place():
    for scene in SCENES:
        places, pixels = [], np.asarray(draw(scene))
        for thing in (scene.first, scene.second):
            assert f"a {thing.colour} {thing.shape}" in scene.caption
            rows, columns = np.argwhere((pixels == COLOURS[thing.colour]).all(axis=-1)).T
            assert max(abs(rows.mean() - thing.y), abs(columns.mean() - thing.x)) < thing.radius / 2
            share = len(rows) / (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
            assert share == pytest.approx(FILLED_SHARE[thing.shape], abs=0.09)
            assert min(thing.x, thing.y) - thing.radius >= 0
            assert max(thing.x, thing.y) + thing.radius < SIDE
            places.append({"above": rows, "left of": columns}[scene.relation])
        assert places[0].max() <= places[1].min() + 1, scene.caption
    said = "".join(scene.caption for scene in SCENES)
    assert [word for word in (*COLOURS, *SHAPES, *RELATIONS) if word not in said] == []
    assert all(scene.first.colour != scene.second.colour for scene in SCENES)


def test_the_same_seed_writes_the_same_data_set_with_its_images(tmp_path):
    for folder, seed in (("one", 4), ("two", 4), ("three", 5)):
        dataset.write_dataset(tmp_path / folder, list(dataset.samples(12, seed)))
    for name in (dataset.CHAT_FILE, dataset.IMAGES_FILE):
        one, two, three = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two", "three"))
        assert one == two != three
    records = json.loads((tmp_path / "one" / dataset.CHAT_FILE).read_text(encoding="utf-8"))
    members = zipfile.ZipFile(tmp_path / "one" / dataset.IMAGES_FILE).infolist()
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}, "no clock enters"
    assert len(records) == 12 + len(BROKEN) + len(UNUSUAL)
    assert {record["image"] for record in records} - {member.filename for member in members} == {"special-missing.jpg"}


def unusual(kind: str) -> tuple[np.ndarray, np.ndarray, Image.Image]:
    """Return the scene and its decoded file as RGB, [Y, X, 3], and the stored image."""
    scene = recoloured(compose(0, 11), UNUSUAL[kind])
    data = UNUSUAL[kind].write(scene)
    assert data is not None
    shown = decode_image(data, ImageConfig().recipe, Size(1, 224, 224)).rgb
    return np.asarray(draw(scene), int), np.asarray(shown, int), Image.open(io.BytesIO(data))


def test_unusual_files_show_the_scene():
    drawn, shown, stored = unusual("exif-rotated")
    assert stored.getexif()[ORIENTATION_TAG] == 6
    assert abs(shown - drawn).mean() < 8
    drawn, shown, stored = unusual("cmyk")
    assert stored.mode == "CMYK"
    assert abs(shown - drawn).mean() < 8
    drawn, shown, stored = unusual("grey-16-bit")
    assert stored.mode == "I;16"
    assert abs(shown - (drawn @ (0.299, 0.587, 0.114))[..., None]).max() < 1
    drawn, shown, stored = unusual("palette-transparent")
    assert (stored.mode, stored.has_transparency_data) == ("P", True)
    assert (shown[0, 0] == 255).all(), "the transparent ground lies on white"
    for colour in ("red", "blue"):
        assert (abs(shown - COLOURS[colour]).sum(-1) < 60).sum() > 100


@pytest.fixture(scope="module")
def drawn() -> list[dataset.Sample]:
    return list(dataset.samples(160, seed=0))


@pytest.fixture(scope="module")
def tokenizer(drawn) -> PreTrainedTokenizerFast:
    return make_tokenizer([sample.conversation for sample in drawn])


def test_captions_round_trip_and_each_colour_is_one_token(tokenizer):
    for number in range(12):
        caption = compose(1, number).caption
        tokens = tokenizer(caption, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == caption
    for word in (*COLOURS, *SHAPES):
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1


def test_notes_hold_the_captions_words_in_their_relation_alone():
    caption = Caption(("red", "ring"), ("blue", "cross"), "left of")
    for seed in range(20):
        cells, weights = language_model.write_notes(caption, np.random.default_rng(seed))
        words = {language_model.GROUND_WORD, " red", " ring", " blue", " cross"}
        assert {word for cell in cells for word in cell} == words
        assert np.linalg.norm(weights, axis=1) == pytest.approx(1.0)
        grid = np.array([cell[1] for cell in cells]).reshape(8, 8)
        first, second = (np.argwhere(grid == word)[:, 1] for word in (" red", " blue"))
        assert first.mean() + 2 < second.mean()


def test_training_on_text_lowers_the_loss_and_repeats_exactly(drawn, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    ids, conversations = zip(*((sample.id, sample.conversation) for sample in drawn[:60]), strict=True)
    texts = load_chat_tokenizer(str(tmp_path), None, 128)(ids, conversations)
    lessons = [Lesson(Caption.from_scene(sample.scene), text) for sample, text in zip(drawn[:60], texts, strict=True)]

    def train(steps: int) -> tuple[float, Gemma3ForCausalLM]:
        model = language_model.make_language_model(tokenizer, seed=0)
        return language_model.train_on_text(model, tokenizer, lessons, steps, seed=0), model

    first_loss, _ = train(1)
    loss, model = train(12)
    again, other = train(12)
    assert loss == again < first_loss - 0.5
    assert_same_weights(model, other)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_colours_are_linear_in_the_latents_of_the_random_vae():
    """The VAE's config has the mean and deviation of its latents; one seed makes the same VAE twice."""
    images, cells = np.stack([np.asarray(draw(compose(0, number))) for number in range(160)]), SIDE // 8
    vae = make_vae(images, seed=0)
    latent_NCHW = encode(vae, images)
    assert_same_weights(vae, make_vae(images, seed=0))
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    standardised = (latent_NCHW[:128] - mean) / std
    assert standardised.mean((0, 2, 3)).abs().max() < 0.01
    assert (standardised.std((0, 2, 3)) - 1).abs().max() < 0.01
    latents = latent_NCHW.permute(0, 2, 3, 1).reshape(-1, 16).double().numpy()
    blocks = images.reshape(-1, cells, 8, cells, 8, 3).mean((2, 4)).reshape(-1, 3)
    known = np.hstack([latents, np.ones((len(latents), 1))])
    half = len(known) // 2
    weights = np.linalg.lstsq(known[:half], blocks[:half])[0]
    error = ((known[half:] @ weights - blocks[half:]) ** 2).mean(0)
    assert (1 - error / blocks[half:].var(0)).min() > 0.4
