"""Print a plan's communication: what links carry in a step, and how far the layouts scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Layout
from megadiff.planner.communication import GB, Communication, Network, default_links
from megadiff.planner.engine_memory import GIB, Placing
from megadiff.planner.memory_plan import USABLE_GIB, Estimate, make_plan
from megadiff.planner.network import PURPOSES
from megadiff.planner.work import Machine

# what a plan takes where it is not told
GPU = "h200"
HEADROOM = 0.1
TEXT_TOKENS = 128
HOST_GIB_PER_GPU = 128  # nodes of eight 80 GB GPUs have 1 to 2 TiB


def host_bytes(gpus_per_node: int, gib: float | None = None) -> int:
    """Return the bytes of a node's host memory. gib: of a node, None where it is not told."""
    return int((gpus_per_node * HOST_GIB_PER_GPU if gib is None else gib) * GIB)


def network_lines(network: Network) -> list[str]:
    """Return a table of the layouts that fit, in GB and seconds of a step, and the advice."""
    plan = network.plan
    links = network.links
    lines = [
        "",
        f"links: {links.nvlink / GB:.0f} GB/s a GPU within a node (measured on H200s, "
        f"docs/performance.md), {links.network / GB:.0f} GB/s a node across nodes (--network-gbs)",
        f"{'':34}{'GB a GPU sends in a step':^54}{'leaves':>9}{'links, s':>16}",
        _cells(
            ("engine", "dp", "repl", "sp", "tp", "SP"),
            (*PURPOSES, "a node", "hidden", "waits", "compute s"),
        ),
    ]
    fitting = [estimate for estimate in plan.estimates if estimate.fits(plan.machine)]
    lines += [_row(estimate, network.of(estimate.placing, estimate.work)) for estimate in fitting]

    if plan.pick:
        num_nodes, reason = network.limit(plan.pick.placing)
        peers = plan.pick.placing.layout.sp * plan.pick.placing.layout.tp
        lines += [
            "",
            f"> scales to {num_nodes} nodes of {links.gpus_per_node} (sp*tp = {peers}); "
            f"at {2 * num_nodes} {reason}",
        ]
    warning = shards_across_nodes(network)
    return lines + [f"* {warning}"] * bool(warning)


def shards_across_nodes(network: Network) -> str:
    """Return a warning where the config's shards go across nodes although copies would fit.

    "" where they do not, or where copies of a sharded node would send no less.
    """
    plan = network.plan
    configured = plan.configured
    machine = plan.machine
    if configured is None or configured.placing.backend != "veomni":
        return ""
    if configured.placing.shards <= machine.gpus_per_node:
        return ""

    num_nodes = machine.world_size // machine.gpus_per_node
    layout = replace(configured.placing.layout, dp_replicate=num_nodes)
    within = replace(configured.placing, layout=layout)
    # there is none where the config's sp does not divide a node
    fitting = [
        estimate
        for estimate in plan.estimates
        if estimate.placing == within and estimate.fits(machine)
    ]
    if not fitting:
        return ""
    across_bytes = network.of(configured.placing, configured.work).network_bytes
    within_bytes = network.of(within, fitting[0].work).network_bytes
    if across_bytes <= within_bytes:
        return ""
    return (
        f"parallel.dp_replicate={configured.placing.layout.dp_replicate} shards weights over "
        f"{configured.placing.shards} GPUs, a node has {machine.gpus_per_node}: "
        f"{across_bytes / GB:.0f} GB leave each node in a step. parallel.dp_replicate={num_nodes} "
        f"shards them within a node, fits, and sends {within_bytes / GB:.0f} GB"
    )


def layout_warning(
    config: Config,
    adapter: ModelAdapter,
    layout: Layout,
    *,
    ranks_per_node: int,
    num_bytes: int | None = None,
) -> str:
    """Return shards_across_nodes() of the layout that a run is about to take.

    num_bytes: of one GPU, by default an H200's.
    """
    if layout.dp * layout.sp // layout.dp_replicate <= ranks_per_node:
        return ""
    machine = Machine(
        world_size=layout.world_size,
        gpus_per_node=ranks_per_node,
        num_bytes=num_bytes or int(USABLE_GIB[GPU] * GIB),
        host_bytes=host_bytes(ranks_per_node),
        headroom=HEADROOM,
    )
    plan = make_plan(config, adapter, machine=machine, text_tokens=TEXT_TOKENS)
    network = Network(plan=plan, links=default_links(machine, None), gpu=GPU)
    return shards_across_nodes(network)


def layout_cells(placing: Placing) -> list[str]:
    """Return the cells of a table's row that name a layout."""
    layout = placing.layout
    # Sequence parallelism splits tokens over tp ranks: without them it is neither on nor off.
    split = "-" if layout.tp == 1 else "on" if placing.sequence_parallel else "off"
    sizes = (layout.dp, layout.dp_replicate, layout.sp, layout.tp)
    return [placing.backend, *map(str, sizes), split]


def _row(estimate: Estimate, communication: Communication) -> str:
    numbers = [communication.sent(purpose) / GB for purpose in PURPOSES]
    numbers += [communication.network_bytes / GB, communication.hidden_s]
    numbers += [communication.waiting_s, communication.compute_s]
    return _cells(layout_cells(estimate.placing), [f"{number:.1f}" for number in numbers])


def _cells(layout: Sequence[str], numbers: Sequence[str]) -> str:
    engine, *sizes = layout
    left = "".join(f"{size:>5}" for size in sizes)
    return f"  {engine:<9}{left} {''.join(f'{number:>10}' for number in numbers)}"
