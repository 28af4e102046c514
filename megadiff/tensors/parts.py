"""What of a model's weights travels whole or stays where it is: a component's base weights, or its LoRA tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megadiff.parallel.plan import is_lora

Row = TypeVar("Row")


@dataclass(frozen=True, order=True)
class Part:
    component: str
    is_lora: bool = False

    def __str__(self) -> str:
        return f"{self.component}'s LoRA" if self.is_lora else self.component


def part_of(name: str) -> Part:
    """Of a tensor's name, which has its component in front."""
    return Part(name.partition(".")[0], is_lora(name))


def by_part(names: Iterable[str]) -> dict[Part, set[str]]:
    """The names of each part that has any."""
    parts: dict[Part, set[str]] = defaultdict(set)
    for name in names:
        parts[part_of(name)].add(name)
    return dict(parts)


def of_parts(rows: Mapping[str, Row], parts: Iterable[Part]) -> dict[str, Row]:
    """The rows (name → anything) of these parts."""
    wanted = set(parts)
    return {name: row for name, row in rows.items() if part_of(name) in wanted}
