"""Which box of each tensor a rank of an engine writes into its checkpoint file, for the layouts the converter offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megadiff.parallel.mesh import check_heads
from megadiff.parallel.plan import ParallelPlan

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, local shape


@dataclass(frozen=True, kw_only=True)
class Layout:
    """backend: engine.backend. num_ranks: tp of megatron (at dp 1), dp of veomni."""

    backend: str
    num_ranks: int

    def boxes(
        self, shapes: Mapping[str, tuple[int, ...]], plan: ParallelPlan, *, num_heads: int
    ) -> list[dict[str, Box]]:
        """Of each rank: parameter name → its box. shapes: of all parameters, LoRA's among them or not.

        Raises ValueError for a size that tensor parallelism does not divide.
        """
        return LAYOUTS[self.backend](shapes, plan, num_heads, self.num_ranks)


def _tensor_parallel(
    shapes: Mapping[str, tuple[int, ...]], plan: ParallelPlan, num_heads: int, num_ranks: int
) -> list[dict[str, Box]]:
    """The plan's shards; what is whole on every rank is the first rank's to write."""
    check_heads(num_heads, sp=1, tp=num_ranks)
    ranks = []
    for rank in range(num_ranks):
        places = plan.placements(shapes, tp=num_ranks, tp_rank=rank, sequence_parallel=True)
        ranks.append(
            {
                name: (place.offsets, place.local_shape)
                for name, place in places.items()
                if rank == 0 or place.sharded_dim is not None
            }
        )
    return ranks


def _fully_sharded(
    shapes: Mapping[str, tuple[int, ...]], plan: ParallelPlan, num_heads: int, num_ranks: int
) -> list[dict[str, Box]]:
    """Rows in equal parts, rounded up, as FSDP2 has them: the last ranks have fewer or none."""
    most_rows = max(shape[0] for shape in shapes.values() if shape)
    if num_ranks > most_rows:
        raise ValueError(
            f"--dp {num_ranks}: the model's tensors have at most {most_rows} rows, and "
            f"{num_ranks - most_rows} ranks would hold none; give --dp {most_rows} or less"
        )
    return [
        {name: _rows(shape, rank, num_ranks) for name, shape in shapes.items()}
        for rank in range(num_ranks)
    ]


def _rows(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box:
    num_rows, rest = shape[0], shape[1:]
    size = -(-num_rows // num_ranks)
    begin, end = (min(at * size, num_rows) for at in (rank, rank + 1))
    return (begin, *(0 for _ in rest)), (end - begin, *rest)


LAYOUTS = {"megatron": _tensor_parallel, "veomni": _fully_sharded}
