"""Group weights that travel together: a component's base weights, or its LoRA tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megadiff.parallel.plan import is_lora

Row = TypeVar("Row")


# ordered: groups are sent and named in one order on every rank
@dataclass(frozen=True, order=True)
class WeightGroup:
    component: str
    is_lora: bool = False

    def __str__(self) -> str:
        return f"{self.component}'s LoRA" if self.is_lora else self.component


def weight_group_of(name: str) -> WeightGroup:
    """Return the group of a tensor. Its name has the component in front."""
    return WeightGroup(name.partition(".")[0], is_lora(name))


def names_by_weight_group(names: Iterable[str]) -> dict[WeightGroup, set[str]]:
    """Sort tensors' names by their group. Groups without a tensor are absent."""
    groups: dict[WeightGroup, set[str]] = defaultdict(set)
    for name in names:
        groups[weight_group_of(name)].add(name)
    return dict(groups)


def rows_of_weight_groups(rows: Mapping[str, Row], groups: Iterable[WeightGroup]) -> dict[str, Row]:
    """Select the rows (tensor's name → anything) of some groups."""
    wanted = set(groups)
    return {name: row for name, row in rows.items() if weight_group_of(name) in wanted}
