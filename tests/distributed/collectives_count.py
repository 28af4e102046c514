"""Count the bytes of a rank's collectives as they are asked of torch.distributed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# buffers that a ring carries round: the gathered, the scattered, the reduced, the exchanged one
WHOLE = {
    "_allgather_base_": lambda args: args[0],
    "_reduce_scatter_base_": lambda args: args[1],
    "allreduce_": lambda args: args[0],
    "alltoall_base_": lambda args: args[1],
    "alltoall_": lambda args: args[1],
}
ROUNDS = {"allreduce_": 2}


class CountedCollectives(TorchDispatchMode):
    """Collect collective → bytes that this rank sends in a ring. Others than WHOLE raise KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace == "c10d" and name != "barrier":
            (group,) = [value for value in args if not isinstance(value, (Tensor, list, bool, int)) and hasattr(value, "_type")][:1]
            size = dist.ProcessGroup.unbox(group).size()
            buffers = WHOLE[name](args)
            buffers = [buffers] if isinstance(buffers, Tensor) else buffers
            num_bytes = sum(buffer.nbytes for buffer in buffers)
            self.sent[name] += ROUNDS.get(name, 1) * num_bytes * (size - 1) / size
        return func(*args, **kwargs or {})
