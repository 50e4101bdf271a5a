"""The demo's inputs: scenes, and a data set of them with odd files."""

import json
import zipfile

import numpy as np
import pytest

from demo import dataset
from demo.scenes import COLOURS, RELATIONS, SHAPES, SIDE, compose, draw
from demo.special_files import BROKEN, UNUSUAL

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
