"""Read FSDP2's tensors: whole ones, and where a rank's shard lies in its tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megadiff.engines.gathering import local
from megadiff.tensors.shards import Shard


def full_weight(parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """Gather a whole tensor in dtype, as new memory. Collective."""
    # cast before the gather, which then moves half the bytes
    shard = parameter.detach().to(dtype)
    assert isinstance(shard, DTensor)
    tensor = shard.full_tensor()
    is_policy = tensor.data_ptr() == local(parameter).data_ptr()  # not sharded and not cast
    return tensor.clone() if is_policy else tensor


def row_group(parameters: Sequence[DTensor]) -> dist.ProcessGroup | None:
    """Return the ranks that share the rows of all these parameters.

    None where the parameters are sharded in different ways, or one rank has all rows.
    """
    layouts = {(parameter.device_mesh, parameter.placements) for parameter in parameters}
    mesh, placements = layouts.pop()
    dims = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    if (
        not layouts
        and len(dims) == 1
        and placements[dims[0]].is_shard(0)
        and mesh.size(dims[0]) > 1
    ):
        return mesh.get_group(dims[0])
    return None


def holds_first(tensor: DTensor) -> bool:
    """Tell whether this rank is the first of those that hold the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate, "every rank is in the mesh"
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if not placement.is_shard()
    )


def shard_of(tensor: Tensor, values: Tensor) -> Shard:
    """Place this rank's values, the tensor's own or others that are sharded like it."""
    offsets: Sequence[int] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return Shard(local=values, offsets=tuple(offsets), shape=tuple(tensor.shape))
