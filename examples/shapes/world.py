"""The world of shapes: 1960 captions in seven tasks, random scenes that obey them, and their pictures (numpy and cv2).

`python -m examples.shapes.world assets/prompts` writes the prompt files of both halves of the split.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, repeat
from pathlib import Path

import cv2
import numpy as np

from megadiff.process.workers import share_of_cores, worker_pool

SIZE = 64  # pixels, both sides of a picture
COLORS = {
    "red": (228, 32, 32),
    "yellow": (240, 216, 24),
    "green": (36, 184, 56),
    "cyan": (32, 208, 220),
    "blue": (40, 64, 228),
    "purple": (184, 40, 208),
}
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = {"two": 2, "three": 3, "four": 4}
RELATIONS = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}  # from second to first; y is down
TASKS = ("single", "colors", "two", "counting", "position", "attr", "pos_attr")
TASK_SHARES = {  # of pretraining images
    "single": 0.05,
    "colors": 0.1,
    "two": 0.1,
    "counting": 0.2,
    "position": 0.15,
    "attr": 0.2,
    "pos_attr": 0.2,
}
RL_CAPTIONS = 80  # of a task, in shapes_rl.jsonl
NEVER_HELD_OUT = ("single", "two")  # 4 and 12 captions: too few to split

_HELD_OUT_PERCENT = 20
_RADII = {
    1: (9.0, 15.0),
    2: (8.0, 11.5),
    3: (7.5, 9.5),
    4: (7.5, 9.0),
}  # pixels, by the number of objects
_RELATION_GAP = 5.0  # pixels by which a relation holds in a drawn scene
_COLOR_JITTER = 10  # of 255, each channel
_BACKGROUND = (185, 250)  # grey levels
_SUPERSAMPLING = 4
_SUBPIXEL_BITS = 4
_CHUNK = 500  # images that share a random generator in sample_images
_MOST_WORKERS = 64
_LEAST_PER_WORKER = 2000  # 0.5 s of work; a worker process takes about as long to start


@dataclass(frozen=True, kw_only=True)
class Caption:
    """A sentence and what it asks for. objects: (colour or None for any, shape) of each, in the order of the sentence;
    "two red stars" has two. relation: key of RELATIONS, of the first object to the second."""

    text: str
    task: str
    objects: tuple[tuple[str | None, str], ...]
    relation: str | None
    held_out: bool


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """rgb: the jittered colour that is drawn. x, y: centre, and radius: about half the extent, in pixels."""

    color: str
    shape: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    radius: float


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a picture shows. background: its grey level."""

    objects: tuple[SceneObject, ...]
    background: int


@cache
def captions() -> tuple[Caption, ...]:
    """All 1960 captions. Held out are those whose MD5 is below 20 modulo 100: every rebuild splits in the same way."""
    return tuple(
        Caption(
            text=text,
            task=task,
            objects=objects,
            relation=relation,
            held_out=_is_held_out(text, task),
        )
        for task, text, objects, relation in _sentences()
    )


def parse(text: str) -> Caption:
    """The caption with exactly this text. ValueError, with the nearest one, if the world has none."""
    found = _captions_by_text().get(text)
    if found is not None:
        return found
    near = difflib.get_close_matches(text, _captions_by_text(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "one is e.g. 'a red circle above a blue star'"
    raise ValueError(
        f"{text[:200]!r} is none of the {len(captions())} captions of the shapes world; {hint}"
    )


def relation_holds(relation: str, dx: float, dy: float, *, gap: float = 0.0) -> bool:
    """Whether the offset from the second object to the first lies within 45° of the relation's direction, and by more
    than `gap` pixels inside. dx, dy: floats, or arrays, which give an array of bool."""
    x, y = RELATIONS[relation]
    along, across = x * dx + y * dy, abs(y * dx) + abs(x * dy)
    return along > across + gap


def render(caption: Caption, rng: np.random.Generator) -> np.ndarray:
    """The picture of a random scene that obeys the caption. uint8 [64, 64, 3] RGB."""
    return draw(sample_scene(caption, rng))


def sample_scene(caption: Caption, rng: np.random.Generator) -> Scene:
    """Objects apart from each other, uniform over the layouts that obey the caption; colours not asked for are drawn
    independently."""
    centers, radii = _sample_layout(len(caption.objects), caption.relation, rng)
    objects = []
    for (color, shape), (x, y), radius in zip(caption.objects, centers.tolist(), radii.tolist()):
        color = color or list(COLORS)[rng.integers(len(COLORS))]
        jittered = np.add(COLORS[color], rng.integers(-_COLOR_JITTER, _COLOR_JITTER + 1, 3)).clip(
            0, 255
        )
        objects.append(
            SceneObject(
                color=color, shape=shape, rgb=tuple(jittered.tolist()), x=x, y=y, radius=radius
            )
        )
    return Scene(objects=tuple(objects), background=int(rng.integers(*_BACKGROUND)))


def draw(scene: Scene) -> np.ndarray:
    """uint8 [64, 64, 3] RGB, anti-aliased."""
    canvas = np.full((SIZE * _SUPERSAMPLING, SIZE * _SUPERSAMPLING, 3), scene.background, np.uint8)
    for each in scene.objects:
        center = (each.x * _SUPERSAMPLING, each.y * _SUPERSAMPLING)
        fill_shape(
            canvas, each.shape, center=center, radius=each.radius * _SUPERSAMPLING, color=each.rgb
        )
    return cv2.resize(canvas, (SIZE, SIZE), interpolation=cv2.INTER_AREA)


def fill_shape(
    canvas: np.ndarray,
    shape: str,
    *,
    center: tuple[float, float],
    radius: float,
    color: tuple[int, ...] | int,
) -> None:
    """Draws into the canvas (uint8 [H, W, C] or [H, W]), in its pixels, to a sixteenth of one."""
    one = 1 << _SUBPIXEL_BITS
    if shape == "circle":
        at = (round(center[0] * one), round(center[1] * one))
        cv2.circle(canvas, at, round(radius * one), color, cv2.FILLED, cv2.LINE_AA, _SUBPIXEL_BITS)
    else:
        corners = np.round((_OUTLINES[shape] * radius + center) * one).astype(np.int32)
        cv2.fillPoly(canvas, [corners], color, cv2.LINE_AA, _SUBPIXEL_BITS)


def sample_images(
    count: int, *, seed: int, num_workers: int | None = None
) -> tuple[np.ndarray, list[str]]:
    """Pretraining data: `count` pictures of captions that are not held out, tasks in the mix of TASK_SHARES.

    Returns uint8 [count, 64, 64, 3] RGB and their captions' texts. The same for the same seed, however many workers;
    fewer images of a seed are the first of more. num_workers: None is one process per core of this rank where that pays, 1 none.
    Workers are spawned (a fork would copy the parent's threads' locks and its CUDA context), so a script that calls
    this at its top level needs `if __name__ == "__main__":`.
    """
    if count < 1:
        raise ValueError(f"count={count}, must be at least 1")
    if num_workers is not None and num_workers < 1:
        raise ValueError(
            f"num_workers={num_workers}, must be at least 1; leave it out for one per core"
        )
    sizes = [min(_CHUNK, count - start) for start in range(0, count, _CHUNK)]
    if num_workers is None:
        num_workers = max(1, min(share_of_cores(_MOST_WORKERS), count // _LEAST_PER_WORKER))

    images, texts = np.empty((count, SIZE, SIZE, 3), np.uint8), []
    arguments = (repeat(seed), range(len(sizes)), sizes)
    if num_workers == 1:
        _collect(map(_sample_chunk, *arguments), images, texts)
    else:
        with worker_pool(min(num_workers, len(sizes))) as pool:
            _collect(pool.map(_sample_chunk, *arguments), images, texts)
    return images, texts


def make_chunk(seed: int, number: int, count: int) -> tuple[np.ndarray, list[str]]:
    """Return the first `count` images of chunk `number` of a seed, as sample_images does."""
    digest = hashlib.blake2b(f"images/{seed}/{number}".encode(), digest_size=8).digest()
    return _sample_chunk(int.from_bytes(digest, "little"), 0, count)


def write_prompts(folder: Path) -> list[Path]:
    """shapes_train.jsonl: the captions that are not held out; shapes_heldout.jsonl: those that are, and all of the two
    tasks too small to split, which are in both files; shapes_rl.jsonl: at most RL_CAPTIONS of each task of the first, as
    three in four of its captions are of one task. Rows {"prompt", "task"}. Returns the paths."""
    train = [each for each in captions() if not each.held_out]
    halves = {
        "shapes_train.jsonl": train,
        "shapes_rl.jsonl": _at_most(RL_CAPTIONS, train),
        "shapes_heldout.jsonl": [
            each for each in captions() if each.held_out or each.task in NEVER_HELD_OUT
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, half in halves.items():
        rows = (json.dumps({"prompt": each.text, "task": each.task}) + "\n" for each in half)
        (folder / name).write_text("".join(rows), encoding="utf-8")
    return [folder / name for name in halves]


def _at_most(count: int, of: Sequence[Caption]) -> list[Caption]:
    """The first `count` captions of each task in the order of a hash, which mixes colours, shapes and relations."""
    kept: list[Caption] = []
    for task in TASKS:
        ordered = sorted(
            (each for each in of if each.task == task), key=lambda each: _digest(f"rl/{each.text}")
        )
        kept += ordered[:count]
    return kept


def _digest(text: str) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)


def _sentences() -> Iterator[tuple[str, str, tuple[tuple[str | None, str], ...], str | None]]:
    """(task, text, objects, relation) of every caption."""
    for shape in SHAPES:
        yield "single", f"a {shape}", ((None, shape),), None
        for color in COLORS:
            yield "colors", f"a {color} {shape}", ((color, shape),), None
            for word, count in NUMBERS.items():
                yield "counting", f"{word} {color} {shape}s", ((color, shape),) * count, None
    for first, second in permutations(SHAPES, 2):
        yield from _pairs("two", "position", (None, first), (None, second))
        for first_color, second_color in permutations(COLORS, 2):
            yield from _pairs("attr", "pos_attr", (first_color, first), (second_color, second))


def _pairs(plain_task: str, relation_task: str, first: tuple, second: tuple) -> Iterator[tuple]:
    """The caption that joins two objects by "and", and the four that say how they lie."""
    a, b = (" ".join(filter(None, ("a", *each))) for each in (first, second))
    yield plain_task, f"{a} and {b}", (first, second), None
    for relation in RELATIONS:
        yield relation_task, f"{a} {relation} {b}", (first, second), relation


def _is_held_out(text: str, task: str) -> bool:
    return task not in NEVER_HELD_OUT and _digest(text) % 100 < _HELD_OUT_PERCENT


@cache
def _captions_by_text() -> dict[str, Caption]:
    return {each.text: each for each in captions()}


@cache
def _training_captions() -> dict[str, list[Caption]]:
    return {
        task: [each for each in captions() if each.task == task and not each.held_out]
        for task in TASKS
    }


def _sample_layout(
    count: int, relation: str | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Centres [count, 2] as (x, y) and radii [count], in pixels. By rejection, many candidates at a time: of four
    objects about one layout in a hundred is free of overlaps."""
    first, second = np.triu_indices(count, 1)
    while True:
        radii = rng.uniform(*_RADII[count], (4**count, count))
        margin = (1.2 * radii + 1)[
            ..., None
        ]  # a star's points reach to 1.18, and one pixel of background
        centers = rng.uniform(margin, SIZE - margin, (4**count, count, 2))
        offsets = centers[:, first] - centers[:, second]
        apart = 1.18 * (radii[:, first] + radii[:, second]) + 2
        valid = (np.hypot(offsets[..., 0], offsets[..., 1]) >= apart).all(1)
        if relation is not None:
            valid &= relation_holds(relation, offsets[:, 0, 0], offsets[:, 0, 1], gap=_RELATION_GAP)
        if valid.any():
            chosen = valid.argmax()
            return centers[chosen], radii[chosen]


def _sample_chunk(seed: int, chunk: int, size: int) -> tuple[np.ndarray, list[str]]:
    """The first `size` images of a chunk: uint8 [size, 64, 64, 3], and captions. All its randomness is (seed, chunk)."""
    rng = np.random.default_rng((seed, chunk))
    by_task, shares = _training_captions(), [TASK_SHARES[task] for task in TASKS]
    images, texts = np.empty((size, SIZE, SIZE, 3), np.uint8), []
    for image in images:
        candidates = by_task[TASKS[rng.choice(len(TASKS), p=shares)]]
        caption = candidates[rng.integers(len(candidates))]
        image[:] = render(caption, rng)
        texts.append(caption.text)
    return images, texts


def _collect(
    chunks: Iterator[tuple[np.ndarray, list[str]]], images: np.ndarray, texts: list[str]
) -> None:
    """Copies the chunks, as they arrive, to their places in `images`, and their captions to the end of `texts`."""
    for chunk_images, chunk_texts in chunks:
        images[len(texts) : len(texts) + len(chunk_images)] = chunk_images
        texts += chunk_texts


def _star() -> np.ndarray:
    """Five points at 1.18, and between them five notches at 0.5; the first point is up."""
    angle = np.deg2rad(-90 + 36 * np.arange(10))
    distance = np.where(np.arange(10) % 2 == 0, 1.18, 0.5)
    return np.stack([np.cos(angle), np.sin(angle)], 1) * distance[:, None]


def _triangle() -> np.ndarray:
    """Equilateral, point up, corners at 1.12 from its centroid, which lies 0.15 below the origin."""
    angle = np.deg2rad([-90, 30, 150])
    return np.stack([np.cos(angle), np.sin(angle)], 1) * 1.12 + (0, 0.15)


_OUTLINES = {  # corners [N, 2] as (x, y) at radius 1; all shapes look about equally large
    "square": np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.86,
    "triangle": _triangle(),
    "star": _star(),
}

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.shapes.world FOLDER")
    write_prompts(Path(sys.argv[1]))
