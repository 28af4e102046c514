"""Lay out the process mesh: dp outermost, then sp, then tp.

So model-parallel peers are neighbours on one node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megadiff.process.affinity import bind
from megadiff.process.allocator import grow_segments
from megadiff.process.gloo import share_devices

GPUS_PER_NODE = 8  # where nothing says it: DGX and HGX servers
# where the caller names none; a run's follows from its config (train/build.py)
COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Give the sizes of the axes: world_size = dp · sp · tp; dp = dp_replicate · shards."""

    world_size: int
    dp: int
    dp_replicate: int
    sp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh(Layout):
    """Locate this rank in the layout, with the process groups of the loop.

    dp_group: ranks with the same (sp, tp) coordinates.
    cpu_group: gloo over the world, for bytes.
    cpu_model_group: gloo over the sp·tp peers of this dp rank. Its first rank
    (`model_group_source`, a global rank) fetches data for all of them.
    cpu_node_group: gloo over the local_world_size ranks of this node. Its first rank is
    `node_source`. A node has whole model groups, and ranks that are neighbours.
    timeout_s: of every collective.
    """

    rank: int
    device: torch.device
    dp_group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup
    cpu_model_group: dist.ProcessGroup
    cpu_node_group: dist.ProcessGroup
    local_world_size: int
    timeout_s: float = COLLECTIVE_TIMEOUT_S

    dp_rank = property(lambda self: self.rank // (self.sp * self.tp))
    model_group_source = property(lambda self: self.dp_rank * self.sp * self.tp)
    is_model_group_source = property(lambda self: self.rank == self.model_group_source)
    num_nodes = property(lambda self: self.world_size // self.local_world_size)
    node = property(lambda self: self.rank // self.local_world_size)
    node_source = property(lambda self: self.node * self.local_world_size)


def resolve_layout(*, dp: int, sp: int, tp: int, dp_replicate: int, world_size: int) -> Layout:
    """Return the layout, dp=0 being filled in with what the world leaves.

    Raises ValueError when the sizes do not multiply to world_size.
    """
    for name, size in (("sp", sp), ("tp", tp), ("dp_replicate", dp_replicate)):
        if size < 1:
            raise ValueError(f"parallel.{name}={size} < 1; set parallel.{name}>=1")
    if dp < 0:
        raise ValueError(
            f"parallel.dp={dp} < 0; set it to 0 (what the world leaves) or to a positive size"
        )

    if world_size % (sp * tp):
        raise ValueError(
            f"world_size={world_size} is not a multiple of sp*tp = {sp}*{tp} = {sp * tp}; "
            f"start a multiple of {sp * tp} processes or lower parallel.sp / parallel.tp"
        )

    dp = dp or world_size // (sp * tp)
    if dp * sp * tp != world_size:
        raise ValueError(
            f"world_size={world_size} != dp*sp*tp = {dp}*{sp}*{tp} = {dp * sp * tp}; "
            f"set parallel.dp={world_size // (sp * tp)}, or start {dp * sp * tp} processes"
        )
    if dp % dp_replicate:
        raise ValueError(
            f"parallel.dp={dp} is not a multiple of parallel.dp_replicate={dp_replicate}; "
            f"set parallel.dp_replicate to a divisor of {dp}"
        )

    return Layout(world_size=world_size, dp=dp, dp_replicate=dp_replicate, sp=sp, tp=tp)


def check_heads(num_heads: int, *, sp: int, tp: int) -> None:
    """Raise ValueError when sp·tp does not divide the model's attention heads."""
    if num_heads % (sp * tp):
        raise ValueError(
            f"parallel.sp*parallel.tp = {sp}*{tp} = {sp * tp} does not divide the model's "
            f"{num_heads} attention heads; set them so that their product is a divisor of "
            f"{num_heads}"
        )


def check_nodes(layout: Layout, *, ranks_per_node: int) -> None:
    """Raise ValueError where sp·tp peers, which are neighbours, would be on several nodes."""
    peers = layout.sp * layout.tp
    if layout.world_size > ranks_per_node and ranks_per_node % peers:
        raise ValueError(
            f"parallel.sp*parallel.tp = {layout.sp}*{layout.tp} = {peers} does not divide a node's "
            f"{ranks_per_node} ranks: peers exchange tokens within every block and wait for it, so "
            f"they stay on one node; set them so that their product divides {ranks_per_node}, "
            "parallel.dp goes across nodes"
        )


def world_size_from_env() -> int:
    """Return the number of trainer processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    """Return this process's number among them, before there is a mesh; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_world_size_of(world_size: int) -> int:
    """Return the number of trainer processes on this node, as torchrun says.

    Raises ValueError where it does not divide world_size: all nodes have equally many.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if size < 1 or world_size % size:
        raise ValueError(
            f"{world_size} processes in all are no multiple of this node's {size}; start equally "
            "many on every node"
        )
    return size


def init_mesh(layout: Layout, device_type: str, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Mesh:
    """Start torch.distributed and build the groups. Collective over the world.

    A world of one needs no launcher. timeout_s: of every collective. Ranks wait in one for the
    slowest rank's rollout, so it must outlast that.
    """
    # CUDA reads these settings when it starts
    grow_segments()
    if layout.tp > 1:
        # Megatron's collectives are then queued before the products that hide them
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Else copies have one queue as well, and those of a rescue could wait for ever behind a
        # collective that another rank never joins (CUDA's guide, 5.2.3).
        os.environ.setdefault("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "8")
    device = _local_device(device_type)
    timeout = timedelta(seconds=timeout_s)

    share_devices()
    if not dist.is_initialized():
        # gloo beside NCCL: the loop's small collectives are about numbers on the host
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            # torchrun keeps its store when it starts ranks again: addresses of dead ranks are in it
            # (https://github.com/pytorch/pytorch/issues/135712). Nodes count apart from each other.
            is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"
            dist.init_process_group(
                backend,
                timeout=timeout,
                store=dist.PrefixStore(f"restart_{restart}", store),
                rank=rank,
                world_size=world_size,
            )
        else:
            # in this process's memory, without a port
            dist.init_process_group(
                backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
            )

    peers = layout.sp * layout.tp
    dp_ranks = [list(range(first, layout.world_size, peers)) for first in range(peers)]

    # collective over the world: no rank may leave a group out, its own or another's
    dp_group, _ = dist.new_subgroups_by_enumeration(dp_ranks, timeout=timeout)
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    cpu_model_group, _ = dist.new_subgroups(peers, timeout=timeout, backend="gloo")

    # of one node it would be the same group
    local_world_size = local_world_size_of(layout.world_size)
    cpu_node_group = cpu_group
    if local_world_size < layout.world_size:
        cpu_node_group, _ = dist.new_subgroups(local_world_size, timeout=timeout, backend="gloo")

    return Mesh(
        **vars(layout),
        rank=dist.get_rank(),
        device=device,
        dp_group=dp_group,
        cpu_group=cpu_group,
        cpu_model_group=cpu_model_group,
        cpu_node_group=cpu_node_group,
        local_world_size=local_world_size,
        timeout_s=timeout_s,
    )


def _local_device(device_type: str) -> torch.device:
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type != "cuda":
        raise ValueError(f"run.device={device_type!r} is not one of auto, cpu, cuda")

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU: {count} visible; start at most {count} processes "
            "on this node (one process per GPU) or set run.device=cpu"
        )

    # libraries that say plain "cuda" then mean this GPU
    torch.cuda.set_device(local_rank)
    bind(0, [local_rank])
    return torch.device("cuda", local_rank)
