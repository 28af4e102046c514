"""Read the options of `megadiff plan`: the GPUs and nodes that a run is planned for."""

from __future__ import annotations

import argparse
import math

from megadiff.parallel.mesh import GPUS_PER_NODE
from megadiff.planner.communication import NETWORK_GBS_PER_GPU
from megadiff.planner.engine_memory import GIB
from megadiff.planner.memory_plan import USABLE_GIB
from megadiff.planner.network_text import GPU, HEADROOM, HOST_GIB_PER_GPU, TEXT_TOKENS, host_bytes
from megadiff.planner.work import Machine


def parser(description: str) -> argparse.ArgumentParser:
    """Return what reads the options; keys of the config are left over."""
    options = argparse.ArgumentParser(
        prog="megadiff plan",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "config", nargs="*", help="yaml files and key=value overrides, as for train"
    )

    options.add_argument("--world-size", type=int, help="GPUs that train")
    options.add_argument("--nodes", type=int, help="nodes that train, instead of --world-size")
    options.add_argument(
        "--gpus-per-node",
        type=int,
        help=f"by default {GPUS_PER_NODE}, or --world-size / --nodes",
    )
    options.add_argument(
        "--network-gbs",
        type=float,
        help="GB/s of one node's network, each way; by default "
        f"{NETWORK_GBS_PER_GPU:.0f} a GPU (400 Gb/s NDR InfiniBand), which is 400 for 8 GPUs",
    )
    options.add_argument("--gpu", choices=sorted(USABLE_GIB), help=f"by default {GPU}")
    options.add_argument("--memory-gib", type=float, help="of one GPU, instead of what --gpu has")
    options.add_argument(
        "--host-gib",
        type=float,
        help=f"memory of one node's host; by default {HOST_GIB_PER_GPU} a GPU, 1 TiB for 8",
    )
    options.add_argument(
        "--headroom", type=float, default=HEADROOM, help="share of both memories that is kept free"
    )

    options.add_argument(
        "--text-tokens",
        type=int,
        default=TEXT_TOKENS,
        help="of the longest prompt, unless all are padded",
    )
    options.add_argument(
        "--json", action="store_true", help="one JSON object with every figure, in bytes"
    )
    return options


def gpu_of(options: argparse.Namespace) -> str:
    """Return the kind of GPU that is planned for."""
    return options.gpu or GPU


def machine_of(options: argparse.Namespace) -> Machine:
    """Return the machine that is planned for. Raises ValueError for sizes that cannot be."""
    names = ("world_size", "nodes", "gpus_per_node", "network_gbs", "host_gib", "text_tokens")
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {value} is not a positive finite number; give one")
    world_size, gpus_per_node = _sizes(options)

    if not 0 <= options.headroom < 1:
        raise ValueError(
            f"--headroom {options.headroom} is not in [0, 1); it is a share of the memory, e.g. 0.1"
        )

    gib = USABLE_GIB[gpu_of(options)] if options.memory_gib is None else options.memory_gib
    if not 0 < gib < math.inf:
        raise ValueError(f"--memory-gib {gib} is not positive; give the memory of one GPU")
    machine = Machine(
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        num_bytes=int(gib * GIB),
        host_bytes=host_bytes(gpus_per_node, options.host_gib),
        headroom=options.headroom,
    )
    if not machine.has_whole_nodes:
        raise ValueError(
            f"--world-size {world_size} is not a multiple of --gpus-per-node {gpus_per_node}; "
            "give whole nodes"
        )
    return machine


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    """Return (GPUs in all, GPUs a node): two of the three options give the third."""
    world_size, num_nodes, gpus_per_node = (
        getattr(options, name) for name in ("world_size", "nodes", "gpus_per_node")
    )
    if num_nodes is None:
        if world_size is None:
            raise ValueError("neither --world-size nor --nodes is given; give one of them")
        return world_size, gpus_per_node or GPUS_PER_NODE

    if world_size is None:
        gpus_per_node = gpus_per_node or GPUS_PER_NODE
        return num_nodes * gpus_per_node, gpus_per_node
    if world_size % num_nodes or gpus_per_node not in (None, world_size // num_nodes):
        sizes = "" if gpus_per_node is None else f" of --gpus-per-node {gpus_per_node}"
        raise ValueError(
            f"--world-size {world_size} is not --nodes {num_nodes}{sizes}; leave one of them out"
        )
    return world_size, world_size // num_nodes
