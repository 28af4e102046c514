"""Count the bytes that a rank's collectives send, as they are asked of torch.distributed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# collective → the buffers that a ring carries round, of its arguments
WHOLE = {
    "_allgather_base_": lambda args: args[0],
    "allgather_": lambda args: args[0][0],
    "_reduce_scatter_base_": lambda args: args[1],
    "allgather_into_tensor_coalesced_": lambda args: args[0],
    "reduce_scatter_tensor_coalesced_": lambda args: args[1],
    "reduce_scatter_": lambda args: args[1][0],
    "allreduce_": lambda args: args[0],
    "alltoall_": lambda args: args[1],
    "alltoall_base_": lambda args: args[1],
}
ROUNDS = {"allreduce_": 2}
FIGURES = 64  # elements at most, of what the loop tells other ranks


class CountedCollectives(TorchDispatchMode):
    """Sums collective → bytes that this rank sends. One that is not in WHOLE raises KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            buffers = WHOLE[name](args)
            buffers = [buffers] if isinstance(buffers, Tensor) else buffers
            group = next(value for value in args if isinstance(value, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            if sum(buffer.numel() for buffer in buffers) > FIGURES:
                num_bytes = sum(buffer.nbytes for buffer in buffers)
                self.sent[name] += ROUNDS.get(name, 1) * num_bytes * (size - 1) / size
        return func(*args, **kwargs or {})
