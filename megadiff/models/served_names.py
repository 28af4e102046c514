"""How a model's weights are called, and packed, inside vllm-omni. The map itself is data, in models/<model>/plan.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ServedName:
    """One row: module names ending in `.{diffusers}` are rows `shard` of `num_shards` equal ones (axis 0) of the module
    that ends in `.{served}`. Modules that no row names have the same name on both sides. diffusers="": a module of
    vllm-omni's alone, whose parameters are in diffusers those of the module around it."""

    diffusers: str
    served: str
    shard: int = 0
    num_shards: int = 1


@dataclass(frozen=True, kw_only=True)
class ServedPlace:
    """Where one diffusers weight lives: shard of num_shards along axis 0 of the parameter called `parameter`."""

    parameter: str
    shard: int = 0
    num_shards: int = 1


def served_places(
    parameters: Sequence[str], *, names: Sequence[ServedName]
) -> dict[str, ServedPlace]:
    """diffusers name → place, for every parameter given. Raises ValueError when two places get one name."""
    places: dict[str, ServedPlace] = {}
    for parameter in parameters:
        module, _, leaf = parameter.rpartition(".")
        rows = [row for row in names if f".{module}".endswith(f".{row.served}")]
        found = {
            ".".join(
                filter(None, (module.removesuffix(row.served).rstrip("."), row.diffusers, leaf))
            ): ServedPlace(parameter=parameter, shard=row.shard, num_shards=row.num_shards)
            for row in rows
        } or {parameter: ServedPlace(parameter=parameter)}
        clash = places.keys() & found.keys()
        if clash:
            raise ValueError(
                f"{sorted(clash)} have two places in vllm-omni's pipeline; correct the model's plan"
            )
        places |= found
    return places


def served_view(place: ServedPlace, *, parameters: Mapping[str, Tensor]) -> Tensor:
    """The weight's own rows of its parameter, as a view."""
    tensor = parameters[place.parameter].detach()
    if place.num_shards == 1:
        return tensor
    num_rows = tensor.shape[0] // place.num_shards
    return tensor[place.shard * num_rows : (place.shard + 1) * num_rows]
