"""Edits of the shapes world: the data is what it says, and the reward knows a done edit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from examples.shapes.edit_reward import ShapesEditReward, ShapesEditStrictReward
from examples.shapes.edits import FILES, wanted, write_edits
from examples.shapes.world import COLORS, Scene, draw
from megadiff.rewards.base import RewardSample
from megadiff.types import Prompt

SHIPPED = Path(__file__).parents[4] / "assets/prompts/edits"


def _rows(folder: Path) -> Iterator[tuple[Prompt, np.ndarray]]:
    for name in FILES:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            picture = cv2.imread(str(folder / row.pop("image")))[..., ::-1]
            yield Prompt(text=row.pop("prompt"), id="0" * 16, fields=row), picture


def _score(reward: ShapesEditReward, prompt: Prompt, *pictures: np.ndarray) -> list[float]:
    samples = [
        RewardSample(pixels=np.ascontiguousarray(picture)[None], prompt=prompt, sample_index=index)
        for index, picture in enumerate(pictures)
    ]
    return list(reward.score(samples))


def test_the_shipped_data_is_what_the_program_writes(tmp_path):
    for path in write_edits(tmp_path):
        assert path.read_bytes() == (SHIPPED / path.name).read_bytes()
    for picture in tmp_path.rglob("*.png"):
        shipped = cv2.imread(str(SHIPPED / picture.relative_to(tmp_path)))
        assert np.array_equal(cv2.imread(str(picture)), shipped)


def test_only_the_done_edit_is_exact():
    strict = ShapesEditStrictReward()
    for prompt, before in _rows(SHIPPED):
        scene, index = wanted(prompt)
        done = draw(scene)
        moved = _with(scene, index, x=scene.objects[index].x + 6)
        faulty = [before, draw(moved), draw(Scene(objects=(), background=scene.background))]
        if len(scene.objects) > 1:
            other = 1 - index
            faulty.append(draw(_with(scene, other, rgb=COLORS[scene.objects[index].color])))
        assert _score(strict, prompt, done, *faulty) == [1.0, *[0.0] * len(faulty)]
        large = cv2.resize(done, (192, 192), interpolation=cv2.INTER_CUBIC)
        assert _score(strict, prompt, large) == [1.0]


def test_the_reward_rises_with_every_pixel_that_comes_nearer():
    dense = ShapesEditReward()
    for prompt, before in list(_rows(SHIPPED))[:8]:
        scene, _ = wanted(prompt)
        done = draw(scene).astype(np.float32)
        grey = np.full_like(done, 128)
        # a pale ghost of the wanted picture, up to half of it, which is no object yet
        ghosts = [grey + weight * (done - grey) for weight in (0.0, 0.1, 0.2, 0.3)]
        scores = _score(dense, prompt, *(ghost.astype(np.uint8) for ghost in ghosts))
        assert scores == sorted(scores) and len(set(scores)) == len(scores)
        undone, exact = _score(dense, prompt, before, done.astype(np.uint8))
        assert scores[0] < 0.5 > undone and exact == 1.0


def test_what_is_no_edit_is_refused():
    prompt, _ = next(_rows(SHIPPED))
    reward = ShapesEditReward()
    with pytest.raises(ValueError, match="'paint it red' is no edit of the shapes world"):
        reward.validate([replace(prompt, text="paint it red")])
    with pytest.raises(ValueError, match="the row's 'scene' is None, no scene"):
        reward.validate([replace(prompt, fields={})])
    shape = {"square": "circle"}.get(prompt.text.split()[2], "square")
    with pytest.raises(ValueError, match="has 0 objects of this shape, need 1"):
        reward.validate([replace(prompt, text=f"make the {shape} red")])


def _with(scene: Scene, index: int, **changes: object) -> Scene:
    objects = list(scene.objects)
    objects[index] = replace(objects[index], **changes)
    return replace(scene, objects=tuple(objects))
