"""The data set is LLaVA's form, reproducible to the byte."""

import json
import zipfile

import pytest

from demo.conversations import KINDS, converse
from demo.dataset import CHAT_FILE, IMAGES_FILE, is_held_out, samples, write_dataset
from demo.scenes import compose
from demo.special_files import BROKEN, UNUSUAL


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    for folder in ("one", "two"):
        write_dataset(tmp_path / folder, list(samples(12, seed=4)))
    for file in (CHAT_FILE, IMAGES_FILE):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_every_record_but_the_missing_one_has_its_image_in_the_zip(tmp_path):
    write_dataset(tmp_path, list(samples(12, seed=4)))
    records = json.loads((tmp_path / CHAT_FILE).read_text(encoding="utf-8"))
    members = set(zipfile.ZipFile(tmp_path / IMAGES_FILE).namelist())
    assert len(records) == 12 + len(BROKEN) + len(UNUSUAL)
    assert {record["image"] for record in records} - members == {"special-missing.jpg"}


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_conversation_alternates_and_shows_the_image_once(number):
    turns = converse(compose(0, number), number)
    assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
    assert ["<image>" in turn["value"] for turn in turns].count(True) == 1


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_no_colour_or_shape_is_known_before_it_is_asked_for(number):
    scene = compose(0, number)
    said = " ".join(turn["value"] for turn in converse(scene, number))
    for word in (scene.first.name, scene.second.name):
        assert said.count(word) == 1


def test_the_image_marker_stands_in_different_places():
    first_turns = [converse(compose(0, number), number)[0]["value"] for number in range(len(KINDS))]
    places = {turn.index("<image>") / (len(turn) - len("<image>")) for turn in first_turns}
    assert min(places) == 0.0
    assert max(places) == 1.0
    assert len(places) == 3


def test_about_the_asked_share_is_held_out():
    held_out = [is_held_out(f"scene-{number:05d}", 0.1) for number in range(3_000)]
    assert 200 < sum(held_out) < 400
