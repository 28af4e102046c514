from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from examples.shapes import world
from examples.shapes.world import (
    SIZE,
    TASK_FRACTIONS,
    TASKS,
    captions,
    parse,
    render,
    sample_images,
    sample_scene,
)

ROOT = Path(__file__).parents[4]


def test_captions_are_these_and_stay_these() -> None:
    assert Counter(each.task for each in captions()) == dict(
        single=4, colors=24, two=12, counting=72, position=48, attr=360, pos_attr=1440
    )
    assert len({each.text for each in captions()}) == len(captions()) == 1960


def test_the_split_is_this_and_stays_this() -> None:
    # The counts of the proof with which the accuracies of docs/shapes.md can be compared.
    held_out = Counter(each.task for each in captions() if each.held_out)
    assert held_out == dict(colors=6, counting=13, position=7, attr=71, pos_attr=287)
    assert parse("two yellow circles").held_out and not parse("two red circles").held_out


@pytest.mark.parametrize(
    ("text", "task", "objects", "relation"),
    [
        ("a star", "single", ((None, "star"),), None),
        ("a red circle", "colors", (("red", "circle"),), None),
        ("three blue squares", "counting", (("blue", "square"),) * 3, None),
        ("a star and a circle", "two", ((None, "star"), (None, "circle")), None),
        ("a star left of a circle", "position", ((None, "star"), (None, "circle")), "left of"),
        ("a red star and a blue circle", "attr", (("red", "star"), ("blue", "circle")), None),
        (
            "a red star below a blue circle",
            "pos_attr",
            (("red", "star"), ("blue", "circle")),
            "below",
        ),
    ],
)
def test_parse(text: str, task: str, objects: tuple, relation: str | None) -> None:
    caption = parse(text)
    assert (caption.text, caption.task, caption.objects, caption.relation) == (
        text,
        task,
        objects,
        relation,
    )


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("a red cirle", "did you mean 'a red circle'"),
        ("A Red Circle", "did you mean 'a red circle'"),
        ("a red star over a blue circle", "did you mean 'a red star"),
        ("a photo of a cat on a sofa in the rain", "one is e.g."),
        ("", "one is e.g."),
    ],
)
def test_parse_refuses_what_is_no_caption(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=r"none of the 1960 captions") as error:
        parse(text)
    assert near in str(error.value)


@pytest.mark.parametrize("task", TASKS)
def test_scenes_obey_their_captions(task: str) -> None:
    rng = np.random.default_rng(0)
    for caption in (each for each in captions() if each.task == task):
        scene = sample_scene(caption, rng)
        assert [each.shape for each in scene.objects] == [shape for _, shape in caption.objects]
        for each, (color, _) in zip(scene.objects, caption.objects):
            assert color in (None, each.color)
            assert 1 <= each.x - 1.2 * each.radius and each.x + 1.2 * each.radius <= SIZE - 1
            assert 1 <= each.y - 1.2 * each.radius and each.y + 1.2 * each.radius <= SIZE - 1
        if caption.relation is not None:
            first, second = scene.objects
            angle = (
                np.degrees(np.arctan2(second.y - first.y, first.x - second.x)) % 360
            )  # y is down
            nearest = {0: "right of", 1: "above", 2: "left of", 3: "below"}[round(angle / 90) % 4]
            assert nearest == caption.relation


def test_colours_not_asked_for_and_places_vary() -> None:
    rng = np.random.default_rng(0)
    scenes = [sample_scene(parse("a star"), rng) for _ in range(300)]
    assert min(Counter(scene.objects[0].color for scene in scenes).values()) > 25
    for values in (
        [scene.objects[0].x for scene in scenes],
        [scene.objects[0].y for scene in scenes],
        [scene.objects[0].radius for scene in scenes],
        [scene.background for scene in scenes],
    ):
        assert len(set(values)) > 50 or isinstance(values[0], int) and len(set(values)) > 40


def test_render_is_seeded_and_antialiased() -> None:
    caption = parse("a red circle above a blue star")
    first, again, other = (render(caption, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first.shape == (SIZE, SIZE, 3) and first.dtype == np.uint8
    assert (first == again).all() and (first != other).any()
    background = np.abs(first.astype(int) - first[0, 0]).max(2) == 0
    colors = Counter(map(tuple, first[~background].tolist()))
    assert (
        sum(colors.values()) - sum(count for _, count in colors.most_common(2)) > 30
    )  # blended edge pixels


def test_sample_images_does_not_depend_on_workers_or_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, texts = sample_images(1100, seed=3)
    assert images.shape == (1100, SIZE, SIZE, 3) and images.dtype == np.uint8 and len(texts) == 1100
    fewer, fewer_texts = sample_images(600, seed=3)
    assert (fewer == images[:600]).all() and fewer_texts == texts[:600]
    monkeypatch.setattr(world, "share_of_cores", lambda most: 2)
    monkeypatch.setattr(world, "_LEAST_PER_WORKER", 500)
    by_two, texts_by_two = sample_images(1100, seed=3)
    assert (images == by_two).all() and texts == texts_by_two
    assert (sample_images(100, seed=4)[0] != images[:100]).any()
    assert len(np.unique(images.reshape(1100, -1), axis=0)) == 1100  # no chunk repeats another


def test_sample_images_draws_training_captions_in_the_mix() -> None:
    _, texts = sample_images(3000, seed=0)
    drawn = [parse(text) for text in texts]
    assert not any(each.held_out for each in drawn)
    counts = Counter(each.task for each in drawn)
    assert sum(TASK_FRACTIONS.values()) == pytest.approx(1)
    for task, share in TASK_FRACTIONS.items():
        assert counts[task] / 3000 == pytest.approx(share, abs=0.03)


def test_sample_images_refuses_none() -> None:
    with pytest.raises(ValueError, match="count=0"):
        sample_images(0, seed=0)


def test_the_prompt_files_are_what_the_world_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", world.__name__, str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (ROOT / "assets/prompts" / path.name).read_bytes(), (
            f"run: {' '.join(command)}"
        )
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.iterdir()
    }
    train, held_out = (
        {row["prompt"] for row in rows[f"shapes_{half}"]} for half in ("train", "heldout")
    )
    assert train | held_out == {each.text for each in captions()}
    assert {parse(text).task for text in train & held_out} == {"single", "two"}
    assert all(row["task"] == parse(row["prompt"]).task for half in rows.values() for row in half)


def test_the_world_needs_no_torch() -> None:
    code = "import sys, examples.shapes.verifier; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_rl_captions_are_training_captions_and_no_task_outweighs_the_rest(tmp_path):
    world.write_prompts(tmp_path)
    train, rl, heldout = (
        [json.loads(line) for line in (tmp_path / f"shapes_{name}.jsonl").read_text().splitlines()]
        for name in ("train", "rl", "heldout")
    )
    assert {row["prompt"] for row in rl} <= {row["prompt"] for row in train}
    assert not {row["prompt"] for row in rl if row["task"] not in world.NEVER_HELD_OUT} & {
        row["prompt"] for row in heldout
    }
    counts, available = Counter(row["task"] for row in rl), Counter(row["task"] for row in train)
    assert counts == {task: min(world.RL_CAPTIONS, available[task]) for task in TASKS}
