from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import permutations

import cv2
import numpy as np
import pytest

from examples.shapes.verifier import OTHER, Detection, detect, judge, verify
from examples.shapes.world import (
    COLORS,
    SHAPES,
    SIZE,
    TASKS,
    Caption,
    Scene,
    SceneObject,
    captions,
    draw,
    parse,
    render,
    sample_scene,
)

GRAY = (215, 215, 215)


def put(*objects: tuple[str, str, float, float, float], background: int = 215) -> np.ndarray:
    """A picture of (colour, shape, x, y, radius) objects."""
    return draw(
        Scene(
            objects=tuple(
                SceneObject(color=color, shape=shape, rgb=COLORS[color], x=x, y=y, radius=radius)
                for color, shape, x, y, radius in objects
            ),
            background=background,
        )
    )


def fulfils(scene: Scene, caption: Caption) -> bool | None:
    """Whether the scene is what the caption says, by its objects and not by its pixels.

    None where a relation holds or fails by less than 4 pixels, for a triangle's centroid lies below
    its centre.
    """
    if len(scene.objects) != len(caption.objects):
        return False
    answers = []
    for ordered in permutations(scene.objects):
        if any(
            each.shape != shape or color not in (None, each.color)
            for each, (color, shape) in zip(ordered, caption.objects)
        ):
            continue
        if caption.relation is None:
            return True
        dx, dy = ordered[0].x - ordered[1].x, ordered[0].y - ordered[1].y
        if abs(abs(dx) - abs(dy)) < 4:
            return None
        direction = (
            ("left of" if dx < 0 else "right of")
            if abs(dx) > abs(dy)
            else ("above" if dy < 0 else "below")
        )
        answers.append(direction == caption.relation)
    return any(answers)


def near_misses(rng: np.random.Generator) -> Callable[[Caption], list[Caption]]:
    """caption → others that differ from it in colours, in their number, in the relation, or in
    much.
    """
    same_shapes, same_first = defaultdict(list), defaultdict(list)
    for each in captions():
        same_shapes[_shapes(each)].append(each)
        same_first[each.objects[0]].append(each)

    def choose(caption: Caption) -> list[Caption]:
        alike = same_shapes[_shapes(caption)]
        uncolored = [each for each in alike if each.objects[0][0] is None]
        pools = (alike, alike, uncolored, same_first[caption.objects[0]], captions())
        return [pool[rng.integers(len(pool))] for pool in pools if pool]

    return choose


def _shapes(caption: Caption) -> tuple[str, ...]:
    return tuple(sorted(shape for _, shape in caption.objects))


@pytest.mark.slow
def test_every_render_of_every_caption_is_accepted() -> None:
    rng = np.random.default_rng(0)
    few = [each for each in captions() if each.task != "pos_attr"]
    asked = [*captions(), *few, *few]
    assert len(asked) >= 2800
    refused = [
        caption.text for caption in asked if not verify(render(caption, rng), caption).strict
    ]
    assert refused == []


def test_wrong_pairs_are_refused_and_right_ones_accepted() -> None:
    rng = np.random.default_rng(1)
    by_task = {task: [each for each in captions() if each.task == task] for task in TASKS}
    answers: Counter = Counter()
    mistakes, others = [], near_misses(rng)
    for round_ in range(560):
        own = by_task[TASKS[round_ % len(TASKS)]]
        caption = own[rng.integers(len(own))]
        scene = sample_scene(caption, rng)
        found = detect(draw(scene))
        for other in others(caption):
            expected = fulfils(scene, other)
            answers[expected] += 1
            if expected is not None and judge(found, other).strict != expected:
                mistakes.append((caption.text, other.text, expected, found))
    assert mistakes == []
    assert answers[False] >= 1000 and answers[True] >= 100, answers


def test_the_dense_reward_is_one_only_if_strict() -> None:
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(400):
        shown, asked = (captions()[i] for i in rng.integers(len(captions()), size=2))
        verdict = verify(render(shown, rng), asked)
        assert 0 <= verdict.dense <= 1 and (verdict.dense == 1) == verdict.strict
        assert verdict.strict or verdict.dense <= 0.5
        seen.add(round(verdict.dense, 3))
    assert len(seen) > 8


def ladder(text: str, *pictures: np.ndarray) -> list[float]:
    return [verify(pixels, parse(text)).dense for pixels in pictures]


def assert_rises(values: Sequence[float]) -> None:
    assert list(values) == sorted(set(values)), values


def test_partial_credit_rises_with_what_is_right() -> None:
    empty, star = put(), ("red", "star", 16, 16, 10)
    left, right = ("red", "star", 16, 32, 10), ("blue", "circle", 48, 32, 10)
    assert_rises(
        ladder(
            "a red star left of a blue circle",
            empty,
            put(("green", "square", 16, 16, 10)),
            put(star),
            put(("red", "star", 48, 32, 10), ("cyan", "circle", 16, 32, 10)),
            put(("red", "star", 48, 32, 10), ("blue", "circle", 16, 32, 10)),
            put(left, ("cyan", "circle", 48, 32, 10)),
            put(left, right),
        )
    )
    circles = [("cyan", "circle", x, y, 8) for x in (12, 32, 52) for y in (16, 48)]
    assert_rises(ladder("three cyan circles", *(put(*circles[:count]) for count in range(4))))
    assert_rises(ladder("three cyan circles", *(put(*circles[:count]) for count in (6, 5, 4, 3))))
    shape_only, color_only, neither = (
        put(("red", "circle", 32, 32, 10)),
        put(("blue", "star", 32, 32, 10)),
        put(("red", "star", 32, 32, 10)),
    )
    assert_rises(ladder("a blue circle", empty, neither, color_only, shape_only, put(right)))


def test_the_best_matching_is_found_where_a_greedy_one_fails() -> None:
    # The red square is as near to the blue square as the purple one is, but only it is near to the
    # red circle too.
    found = [
        Detection(color="red", shape="square", x=10, y=10, area=300),
        Detection(color="purple", shape="square", x=40, y=40, area=300),
    ]
    expected = 0.5 * (0.4 + 0.6) / 2
    for order in (found, found[::-1]):
        assert judge(order, parse("a red circle and a blue square")).dense == pytest.approx(
            expected
        )


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_detection_says_what_and_where(color: str, shape: str) -> None:
    (found,) = detect(put((color, shape, 20, 40, 10)))
    assert (found.color, found.shape) == (color, shape)
    assert abs(found.x - 20) < 1 and abs(found.y - 40 - (1.5 if shape == "triangle" else 0)) < 1
    area = {"circle": np.pi, "square": 1.72**2, "triangle": 1.63, "star": 1.73}[shape] * 100
    assert found.area == pytest.approx(area, rel=0.12)


@pytest.mark.parametrize("size", [32, 100, 256, 1024])
def test_detection_at_other_sizes(size: int) -> None:
    picture = put(("red", "circle", 16, 32, 12), ("blue", "star", 46, 32, 12))
    interpolation = cv2.INTER_AREA if size < SIZE else cv2.INTER_CUBIC
    pixels = cv2.resize(picture, (size, size), interpolation=interpolation)
    assert verify(pixels, parse("a red circle left of a blue star")).strict
    red, _ = detect(pixels)
    assert (red.x, red.y) == pytest.approx((16 * size / SIZE, 32 * size / SIZE), abs=0.02 * size)
    assert red.area == pytest.approx(np.pi * (12 * size / SIZE) ** 2, rel=0.08)


def test_a_picture_that_is_not_square() -> None:
    wide = np.full((SIZE, 2 * SIZE, 3), 215, np.uint8)
    wide[:, SIZE:] = put(("green", "triangle", 32, 32, 14))
    (found,) = detect(wide)
    assert (found.color, found.shape) == ("green", "triangle") and found.x == pytest.approx(
        96, abs=1
    )
    assert detect(np.ascontiguousarray(wide.transpose(1, 0, 2)))[0].y == pytest.approx(96, abs=1)


def rotated(degrees: float, *, aspect: float = 1.0) -> np.ndarray:
    """A red square, or a rectangle of the given height to width, turned."""
    pixels = np.full((SIZE, SIZE, 3), GRAY, np.uint8)
    corners = cv2.boxPoints(((32, 32), (24, 24 * aspect), degrees))
    return cv2.fillPoly(pixels, [corners.round().astype(np.int32)], COLORS["red"], cv2.LINE_AA)


def polygon(corners: int) -> np.ndarray:
    angle = 2 * np.pi * np.arange(corners) / corners - np.pi / 2
    points = (32 + 13 * np.stack([np.cos(angle), np.sin(angle)], 1)).round().astype(np.int32)
    return cv2.fillPoly(
        np.full((SIZE, SIZE, 3), GRAY, np.uint8), [points], COLORS["red"], cv2.LINE_AA
    )


def ring() -> np.ndarray:
    return cv2.circle(put(("red", "circle", 32, 32, 14)), (32, 32), 6, GRAY, cv2.FILLED)


def ellipse() -> np.ndarray:
    pixels = np.full((SIZE, SIZE, 3), GRAY, np.uint8)
    return cv2.ellipse(
        pixels, (32, 32), (14, 10), 0, 0, 360, COLORS["red"], cv2.FILLED, cv2.LINE_AA
    )


@pytest.mark.parametrize(
    "pixels",
    [
        rotated(45),
        rotated(0, aspect=0.7),
        polygon(5),
        ring(),
        ellipse(),
        np.full((SIZE, SIZE, 3), COLORS["red"], np.uint8),
    ],
    ids=["diamond", "rectangle", "pentagon", "ring", "ellipse", "all red"],
)
def test_what_is_none_of_the_shapes(pixels: np.ndarray) -> None:
    (found,) = detect(pixels)
    assert (found.color, found.shape) == ("red", None)


@pytest.mark.parametrize("rgb", [(90, 90, 90), (0, 0, 0), (140, 100, 100)])
def test_something_gray_is_something_else(rgb: tuple[int, int, int]) -> None:
    pixels = put(("red", "circle", 16, 16, 10))
    assert verify(pixels, parse("a red circle")).strict
    cv2.rectangle(pixels, (40, 40), (52, 52), rgb, cv2.FILLED)
    assert [each.color for each in detect(pixels)] == ["red", OTHER]
    assert not verify(pixels, parse("a red circle")).strict
    assert not verify(pixels, parse("a circle and a square")).strict


def test_a_shape_in_two_colours_is_refused() -> None:
    pixels = put(("red", "square", 32, 32, 14))
    pixels[:, 32:][pixels[:, 32:, 2] < 100] = COLORS["blue"]
    assert not any(
        verify(pixels, caption).strict
        for caption in captions()
        if caption.task in ("single", "colors")
    )


@pytest.mark.parametrize("std", [0, 8])
def test_blur_and_noise_are_forgiven(std: float) -> None:
    rng = np.random.default_rng(4)
    few = [each for each in captions() if each.task != "pos_attr"]
    accepted = 0
    for caption in few:
        pixels = render(caption, rng)
        pixels = pixels if std else cv2.GaussianBlur(pixels, (0, 0), 0.8)
        noisy = np.clip(pixels + rng.normal(0, std, pixels.shape), 0, 255).astype(np.uint8)
        accepted += verify(noisy, caption).strict
    assert accepted / len(few) >= 0.99


@pytest.mark.parametrize(
    "size",
    [
        (1, 1),
        (1, 2),
        (3, 1),
        (2, 64),
        (64, 2),
        (1, 5000),
        (5000, 1),
        (63, 65),
        (300, 17),
        (4096, 4096),
    ],
)
@pytest.mark.parametrize("kind", ["black", "white", "red", "random", "saturated"])
def test_never_an_exception(size: tuple[int, int], kind: str) -> None:
    rng = np.random.default_rng(5)
    flat = {"black": (0, 0, 0), "white": (255, 255, 255), "red": (255, 0, 0)}
    if kind in flat:
        pixels = np.full((*size, 3), flat[kind], np.uint8)
    else:
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels = pixels if kind == "random" else np.where(pixels > 127, 255, 0).astype(np.uint8)
    for text in ("a star", "four blue circles", "a red star left of a blue circle"):
        verdict = verify(pixels, parse(text))
        assert not verdict.strict and 0 <= verdict.dense <= 0.5
    if kind in ("black", "white"):
        assert detect(pixels) == []


def test_many_random_small_pictures() -> None:
    rng = np.random.default_rng(6)
    for _ in range(300):
        coarse = rng.integers(0, 256, (rng.integers(1, 12), rng.integers(1, 12), 3), dtype=np.uint8)
        pixels = cv2.resize(
            coarse,
            (SIZE, SIZE),
            interpolation=int(rng.choice([cv2.INTER_NEAREST, cv2.INTER_CUBIC])),
        )
        verdict = verify(pixels, captions()[rng.integers(len(captions()))])
        assert (verdict.dense == 1) == verdict.strict


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((64, 64, 3), np.float32),
        np.zeros((64, 64), np.uint8),
        np.zeros((64, 64, 4), np.uint8),
        np.zeros((1, 64, 64, 3), np.uint8),
        np.zeros((0, 64, 3), np.uint8),
    ],
)
def test_what_is_no_picture_is_refused(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must be uint8 \[H, W, 3\]"):
        verify(pixels, parse("a star"))


def test_pixels_are_left_as_they_are_and_may_be_a_read_only_view() -> None:
    stack = np.stack([put(("red", "circle", 32, 32, 12))] * 2)[:, ::-1]
    before = stack.copy()
    stack.flags.writeable = False
    assert verify(stack[1], parse("a red circle")).strict
    assert (stack == before).all()
