"""Make edits of the world of shapes: pictures, and instructions such as "make the circle red".

Each edit changes the colour of one object and nothing else, so a scene says exactly what is wanted.

`python -m examples.shapes.edits assets/prompts/edits` writes the prompt files and pictures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from examples.shapes.pictured_prompts import write_pictured_prompts
from examples.shapes.world import (
    COLORS,
    SHAPES,
    Caption,
    Scene,
    SceneObject,
    draw,
    sample_scene,
)
from megadiff.types import Prompt

SEED = 25
FILES = {"edits_rl.jsonl": 48, "edits_heldout.jsonl": 24}  # → edits
SCENE = "scene"  # the column of a row that says what its picture shows
INSTRUCTION = re.compile(rf"make the ({'|'.join(SHAPES)}) ({'|'.join(COLORS)})")


def wanted(prompt: Prompt) -> tuple[Scene, int]:
    """Return the scene after the edit, and which of its objects was changed.

    Raises ValueError for an instruction or a scene that is none of this world's.
    """
    match = INSTRUCTION.fullmatch(prompt.text)
    if match is None:
        raise ValueError(
            f"{prompt.text[:200]!r} is no edit of the shapes world; one is e.g. "
            "'make the circle red'"
        )
    shape, color = match.groups()
    scene = _scene(prompt.fields.get(SCENE))
    indices = [index for index, item in enumerate(scene.objects) if item.shape == shape]
    if len(indices) != 1:
        raise ValueError(
            f"{prompt.text!r}: the row's scene has {len(indices)} objects of this shape, need 1"
        )
    (index,) = indices
    objects = list(scene.objects)
    objects[index] = replace(objects[index], color=color, rgb=COLORS[color])
    return replace(scene, objects=tuple(objects)), index


def mask_of(scene: Scene, index: int) -> np.ndarray:
    """Return how much of each pixel an object covers, float32 [64, 64] in [0, 1]."""
    white = replace(scene.objects[index], rgb=(255, 255, 255))
    return draw(Scene(objects=(white,), background=0))[..., 0].astype(np.float32) / 255


def write_edits(folder: Path) -> list[Path]:
    """Write prompt files of rows {"prompt", "image", "scene"}, and the pictures that they name.

    Returns the prompt files' paths. The same in every version: the seed is fixed.
    """

    def rows(rng: np.random.Generator) -> tuple[np.ndarray, list[dict[str, object]]]:
        instruction, scene = _sample_edit(rng)
        return draw(scene), [{"prompt": instruction, SCENE: _columns(scene)}]

    return write_pictured_prompts(folder, FILES, rows, seed=SEED)


def _sample_edit(rng: np.random.Generator) -> tuple[str, Scene]:
    """Draw a scene of one or two shapes, and another colour for the first."""
    shapes = rng.permutation(SHAPES)[: rng.integers(1, 3)].tolist()
    colors = rng.permutation(list(COLORS)).tolist()
    # two objects never have one colour, before or after: a blob is told by its colour
    new_color = colors.pop()
    objects = tuple(zip(colors, shapes))
    caption = Caption(text="", task="", objects=objects, relation=None, held_out=False)
    return f"make the {shapes[0]} {new_color}", sample_scene(caption, rng)


def _columns(scene: Scene) -> dict[str, object]:
    """Return the scene as JSON values."""
    objects = []
    for item in scene.objects:
        objects.append([item.color, item.shape, *item.rgb, item.x, item.y, item.radius])
    return {"background": scene.background, "objects": objects}


def _scene(value: object) -> Scene:
    """Read what _columns() wrote. Raises ValueError for anything else."""
    try:
        assert isinstance(value, Mapping)
        objects = []
        for color, shape, red, green, blue, x, y, radius in value["objects"]:
            item = SceneObject(
                color=color,
                shape=shape,
                rgb=(int(red), int(green), int(blue)),
                x=float(x),
                y=float(y),
                radius=float(radius),
            )
            objects.append(item)
        return Scene(objects=tuple(objects), background=int(value["background"]))
    except (AssertionError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"the row's {SCENE!r} is {value!r:.200}, no scene of the shapes world; "
            "write rows by `python -m examples.shapes.edits FOLDER`"
        ) from None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.shapes.edits FOLDER")
    write_edits(Path(sys.argv[1]))
