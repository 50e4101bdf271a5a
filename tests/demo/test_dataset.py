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
def test_a_conversation_tells_the_image_and_each_thing_once(number):
    scene = compose(0, number)
    turns = converse(scene, number)
    said = " ".join(turn["value"] for turn in turns)
    assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
    assert [said.count(word) for word in ("<image>", scene.first.name, scene.second.name)] == [1, 1, 1]


def test_the_image_marker_stands_in_different_places():
    first_turns = [converse(compose(0, number), number)[0]["value"] for number in range(len(KINDS))]
    places = {turn.index("<image>") / (len(turn) - len("<image>")) for turn in first_turns}
    assert (min(places), max(places), len(places)) == (0.0, 1.0, 3)


def test_about_the_asked_share_is_held_out():
    held_out = [is_held_out(f"scene-{number:05d}", 0.1) for number in range(3_000)]
    assert 200 < sum(held_out) < 400
