"""Small scenes: two coloured shapes in a relation on a textured ground, and their captions.

A scene is data, made by `compose` from a seed and a number alone; `draw` turns it into an image. So captions are
true by construction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64
"""Pixels; a VAE of factor 8 makes 8 x 8 latent cells of it, and a shape covers about 4 x 4 of them."""

COLOURS = {
    "red": (214, 40, 40),
    "brown": (140, 85, 40),
    "yellow": (245, 220, 50),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "purple": (130, 50, 170),
    "white": (248, 248, 248),
    "black": (16, 16, 16),
}

PLACES = {
    "left of": ("on the left", "on the right"),
    "above": ("at the top", "at the bottom"),
}
"""Places of the first and the second shape of each relation."""

RELATIONS = tuple(PLACES)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A coloured shape; lengths in pixels."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Two things, the first one left of or above the second."""

    first: Thing
    second: Thing
    relation: str
    ground: str
    ground_seed: int

    @property
    def caption(self) -> str:
        return f"a {self.first.name} {self.relation} a {self.second.name}."


def compose(seed: int, number: int) -> Scene:
    """Make the scene of this number, which is the same on every machine."""
    rng = np.random.default_rng([seed, number])
    relation = RELATIONS[rng.integers(len(RELATIONS))]
    colours = rng.choice(list(COLOURS), 2, replace=False)
    across = rng.uniform(0.27, 0.73, 2)
    first, second = (
        place(relation, order, float(across[order]), str(colours[order]), rng) for order in range(len(colours))
    )
    ground = list(TEXTURES)[rng.integers(len(TEXTURES))]
    return Scene(first=first, second=second, relation=relation, ground=ground, ground_seed=int(rng.integers(2**32)))


def place(relation: str, order: int, across: float, colour: str, rng: np.random.Generator) -> Thing:
    """Place a thing in its half of the image; `across` is its position on the other axis, as a share of the side."""
    along = 0.25 + 0.5 * order + rng.uniform(-0.02, 0.02)
    x, y = (along, across) if relation == "left of" else (across, along)
    shape = list(SHAPES)[rng.integers(len(SHAPES))]
    return Thing(colour=colour, shape=shape, x=SIDE * x, y=SIDE * y, radius=SIDE * rng.uniform(0.19, 0.228))


def draw(scene: Scene) -> Image.Image:
    """Draw the scene as an RGB image of SIDE x SIDE."""
    image = Image.fromarray(paint_ground(scene))
    pen = ImageDraw.Draw(image)
    for thing in (scene.first, scene.second):
        SHAPES[thing.shape](pen, thing)
    return image


def paint_ground(scene: Scene) -> np.ndarray:
    """Paint a greyish texture [y, x, rgb], uint8, without any colour that shapes have."""
    rng = np.random.default_rng(scene.ground_seed)
    base_rgb = rng.uniform(105, 165) + rng.uniform(-14, 14, 3)
    texture_yx = TEXTURES[scene.ground](rng) + rng.normal(0, 4, (SIDE, SIDE))
    return np.clip(base_rgb + texture_yx[..., None], 0, 255).astype(np.uint8)


def blotches(rng: np.random.Generator) -> np.ndarray:
    coarse = Image.fromarray(rng.normal(0, 10, (SIDE // 8, SIDE // 8)).astype(np.float32))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def stripes(rng: np.random.Generator) -> np.ndarray:
    angle, wavelength = rng.uniform(0, math.pi), rng.uniform(6, 16)
    y, x = np.mgrid[:SIDE, :SIDE]
    wave: np.ndarray = 10 * np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / wavelength)
    return wave


def grain(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 8, (SIDE, SIDE))


TEXTURES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "blotches": blotches,
    "stripes": stripes,
    "grain": grain,
}


def circle(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    pen.ellipse(box(thing, thing.radius), fill=COLOURS[thing.colour])


def square(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    pen.rectangle(box(thing, thing.radius), fill=COLOURS[thing.colour])


def triangle(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    left, top, right, bottom = box(thing, thing.radius)
    pen.polygon([(thing.x, top), (right, bottom), (left, bottom)], fill=COLOURS[thing.colour])


def cross(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    (left, top, right, bottom), arm = box(thing, thing.radius), thing.radius / 3
    pen.rectangle((thing.x - arm, top, thing.x + arm, bottom), fill=COLOURS[thing.colour])
    pen.rectangle((left, thing.y - arm, right, thing.y + arm), fill=COLOURS[thing.colour])


def ring(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    pen.ellipse(box(thing, thing.radius), outline=COLOURS[thing.colour], width=round(0.42 * thing.radius))


def box(thing: Thing, radius: float) -> tuple[float, float, float, float]:
    return thing.x - radius, thing.y - radius, thing.x + radius, thing.y + radius


SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, Thing], None]] = {
    "circle": circle,
    "square": square,
    "triangle": triangle,
    "cross": cross,
    "ring": ring,
}
