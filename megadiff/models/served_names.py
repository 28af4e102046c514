"""Map diffusers' names of weights to vllm-omni's, which packs several into one parameter.

The map itself is data, in models/<model>/plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Name shards of unequal sizes, as of queries and fewer keys. parts: their proportion."""

    names: tuple[str, ...]
    parts: tuple[int, ...]


# vllm-omni's module → diffusers' modules in it, shards along axis 0, of equal size but for
# Segments. Names are the ends of whole ones. "" is the module around it: vllm-omni keeps that one's
# parameters in a module of its own. A key may be a parameter's name too, its leaf included. What is
# not listed has the same name on both sides.
ServedNames = Mapping[str, Sequence[str] | Segments]


@dataclass(frozen=True, kw_only=True)
class ServedPlace:
    """Locate one diffusers weight: a shard along axis 0 of vllm-omni's parameter.

    parts: the proportion of the parameter's shards.
    """

    parameter: str
    shard: int = 0
    parts: tuple[int, ...] = (1,)

    @property
    def num_shards(self) -> int:
        return len(self.parts)


ServedPlaces = dict[str, ServedPlace]  # by diffusers' names


def served_places(parameters: Sequence[str], *, names: ServedNames) -> ServedPlaces:
    """Return diffusers name → where the weight lives, for every parameter given.

    Raises ValueError when two weights get one name.
    """
    by_name: ServedPlaces = {}
    for parameter in parameters:
        module, _, leaf = parameter.rpartition(".")
        weights = {}
        for served, shards in names.items():
            # with a dot in front, so that a name matches from a module's beginning on
            is_whole = f".{parameter}".endswith(f".{served}")
            if not is_whole and not f".{module}".endswith(f".{served}"):
                continue
            segments = shards if isinstance(shards, Segments) else _equal(shards)
            outer = (parameter if is_whole else module).removesuffix(served).rstrip(".")
            for shard, diffusers in enumerate(segments.names):
                name = ".".join(filter(None, (outer, diffusers, "" if is_whole else leaf)))
                weights[name] = ServedPlace(parameter=parameter, shard=shard, parts=segments.parts)

        # not packed: one name on both sides
        weights = weights or {parameter: ServedPlace(parameter=parameter)}
        clash = by_name.keys() & weights.keys()
        if clash:
            raise ValueError(
                f"{sorted(clash)} have two places in vllm-omni's pipeline; correct the model's plan"
            )
        by_name |= weights
    return by_name


def _equal(names: Sequence[str]) -> Segments:
    return Segments(names=tuple(names), parts=(1,) * len(names))


def served_view(place: ServedPlace, *, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the weight's own rows of its parameter, as a view."""
    tensor = parameters[place.parameter].detach()
    if place.num_shards == 1:
        return tensor
    rows = tensor.shape[0] // sum(place.parts)
    start = rows * sum(place.parts[: place.shard])
    return tensor[start : start + rows * place.parts[place.shard]]


def packed_names(names: Iterable[str], served_names: ServedNames) -> list[list[str]]:
    """Return diffusers' names in groups: each is one of vllm-omni's parameters, in its order.

    A name that nothing packs is a group of its own. Groups are in the order of their first names.
    """
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        key, shard = _packed_place(name, served_names)
        groups.setdefault(key, {})[shard] = name
    packed = []
    for group in groups.values():
        packed.append([group[shard] for shard in sorted(group)])
    return packed


def _packed_place(name: str, served_names: ServedNames) -> tuple[tuple[str, str, str], int]:
    """Return what tells a name's parameter from all others, and the name's shard of it."""
    module, _, leaf = name.rpartition(".")
    for served, shards in served_names.items():
        segments = shards if isinstance(shards, Segments) else _equal(shards)
        for shard, segment in enumerate(segments.names) if len(segments.names) > 1 else ():
            # a segment is a module's name, or a parameter's with its leaf
            for whole, suffix in ((module, leaf), (name, "")):
                if f".{whole}".endswith(f".{segment}"):
                    return (served, whole.removesuffix(segment), suffix), shard
    return ("", name, ""), 0
