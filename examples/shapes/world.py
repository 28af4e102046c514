"""Make the world of shapes: 1960 captions in seven tasks, random scenes that obey them, pictures.

Needs numpy and cv2 alone: worker processes import this module.

`python -m examples.shapes.world assets/prompts` writes the prompt files.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
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
# From the second object to the first; y is down.
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
TASK_FRACTIONS = {  # of pretraining images
    "single": 0.05,
    "colors": 0.1,
    "two": 0.1,
    "counting": 0.2,
    "position": 0.15,
    "attr": 0.2,
    "pos_attr": 0.2,
}
TASKS = tuple(TASK_FRACTIONS)
RL_CAPTIONS = 80  # of a task, in shapes_rl.jsonl
NEVER_HELD_OUT = ("single", "two")  # 4 and 12 captions: too few to split

_HELD_OUT_PERCENT = 20
# Number of objects → least and largest radius in pixels: four large ones would not fit.
_RADII = {1: (9.0, 15.0), 2: (8.0, 11.5), 3: (7.5, 9.5), 4: (7.5, 9.0)}
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
    """Say what a sentence asks for.

    objects: (colour or None for any, shape), in the order of the sentence; "two red stars" has two.
    relation: key of RELATIONS, of the first object to the second.
    """

    text: str
    task: str
    objects: tuple[tuple[str | None, str], ...]
    relation: str | None
    held_out: bool


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """Place one object. rgb: the jittered colour that is drawn.

    x, y: centre; radius: about half the extent; in pixels.
    """

    color: str
    shape: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    radius: float


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Hold what a picture shows. background: its grey level."""

    objects: tuple[SceneObject, ...]
    background: int


@cache
def captions() -> tuple[Caption, ...]:
    """Return all 1960 captions.

    Held out are those whose MD5 is below 20 modulo 100: every rebuild splits in the same way.
    """
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
    """Return the caption with exactly this text. Raises ValueError, with the nearest, for none."""
    caption = _captions_by_text().get(text)
    if caption is not None:
        return caption
    near = difflib.get_close_matches(text, _captions_by_text(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "one is e.g. 'a red circle above a blue star'"
    raise ValueError(
        f"{text[:200]!r} is none of the {len(captions())} captions of the shapes world; {hint}"
    )


def relation_holds(relation: str, dx: float, dy: float, *, gap: float = 0.0) -> bool:
    """Say whether an offset lies within 45° of the relation's direction, by more than `gap` pixels.

    dx, dy: from the second object to the first; floats, or arrays, which give an array of bool.
    """
    x, y = RELATIONS[relation]
    along = x * dx + y * dy
    across = abs(y * dx) + abs(x * dy)
    return along > across + gap


def render(caption: Caption, rng: np.random.Generator) -> np.ndarray:
    """Draw a random scene that obeys the caption. uint8 [64, 64, 3] RGB."""
    return draw(sample_scene(caption, rng))


def sample_scene(caption: Caption, rng: np.random.Generator) -> Scene:
    """Draw objects apart from each other, uniform over the layouts that obey the caption.

    Colours that it does not ask for are independent.
    """
    centers, radii = _sample_layout(len(caption.objects), caption.relation, rng)
    objects = []
    for (color, shape), (x, y), radius in zip(caption.objects, centers.tolist(), radii.tolist()):
        color = color or list(COLORS)[rng.integers(len(COLORS))]
        jitter = rng.integers(-_COLOR_JITTER, _COLOR_JITTER + 1, 3)
        jittered = np.add(COLORS[color], jitter).clip(0, 255)
        objects.append(
            SceneObject(
                color=color, shape=shape, rgb=tuple(jittered.tolist()), x=x, y=y, radius=radius
            )
        )
    return Scene(objects=tuple(objects), background=int(rng.integers(*_BACKGROUND)))


def draw(scene: Scene) -> np.ndarray:
    """Draw a scene as uint8 [64, 64, 3] RGB, anti-aliased."""
    canvas = np.full((SIZE * _SUPERSAMPLING, SIZE * _SUPERSAMPLING, 3), scene.background, np.uint8)
    for item in scene.objects:
        center = (item.x * _SUPERSAMPLING, item.y * _SUPERSAMPLING)
        radius = item.radius * _SUPERSAMPLING
        fill_shape(canvas, item.shape, center=center, radius=radius, color=item.rgb)
    return cv2.resize(canvas, (SIZE, SIZE), interpolation=cv2.INTER_AREA)


def fill_shape(
    canvas: np.ndarray,
    shape: str,
    *,
    center: tuple[float, float],
    radius: float,
    color: tuple[int, ...] | int,
) -> None:
    """Draw into the canvas (uint8 [H, W, C] or [H, W]), in its pixels, to a sixteenth of one."""
    scale = 1 << _SUBPIXEL_BITS  # OpenCV takes fixed-point coordinates
    if shape == "circle":
        at = (round(center[0] * scale), round(center[1] * scale))
        size = round(radius * scale)
        cv2.circle(canvas, at, size, color, cv2.FILLED, cv2.LINE_AA, _SUBPIXEL_BITS)
    else:
        corners = np.round((_OUTLINES[shape] * radius + center) * scale).astype(np.int32)
        cv2.fillPoly(canvas, [corners], color, cv2.LINE_AA, _SUBPIXEL_BITS)


def sample_images(count: int, *, seed: int) -> tuple[np.ndarray, list[str]]:
    """Draw `count` pictures of captions that are not held out, tasks in the mix of TASK_FRACTIONS.

    Returns uint8 [count, 64, 64, 3] RGB and their captions' texts. The same for the same seed,
    however many workers; fewer images of a seed are the first of more.
    Workers are spawned where that pays, one per core of this rank: a script that calls this at its
    top level needs `if __name__ == "__main__":`.
    """
    if count < 1:
        raise ValueError(f"count={count}, must be at least 1")
    sizes = [min(_CHUNK, count - start) for start in range(0, count, _CHUNK)]
    num_workers = min(share_of_cores(_MOST_WORKERS), count // _LEAST_PER_WORKER, len(sizes))

    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    texts: list[str] = []
    with worker_pool(num_workers) if num_workers > 1 else nullcontext() as pool:
        map_chunks = pool.map if pool else map
        for chunk in map_chunks(_sample_chunk, repeat(seed), range(len(sizes)), sizes):
            chunk_images, chunk_texts = chunk
            images[len(texts) : len(texts) + len(chunk_texts)] = chunk_images
            texts += chunk_texts
    return images, texts


def make_chunk(seed: int, number: int, count: int) -> tuple[np.ndarray, list[str]]:
    """Return the first `count` images of chunk `number` of a seed, as sample_images does."""
    digest = hashlib.blake2b(f"images/{seed}/{number}".encode(), digest_size=8).digest()
    return _sample_chunk(int.from_bytes(digest, "little"), 0, count)


def write_prompts(folder: Path) -> list[Path]:
    """Write the prompt files, rows {"prompt", "task"}, and return their paths.

    shapes_train.jsonl: the captions that are not held out.
    shapes_rl.jsonl: at most RL_CAPTIONS of each task of these, as three in four are of one task.
    shapes_heldout.jsonl: those that are held out, and all of the two tasks too small to split,
    which are in the first file too.
    """
    train = [caption for caption in captions() if not caption.held_out]
    files = {
        "shapes_train.jsonl": train,
        "shapes_rl.jsonl": _first_of_each_task(RL_CAPTIONS, train),
        "shapes_heldout.jsonl": [
            caption for caption in captions() if caption.held_out or caption.task in NEVER_HELD_OUT
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, selected in files.items():
        rows = [{"prompt": caption.text, "task": caption.task} for caption in selected]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(lines, encoding="utf-8")
    return [folder / name for name in files]


def _first_of_each_task(count: int, candidates: Sequence[Caption]) -> list[Caption]:
    """Return the first `count` captions of each task.

    In the order of a hash, which mixes colours, shapes and relations.
    """
    mixed = sorted(candidates, key=lambda caption: _digest(f"rl/{caption.text}"))
    selected: list[Caption] = []
    for task in TASKS:
        selected += [caption for caption in mixed if caption.task == task][:count]
    return selected


def _digest(text: str) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)


def _sentences() -> Iterator[tuple[str, str, tuple[tuple[str | None, str], ...], str | None]]:
    """Yield (task, text, objects, relation) of every caption."""
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
    """Yield the caption that joins two objects by "and", and the four that say how they lie."""
    a = " ".join(filter(None, ("a", *first)))  # the colour is None where any will do
    b = " ".join(filter(None, ("a", *second)))
    yield plain_task, f"{a} and {b}", (first, second), None
    for relation in RELATIONS:
        yield relation_task, f"{a} {relation} {b}", (first, second), relation


def _is_held_out(text: str, task: str) -> bool:
    return task not in NEVER_HELD_OUT and _digest(text) % 100 < _HELD_OUT_PERCENT


@cache
def _captions_by_text() -> dict[str, Caption]:
    return {caption.text: caption for caption in captions()}


@cache
def _training_captions() -> dict[str, list[Caption]]:
    by_task: dict[str, list[Caption]] = {task: [] for task in TASKS}
    for caption in captions():
        if not caption.held_out:
            by_task[caption.task].append(caption)
    return by_task


def _sample_layout(
    count: int, relation: str | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return centres [count, 2] as (x, y) and radii [count], in pixels."""
    # By rejection, many candidates at a time: of four objects about one layout in a hundred is free
    # of overlaps.
    first, second = np.triu_indices(count, 1)
    while True:
        radii = rng.uniform(*_RADII[count], (4**count, count))
        # A star's points reach to 1.18, and one pixel of background stays.
        margin = (1.2 * radii + 1)[..., None]
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
    """Return the first `size` images of a chunk: uint8 [size, 64, 64, 3], and their captions.

    All its randomness is (seed, chunk).
    """
    rng = np.random.default_rng((seed, chunk))
    by_task = _training_captions()
    fractions = list(TASK_FRACTIONS.values())
    images = np.empty((size, SIZE, SIZE, 3), np.uint8)
    texts = []
    for image in images:
        candidates = by_task[TASKS[rng.choice(len(TASKS), p=fractions)]]
        caption = candidates[rng.integers(len(candidates))]
        image[:] = render(caption, rng)
        texts.append(caption.text)
    return images, texts


def _star() -> np.ndarray:
    """Return five points at 1.18 and between them five notches at 0.5; the first point is up."""
    angle = np.deg2rad(-90 + 36 * np.arange(10))
    distance = np.where(np.arange(10) % 2 == 0, 1.18, 0.5)
    return np.stack([np.cos(angle), np.sin(angle)], 1) * distance[:, None]


def _triangle() -> np.ndarray:
    """Return corners at 1.12 from their centroid, which lies 0.15 below the origin; point up."""
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
