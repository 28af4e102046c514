"""GenEval's rule on boxes, against scores that were counted by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import RewardSample
from megadiff.rewards.detectors import DetectedObject
from megadiff.rewards.geneval import RELATIONS, GenevalReward, relations
from megadiff.types import Prompt

DETECTOR = str(Path(__file__).parents[3] / "assets/detector")
LEFT, RIGHT, TOP, LOW = (0, 40, 20, 60), (70, 40, 90, 60), (40, 0, 60, 20), (40, 70, 60, 90)


def seen(label: str, *, box=LEFT, score: float = 0.95) -> DetectedObject:
    return DetectedObject(label=label, score=score, box=box)


def rows(**fields: object) -> Prompt:
    return Prompt(text="a photo", id=prompt_id("a photo", " "), fields=fields)


class FixedDetector:
    labels = frozenset({"cup", "horse"})

    def __init__(self, objects: Sequence[DetectedObject]) -> None:
        self.objects = list(objects)

    def detect(self, images: Sequence[np.ndarray], *, threshold: float):
        found = [detected for detected in self.objects if detected.score > threshold]
        return [found for _ in images]

    def to(self, device: torch.device) -> None: ...


class BoxColors:
    """An object to the left is red, others are blue."""

    def names(self, image: np.ndarray, objects: Sequence[DetectedObject], label: str) -> list[str]:
        return ["red" if detected.box == LEFT else "blue" for detected in objects]


def score(prompt: Prompt, objects: Sequence[DetectedObject]) -> tuple[float, float]:
    reward = GenevalReward(path=DETECTOR)
    reward._detector = FixedDetector(objects)
    reward._colors = BoxColors()
    pixels = np.zeros((1, 96, 96, 3), np.uint8)
    scores = reward.score([RewardSample(pixels=pixels, prompt=prompt, sample_index=0)])
    figures = reward.figures()
    assert scores == [figures["strict"]] and reward.figures() == {}
    return figures["strict"], figures["partial"]


class Case(NamedTuple):
    prompt: Prompt
    objects: list[DetectedObject]
    strict: float
    partial: float


one_cup = rows(tag="single_object", include=[{"class": "cup", "count": 1}])
both = rows(
    tag="two_object", include=[{"class": "cup", "count": 1}, {"class": "horse", "count": 1}]
)
three = rows(
    tag="counting",
    include=[{"class": "cup", "count": 3}],
    exclude=[{"class": "cup", "count": 4}],
)
red_cup = rows(tag="colors", include=[{"class": "cup", "count": 1, "color": "red"}])
right_of = rows(
    tag="position",
    include=[
        {"class": "cup", "count": 1},
        {"class": "horse", "count": 1, "position": ["right of", 0]},
    ],
)
red_and_blue = rows(
    tag="color_attr",
    include=[
        {"class": "cup", "count": 1, "color": "red"},
        {"class": "horse", "count": 1, "color": "blue"},
    ],
)
no_horse = rows(
    tag="single_object",
    include=[{"class": "cup", "count": 1}],
    exclude=[{"class": "horse", "count": 1}],
)
CUP, HORSE = seen("cup"), seen("horse", box=RIGHT)

CASES = {
    "cup there": Case(one_cup, [CUP], 1, 1),
    "cup missing": Case(one_cup, [HORSE], 0, 0),
    "nothing there": Case(one_cup, [], 0, 0),
    # GenEval itself wants at least one. 1 − |2 − 1| / 1 = 0 in exact counts.
    "two cups for one": Case(one_cup, [CUP, seen("cup", box=RIGHT)], 1, 0),
    # The public server's score for it is 1 − 3 / 1 = −2.
    "four cups for one": Case(one_cup, [CUP] * 4, 1, 0),
    "too unsure": Case(one_cup, [seen("cup", score=0.3)], 0, 0),
    "sure enough": Case(one_cup, [seen("cup", score=0.301)], 1, 1),
    "both": Case(both, [CUP, HORSE], 1, 1),
    "half of both": Case(both, [HORSE], 0, 1 / 2),
    "three": Case(three, [CUP] * 3, 1, 1),
    "two of three": Case(three, [CUP] * 2, 0, 2 / 3),
    "four of three": Case(three, [CUP] * 4, 0, 2 / 3),
    "seven of three": Case(three, [CUP] * 7, 0, 0),
    "counting needs 0.9": Case(three, [CUP, CUP, seen("cup", score=0.9)], 0, 2 / 3),
    "red": Case(red_cup, [CUP], 1, 1),
    "blue": Case(red_cup, [seen("cup", box=RIGHT)], 0, 1 / 2),
    "no cup to be red": Case(red_cup, [], 0, 0),
    # GenEval looks at the surest one only.
    "the surer is red": Case(red_cup, [seen("cup", box=RIGHT, score=0.5), CUP], 1, 0),
    "the surer is blue": Case(red_cup, [seen("cup", box=RIGHT), seen("cup", score=0.5)], 0, 0),
    "right of": Case(right_of, [CUP, HORSE], 1, 1),
    # The public server adds 1 after the failed position: (1 + 1 + 0 + 1) / 4.
    "mirrored": Case(right_of, [seen("cup", box=RIGHT), seen("horse")], 0, 2 / 3),
    "above and right of": Case(right_of, [CUP, seen("horse", box=TOP)], 1, 1),
    "above": Case(right_of, [CUP, seen("horse", box=(0, 0, 20, 20))], 0, 2 / 3),
    "too near": Case(right_of, [CUP, seen("horse", box=(3, 40, 23, 60))], 0, 2 / 3),
    "nothing to be right of": Case(right_of, [HORSE], 0, 1 / 3),
    "nothing on the right": Case(right_of, [CUP], 0, 1 / 3),
    "right colours": Case(red_and_blue, [CUP, HORSE], 1, 1),
    "swapped colours": Case(red_and_blue, [seen("cup", box=RIGHT), seen("horse")], 0, 1 / 2),
    "one colour": Case(red_and_blue, [CUP, seen("horse")], 0, 3 / 4),
    "excluded and absent": Case(no_horse, [CUP], 1, 1),
    "excluded and there": Case(no_horse, [CUP, HORSE], 0, 1 / 2),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_counted_by_hand(name: str) -> None:
    case = CASES[name]
    assert score(case.prompt, case.objects) == (case.strict, pytest.approx(case.partial))


def test_sixteen_of_a_class_are_counted() -> None:
    many = rows(tag="single_object", include=[{"class": "cup", "count": 16}])
    assert score(many, [CUP] * 40) == (1, 1)


def test_any_scene_scores_within_zero_and_one_and_exactly_one_is_strictly_right() -> None:
    random = np.random.default_rng(0)
    prompts = [one_cup, both, three, red_cup, right_of, red_and_blue, no_horse]
    for _ in range(300):
        objects = []
        for _ in range(random.integers(0, 6)):
            label = str(random.choice(["cup", "horse"]))
            box = [LEFT, RIGHT, TOP, LOW][random.integers(4)]
            objects.append(seen(label, box=box, score=float(random.uniform())))
        strict, partial = score(prompts[random.integers(len(prompts))], objects)
        assert strict in (0, 1) and 0 <= partial <= 1
        assert strict == 1 or partial < 1


def expected_relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Write the paper's appendix without vectors."""
    distance = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    length = math.hypot(*distance)
    found = set()
    for axis, (before, after) in enumerate([("left of", "right of"), ("above", "below")]):
        sizes = a[axis + 2] - a[axis] + b[axis + 2] - b[axis]
        rest = abs(distance[axis]) - 0.1 * sizes
        if rest > 0.001 and rest / length > 0.5:
            found.add(after if distance[axis] > 0 else before)
    return found


def test_relations_of_random_boxes() -> None:
    random = np.random.default_rng(1)
    counts = dict.fromkeys([*RELATIONS, "two at once", "none"], 0)
    for _ in range(500):
        corners = random.uniform(0, 100, (2, 2, 2))
        boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1).tolist()
        a, b = (seen("cup", box=tuple(box)) for box in boxes)
        result = relations(a, b)
        assert result == expected_relations(*boxes)
        mirrored = {"left of": "right of", "above": "below"}
        mirrored |= {after: before for before, after in mirrored.items()}
        assert relations(b, a) == {mirrored[relation] for relation in result}
        for relation in result or ["none"]:
            counts[relation] += 1
        counts["two at once"] += len(result) == 2
    assert min(counts.values()) > 10


GOOD = {"class": "cup", "count": 1}
HORSE_RIGHT = {"class": "horse", "count": 1, "position": ["right of", 0]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tag": "position"}, "no `include`"),
        ({"tag": "position", "include": []}, "no `include`"),
        ({"tag": "objects", "include": [GOOD]}, "single_object"),
        ({"include": [GOOD]}, "tag is None"),
        ({"tag": "colors", "include": "a cup"}, "list of objects"),
        ({"tag": "colors", "include": ["cup"]}, "include[0]"),
        ({"tag": "colors", "include": [{"class": "cup"}]}, "count None"),
        ({"tag": "colors", "include": [{**GOOD, "count": 0}]}, "count 0"),
        ({"tag": "colors", "include": [{**GOOD, "count": True}]}, "count True"),
        ({"tag": "counting", "include": [{**GOOD, "count": 17}]}, "count 17, must be a whole numb"),
        (
            {"tag": "color_attr", "include": [GOOD, {**GOOD, "color": "red"}]},
            "include names the class 'cup' 2 times, must be once",
        ),
        ({"tag": "colors", "include": [{**GOOD, "size": 3}]}, "'size'"),
        ({"tag": "colors", "include": [{**GOOD, "class": "cups"}]}, "did you mean 'cup'"),
        ({"tag": "colors", "include": [{**GOOD, "color": "teal"}]}, "red, orange"),
        ({"tag": "colors", "include": [{**GOOD, "color": "red"}]}, "args.clip"),
        ({"tag": "position", "include": [HORSE_RIGHT]}, "less than 0"),
        ({"tag": "position", "include": [GOOD, {**HORSE_RIGHT, "position": ["on", 0]}]}, "left of"),
        (
            {"tag": "position", "include": [GOOD, {**HORSE_RIGHT, "position": ["above", 1]}]},
            "less than 1",
        ),
        ({"tag": "counting", "include": [GOOD], "exclude": [{"class": "ufo", "count": 1}]}, "ufo"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused_by_name(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        GenevalReward(path=DETECTOR).validate([one_cup, rows(**fields)])
    assert words in str(caught.value) and "'a photo'" in str(caught.value)


def test_rows_as_geneval_writes_them_pass() -> None:
    named = [{"class": name, "count": 1} for name in ("computer mouse", "tv remote", "hair drier")]
    prompts = [one_cup, both, three, right_of, no_horse, rows(tag="two_object", include=named)]
    GenevalReward(path=DETECTOR).validate(prompts)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"reward": "loose"}, "strict, partial"),
        ({"threshold": 1.0}, "threshold=1.0"),
        ({"path": "/nowhere"}, "config.json"),
        ({"clip": "/nowhere"}, "not a folder"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GenevalReward(**{"path": DETECTOR, **args})
