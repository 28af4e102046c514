"""Map diffusers' names of weights to vllm-omni's, which packs several into one parameter.

The map itself is data, in models/<model>/plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

# vllm-omni's module → diffusers' modules in it, shards along axis 0: of equal size, or module →
# relative size. Names are the ends of whole ones. "" is the module around it: vllm-omni keeps that
# one's parameters in a module of its own. Modules that are not listed have the same name on both
# sides. A parameter may stand in place of a module, on both sides.
ServedNames = Mapping[str, Sequence[str] | Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class ServedPlace:
    """Locate one diffusers weight: a shard along axis 0 of vllm-omni's parameter.

    sizes: of all the parameter's shards, relative to each other.
    """

    parameter: str
    shard: int = 0
    sizes: tuple[int, ...] = (1,)

    @property
    def num_shards(self) -> int:
        return len(self.sizes)


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
            sizes = tuple(shards.values()) if isinstance(shards, Mapping) else (1,) * len(shards)
            for path, rest in ((module, leaf), (parameter, "")):
                # with a dot in front, so that a name matches from a module's beginning on
                if not f".{path}".endswith(f".{served}"):
                    continue
                outer = path.removesuffix(served).rstrip(".")
                for shard, diffusers in enumerate(shards):
                    name = ".".join(filter(None, (outer, diffusers, rest)))
                    weights[name] = ServedPlace(parameter=parameter, shard=shard, sizes=sizes)

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
    # a worker has the same share of every shard
    rows = [len(tensor) * size // sum(place.sizes) for size in place.sizes]
    return tensor if len(rows) == 1 else tensor.split(rows)[place.shard]
