"""Let a pipeline's transformer have no weights of its own, but views of a trainer's memory.

How it comes to have none at the start: models/empty_weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megadiff.models.served_names import ServedPlaces
from megadiff.sync.shared_base import MappedMemory


def map_parameters(
    pipeline: Any,
    memory: MappedMemory,
    source: Mapping[str, Any],
    places: ServedPlaces,
    parameters: Mapping[str, Tensor],
) -> None:
    """Make the parameters of a bucket's weights views of the trainer's memory.

    Raises ValueError in a replica that loads weights of its own, or for weights that do not fit.
    """
    if not pipeline.maps_base:
        raise ValueError(
            "this replica holds weights of its own; start it with --shared-base, or set "
            "lora.shared_base=never"
        )
    for name, view in memory.views(source, places, parameters):
        parameters[name].data = view
    pipeline.is_empty = False
