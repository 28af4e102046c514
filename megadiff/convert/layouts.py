"""Find the box of each tensor that a rank of an engine writes into its checkpoint file."""

from __future__ import annotations

from megadiff.models.registry import ComponentModel
from megadiff.parallel.mesh import check_heads
from megadiff.types import Shape, Shapes

Box = tuple[Shape, Shape]  # offsets, local shape
RankBoxes = list[dict[str, Box]]  # of each rank, by parameter


def _tensor_parallel(shapes: Shapes, model: ComponentModel, num_ranks: int) -> RankBoxes:
    """Return the plan's shards; what is whole on every rank is the first rank's to write."""
    check_heads(model.num_heads, sp=1, tp=num_ranks)

    ranks = []
    for rank in range(num_ranks):
        placements = model.plan.placements(
            shapes, tp=num_ranks, tp_rank=rank, sequence_parallel=True
        )
        boxes = {
            name: (placement.offsets, placement.local_shape)
            for name, placement in placements.items()
            if rank == 0 or placement.sharded_dim is not None
        }
        ranks.append(boxes)
    return ranks


def _fully_sharded(shapes: Shapes, model: ComponentModel, num_ranks: int) -> RankBoxes:
    """Cut rows in equal parts, rounded up, as FSDP2 does: the last ranks have fewer or none."""
    # With more ranks than rows the last ones have none of any tensor.
    most_rows = max(shape[0] for shape in shapes.values() if shape)
    if num_ranks > most_rows:
        raise ValueError(
            f"--dp {num_ranks}: the model's tensors have at most {most_rows} rows, and "
            f"{num_ranks - most_rows} ranks would hold none; give --dp {most_rows} or less"
        )

    ranks = []
    for rank in range(num_ranks):
        ranks.append({name: _rows(shape, rank, num_ranks) for name, shape in shapes.items()})
    return ranks


def _rows(shape: Shape, rank: int, num_ranks: int) -> Box:
    num_rows, *rest = shape
    # As torch.chunk rounds, which FSDP2 cuts by.
    size = -(-num_rows // num_ranks)
    begin = min(rank * size, num_rows)
    end = min(begin + size, num_rows)
    return (begin, *(0 for _ in rest)), (end - begin, *rest)


# By engine.backend. Each returns for every rank: parameter → its box. shapes: of all parameters,
# LoRA's too. num_ranks: tp of megatron (at dp 1), dp of veomni. Raises ValueError for a number of
# ranks that the model cannot be cut for.
LAYOUTS = {"megatron": _tensor_parallel, "veomni": _fully_sharded}
