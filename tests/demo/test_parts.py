"""The demo's inputs: scenes, and a data set of them with odd files."""

import numpy as np
import pytest

from demo.scenes import COLOURS, RELATIONS, SHAPES, SIDE, compose, draw

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
