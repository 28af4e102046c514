"""The mesh of one process, made once: each gloo group has a thread that polls while it lives."""

from __future__ import annotations

from functools import cache

from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout


@cache
def one_rank_mesh() -> Mesh:
    """Return the mesh of this process alone, on the CPU."""
    return init_mesh(resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1), "cpu")
