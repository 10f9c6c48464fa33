"""Pictures of two shapes, 32 x 32, and what is written about them: full and short captions, and alt texts.

    full    a red circle top left and a blue ring bottom right on black
    short   a red circle
    alt     a circle, or: a picture, or: the full caption of another picture

A scene is a function of its split and number alone. Half of the alt texts are short, and half are wrong.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 210, 50),
    "purple": (160, 60, 190),
}  # fmt: skip
GROUNDS = {"white": (255, 255, 255), "grey": (128, 128, 128), "black": (0, 0, 0)}
SHAPES = ("circle", "square", "cross", "ring")
PLACES = ("top left", "top right", "bottom left", "bottom right")
WORDS = ("", "a", "and", "on", "picture", "top", "bottom", "left", "right", *COLOURS, *GROUNDS, *SHAPES)
"""Those of captions; the first one ends a caption, and fills what is behind it."""
LONGEST = 13
"""Words of a full caption."""
SIDE, HALF = 32, 8


@dataclass(frozen=True, slots=True)
class Scene:
    """A ground, and the place, colour and shape of two things, by their numbers, in the order of places."""

    ground: str
    things: tuple[tuple[int, str, str], ...]


@functools.cache
def scene(split: str, number: int) -> Scene:
    """A scene of a split."""
    draw = np.random.default_rng([split == "train", number])
    places = sorted(draw.choice(len(PLACES), 2, replace=False).tolist())
    things = tuple((place, str(draw.choice([*COLOURS])), str(draw.choice(SHAPES))) for place in places)
    return Scene(str(draw.choice([*GROUNDS])), things)


def full_caption(of: Scene) -> str:
    """What is where, in which colour."""
    return (
        " and ".join(f"a {colour} {shape} {PLACES[place]}" for place, colour, shape in of.things) + f" on {of.ground}"
    )


def short_caption(of: Scene) -> str:
    """The first thing."""
    _, colour, shape = of.things[0]
    return f"a {colour} {shape}"


def alt_text(split: str, number: int, scenes: int) -> str:
    """A text as pages have it: of little use, or that of another of so many scenes."""
    draw = np.random.default_rng([split == "train", number, 1])
    if draw.random() < 0.5:
        return full_caption(scene(split, int(draw.integers(scenes))))
    return "a picture" if draw.random() < 0.5 else f"a {scene(split, number).things[0][2]}"


def number_words(text: str) -> list[int]:
    """The numbers of a caption's words."""
    return [WORDS.index(word) for word in text.split()]


def draw_scene(of: Scene, seed: int) -> Tensor:
    """Its picture, uint8 [3, 32, 32]; things are of two sizes, each in the middle of its quarter."""
    draw = np.random.default_rng([seed])
    picture = np.empty((SIDE, SIDE, 3), np.uint8)
    picture[:] = GROUNDS[of.ground]
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    for place, colour, shape in of.things:
        down, right = rows - HALF - 2 * HALF * (place // 2), columns - HALF - 2 * HALF * (place % 2)
        size, away, near = draw.integers(5, 7), np.hypot(down, right), np.maximum(abs(down), abs(right))
        masks = {
            "circle": away <= size,
            "ring": (away <= size) & (away > size - 2.5),
            "square": near <= size - 1,
            "cross": (near <= size) & (np.minimum(abs(down), abs(right)) <= 1.5),
        }
        picture[masks[shape]] = COLOURS[colour]
    return torch.from_numpy(picture).permute(2, 0, 1).contiguous()


@functools.cache
def picture(split: str, number: int) -> Tensor:
    """The picture of a scene, uint8 [3, 32, 32]."""
    return draw_scene(scene(split, number), number)


def to_pixels(picture: Tensor) -> Tensor:
    """From -1 to 1, fp32."""
    return picture.float() / 127.5 - 1
