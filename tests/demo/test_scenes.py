"""Scenes are what their captions say, down to the pixels."""

import numpy as np
import pytest

from demo.scenes import COLOURS, RELATIONS, SHAPES, SIDE, Scene, Thing, compose, draw

SCENES = [compose(7, number) for number in range(60)]

FILLED_SHARE = {"circle": 0.785, "square": 1.0, "triangle": 0.5, "cross": 0.556, "ring": 0.52}
"""Of the shape's bounding box, by geometry; a ring's width is 0.42 of its radius."""


def pixels_of(scene: Scene, thing: Thing) -> np.ndarray:
    return np.argwhere((np.asarray(draw(scene)) == COLOURS[thing.colour]).all(axis=-1))


def test_a_seed_and_number_give_one_scene_and_its_pixels():
    assert compose(7, 5) == SCENES[5]
    assert draw(compose(7, 5)).tobytes() == draw(SCENES[5]).tobytes()
    assert [compose(8, number) for number in range(60)] != SCENES


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.caption)
def test_what_the_caption_names_is_drawn_inside_and_in_its_place(scene):
    places = []
    for thing in (scene.first, scene.second):
        assert f"a {thing.colour} {thing.shape}" in scene.caption
        rows, columns = pixels_of(scene, thing).T
        assert abs(rows.mean() - thing.y) < thing.radius / 2
        assert abs(columns.mean() - thing.x) < thing.radius / 2
        share = len(rows) / (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
        assert share == pytest.approx(FILLED_SHARE[thing.shape], abs=0.09)
        assert min(thing.x, thing.y) - thing.radius >= 0
        assert max(thing.x, thing.y) + thing.radius < SIDE
        places.append({"above": rows, "left of": columns}[scene.relation])
    assert places[0].max() <= places[1].min() + 1


def test_every_colour_shape_and_relation_occurs():
    things = [thing for scene in SCENES for thing in (scene.first, scene.second)]
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {scene.relation for scene in SCENES} == set(RELATIONS)
    assert all(scene.first.colour != scene.second.colour for scene in SCENES)
