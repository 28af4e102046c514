"""Map diffusers' names of weights to vllm-omni's, which packs several into one parameter.

The map itself is data, in models/<model>/plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

# vllm-omni's module → diffusers' modules in it, shards of equal size along axis 0. Names are the
# ends of whole ones. "" is the module around it: vllm-omni keeps that one's parameters in a module
# of its own. Modules that are not listed have the same name on both sides.
ServedNames = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class ServedPlace:
    """Locate one diffusers weight: a shard of num_shards along axis 0 of vllm-omni's parameter."""

    parameter: str
    shard: int = 0
    num_shards: int = 1


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
            if f".{module}".endswith(f".{served}"):
                outer = module.removesuffix(served).rstrip(".")
                for shard, diffusers in enumerate(shards):
                    name = ".".join(filter(None, (outer, diffusers, leaf)))
                    weights[name] = ServedPlace(
                        parameter=parameter, shard=shard, num_shards=len(shards)
                    )

        # not packed: one name on both sides
        weights = weights or {parameter: ServedPlace(parameter=parameter)}
        clash = by_name.keys() & weights.keys()
        if clash:
            raise ValueError(
                f"{sorted(clash)} have two places in vllm-omni's pipeline; correct the model's plan"
            )
        by_name |= weights
    return by_name


def served_view(place: ServedPlace, *, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the weight's own rows of its parameter, as a view."""
    tensor = parameters[place.parameter].detach()
    return tensor if place.num_shards == 1 else tensor.chunk(place.num_shards)[place.shard]
