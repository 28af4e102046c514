"""Reward geneval: are the objects in the image those that the prompt's row lists?

Ghosh et al., "GenEval", arXiv 2310.11513.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from megadiff.process.doors import near
from megadiff.rewards.base import Reward, RewardContext, RewardSample
from megadiff.rewards.clip_colors import COLORS, ClipColors
from megadiff.rewards.clip_folder import load_config
from megadiff.rewards.detectors import (
    DetectedObject,
    Detector,
    folder_labels,
    geneval_name,
    load_detector,
)
from megadiff.types import Prompt

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
MODES = ("strict", "partial")
MAX_OBJECTS = 16  # of a class, the surest
MARGIN = 0.1  # of both objects' sizes: centres nearer than that are not beside each other

ByLabel = Mapping[str, Sequence[DetectedObject]]


@dataclass(frozen=True, kw_only=True)
class Clause:
    """Ask for objects of a class.

    color: "" for any. relation: "" for anywhere, else to the objects of include[target].
    """

    label: str
    count: int
    color: str = ""
    relation: str = ""
    target: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold what a prompt's columns ask for. exclude: fewer than count of each are allowed."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...]


class GenevalReward(Reward):
    """Score the objects that a detector finds against the row's include and exclude.

    path: folder of a detector, see detectors.py. clip: folder of a CLIP model, for rows with
    colours.
    reward: strict is GenEval's rule, 1 or 0. partial is the mean over all that is asked for, with
    exact counts, as Flow-GRPO trains (arXiv 2505.05470, section 4). Both are logged.
    threshold: objects score more than this; counting_threshold in rows tagged counting.
    Of a video the middle frame is looked at.
    """

    workers = 1

    def __init__(
        self,
        *,
        path: str,
        clip: str = "",
        reward: str = "strict",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
    ) -> None:
        if reward not in MODES:
            raise ValueError(f"reward={reward!r} is unknown; known: {', '.join(MODES)}")
        for name, value in [("threshold", threshold), ("counting_threshold", counting_threshold)]:
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} is outside 0..1, no object could pass it")
        if clip:
            load_config(Path(clip))

        self.path = Path(path)
        self.clip = clip
        self.mode = reward
        self.threshold = threshold
        self.counting_threshold = counting_threshold
        self._labels = folder_labels(self.path)
        self._detector: Detector | None = None
        self._colors: ClipColors | None = None
        self._scores: dict[str, list[float]] = {mode: [] for mode in MODES}

    def open(self, context: RewardContext) -> None:
        self._device = context.device
        self._detector = load_detector(self.path, context.device)
        if self.clip:
            self._colors = ClipColors(Path(self.clip), context.device)

    def sleep(self) -> None:
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        for model in (self._detector, self._colors):
            if model is not None:
                model.to(device)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        assert self._detector is not None  # open() comes first
        images = [sample.pixels[len(sample.pixels) // 2] for sample in samples]
        least = min(self.threshold, self.counting_threshold)
        rewards = []
        for sample, image, objects in zip(
            samples, images, self._detector.detect(images, threshold=least), strict=True
        ):
            scores = self._score_objects(read_row(sample.prompt), image, objects)
            rewards.append(scores[self.mode])
            for mode, score in scores.items():
                self._scores[mode].append(score)
        return rewards

    def _score_objects(
        self, row: Row, image: np.ndarray, objects: Sequence[DetectedObject]
    ) -> dict[str, float]:
        """Return the image's score in each mode."""
        threshold = self.counting_threshold if row.tag == "counting" else self.threshold
        by_label = surest(objects, threshold)

        def colors_of(wanted: Sequence[DetectedObject], label: str) -> list[str]:
            assert self._colors is not None  # validate() refused other rows
            return self._colors.names(image, wanted, label)

        return {
            "strict": float(min(terms(row, by_label, colors_of, exact=False)) == 1),
            "partial": fmean(terms(row, by_label, colors_of, exact=True)),
        }

    def figures(self) -> dict[str, float]:
        scores = self._scores
        self._scores = {mode: [] for mode in MODES}
        return {mode: fmean(values) for mode, values in scores.items() if values}

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            row = read_row(prompt)
            for clause in (*row.include, *row.exclude):
                if clause.label not in self._labels:
                    raise _refused(
                        prompt,
                        f"class {clause.label!r} is unknown to the detector {self.path}"
                        f"{near(clause.label, self._labels)}; it knows {len(self._labels)}: "
                        f"{', '.join(sorted(self._labels)[:8])}, …",
                    )
                if clause.color and not self.clip:
                    raise _refused(
                        prompt,
                        f"color {clause.color!r} needs a CLIP model; set reward.{self.name}"
                        ".args.clip to its folder, or leave rows with colours to another reward "
                        f"by reward.{self.name}.only, e.g. {{tag: [counting, position]}}",
                    )

    def close(self) -> None:
        self._detector = None
        self._colors = None


def surest(objects: Sequence[DetectedObject], threshold: float) -> dict[str, list[DetectedObject]]:
    """Return the objects over the threshold by class, the surest first, MAX_OBJECTS of each."""
    by_label: dict[str, list[DetectedObject]] = {}
    for detected in sorted(objects, key=lambda detected: -detected.score):
        of_label = by_label.setdefault(detected.label, [])
        if detected.score > threshold and len(of_label) < MAX_OBJECTS:
            of_label.append(detected)
    return by_label


def terms(
    row: Row,
    by_label: ByLabel,
    colors_of: Callable[[Sequence[DetectedObject], str], list[str]],
    *,
    exact: bool,
) -> list[float]:
    """Return a number in [0, 1] for each thing that the row asks for, 1 where it is as asked.

    Clauses of include give one for the count, one for the colour, one for the place. So a row has
    as many whatever is found. exact: more objects than asked for are wrong, too; else only the
    surest are looked at, and exclude limits the others.
    """
    values: list[float] = []
    # For each clause the objects that are as it asks; none where one of its terms fails.
    matches: list[Sequence[DetectedObject]] = []
    for clause in row.include:
        objects = by_label.get(clause.label, [])
        if not exact:
            objects = objects[: clause.count]
        values.append(_closeness(len(objects), clause.count))

        # With a wrong count it is open which of them should be red, or to the left.
        if len(objects) != clause.count:
            objects = []
        if clause.color:
            colors = colors_of(objects, clause.label) if objects else []
            values.append(_closeness(colors.count(clause.color), clause.count))
            if colors.count(clause.color) != clause.count:
                objects = []
        if clause.relation:
            is_there = bool(objects) and _all_placed(
                objects, clause.relation, matches[clause.target]
            )
            values.append(float(is_there))
            if not is_there:
                objects = []
        matches.append(objects)

    # Exact counts forbid more of a class already.
    counted = {clause.label for clause in row.include} if exact else set()
    for clause in row.exclude:
        if clause.label not in counted:
            values.append(float(len(by_label.get(clause.label, [])) < clause.count))
    return values


def _closeness(count: int, wanted: int) -> float:
    """Return 1 for the wanted count, less for others, 0 from twice the count on."""
    return max(0.0, 1 - abs(count - wanted) / wanted)


def _all_placed(
    objects: Sequence[DetectedObject], relation: str, targets: Sequence[DetectedObject]
) -> bool:
    """Say whether each object is in the relation to each target; there must be one."""
    placed = [relation in relations(a, b) for a in objects for b in targets]
    return bool(placed) and all(placed)


def relations(a: DetectedObject, b: DetectedObject) -> set[str]:
    """Return where a is from b, of RELATIONS: two in a diagonal, none where they are too near."""
    offset = _centre(a) - _centre(b)
    margin = MARGIN * (_size(a) + _size(b))
    beyond = np.maximum(np.abs(offset) - margin, 0) * np.sign(offset)
    if (np.abs(beyond) < 1e-3).all():
        return set()

    x, y = beyond / math.hypot(*offset)
    is_so = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, holds in is_so.items() if holds}


def _centre(detected: DetectedObject) -> np.ndarray:
    left, top, right, bottom = detected.box
    return np.array([left + right, top + bottom]) / 2


def _size(detected: DetectedObject) -> np.ndarray:
    left, top, right, bottom = detected.box
    return np.array([right - left, bottom - top])


def read_row(prompt: Prompt) -> Row:
    """Return what the prompt's columns tag, include and exclude ask for.

    Raises ValueError, naming the prompt, where they are not as in GenEval's
    evaluation_metadata.jsonl.
    """
    tag = prompt.fields.get("tag")
    if tag not in TAGS:
        raise _refused(prompt, f"tag is {tag!r}, must be one of {', '.join(TAGS)}")
    if not prompt.fields.get("include"):
        raise _refused(
            prompt,
            'the row has no `include`, needs a list such as [{"class": "cup", "count": 2}]; '
            "`megadiff prompts import geneval` writes such rows",
        )
    return Row(
        tag=str(tag),
        include=_read_clauses(prompt, "include"),
        exclude=_read_clauses(prompt, "exclude"),
    )


def _read_clauses(prompt: Prompt, key: str) -> tuple[Clause, ...]:
    entries = prompt.fields.get(key) or []
    if not isinstance(entries, list):
        raise _refused(prompt, f"{key} is {_shown(entries)}, must be a list of objects")
    clauses = tuple(
        _read_clause(prompt, f"{key}[{index}]", entry, index) for index, entry in enumerate(entries)
    )

    labels = [clause.label for clause in clauses]
    doubles = sorted({label for label in labels if labels.count(label) > 1})
    if doubles:
        raise _refused(
            prompt,
            f"{key} names the class {doubles[0]!r} {labels.count(doubles[0])} times, must be once: "
            "each would count all objects of the class",
        )
    return clauses


def _read_clause(prompt: Prompt, where: str, entry: object, index: int) -> Clause:
    """Read include[index] or exclude[index]."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
        raise _refused(prompt, f"{where} is {_shown(entry)}, must be an object with a class")
    unknown = sorted(entry.keys() - {"class", "count", "color", "position"})
    if unknown:
        raise _refused(
            prompt,
            f"{where} has {unknown[0]!r}, which is none of class, count, color, position",
        )

    count = entry.get("count")
    # Not isinstance: True would pass for 1.
    if type(count) is not int or not 1 <= count <= MAX_OBJECTS:
        raise _refused(
            prompt,
            f"{where} has count {count!r}, must be a whole number from 1 to {MAX_OBJECTS}: of a "
            "class no more objects are looked at",
        )

    # Columns of a parquet file are null where a row has none.
    color = entry.get("color") or ""
    if color and color not in COLORS:
        raise _refused(prompt, f"{where} has color {color!r}, known: {', '.join(COLORS)}")

    relation, target = _read_position(prompt, where, entry.get("position"), index)
    return Clause(
        label=geneval_name(entry["class"]),
        count=count,
        color=color,
        relation=relation,
        target=target,
    )


def _read_position(prompt: Prompt, where: str, position: object, index: int) -> tuple[str, int]:
    """Return the relation, "" without one, and the clause of include that it is to."""
    if position is None:
        return "", 0
    if not isinstance(position, list) or len(position) != 2 or position[0] not in RELATIONS:
        raise _refused(
            prompt,
            f"{where} has position {_shown(position)}, must be [relation, index] with a relation "
            f"of {', '.join(RELATIONS)}",
        )
    relation, target = position
    if type(target) is not int or not 0 <= target < index:
        raise _refused(
            prompt,
            f"{where} has position {_shown(position)}: {target!r} must be the index of a clause "
            f"before it, less than {index}",
        )
    return relation, target


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:100]  # parquet has bytes and dates


def _refused(prompt: Prompt, reason: str) -> ValueError:
    return ValueError(f"the geneval reward cannot score the prompt {prompt.text[:200]!r}: {reason}")
