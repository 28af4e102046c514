"""Decide for a run on GPUs whether engine.offload=auto moves its optimizer state."""

from __future__ import annotations

from dataclasses import replace

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.planner.engine_memory import GIB
from megadiff.planner.memory_plan import plan_configured
from megadiff.planner.network_text import HEADROOM, TEXT_TOKENS
from megadiff.planner.work import Machine
from megadiff.process.host_memory import total_bytes


def offload_choice(
    config: Config,
    adapter: ModelAdapter,
    *,
    world_size: int,
    ranks_per_node: int,
    num_bytes: int,
    host_bytes: int | None = None,
) -> tuple[str, str]:
    """Return engine.offload without auto, and why: what `megadiff plan` says of the layout.

    num_bytes: of one GPU. host_bytes: of this node, by default what this process may use.
    """
    machine = Machine(
        world_size=world_size,
        gpus_per_node=ranks_per_node,
        num_bytes=num_bytes,
        host_bytes=host_bytes or total_bytes(),
        headroom=HEADROOM,
    )
    without = replace(config, engine=replace(config.engine, offload="never"))
    on_gpu = plan_configured(without, adapter, machine=machine, text_tokens=TEXT_TOKENS)
    chosen = plan_configured(config, adapter, machine=machine, text_tokens=TEXT_TOKENS)
    if not on_gpu or not chosen or not on_gpu.phases:
        return "never", "this layout cannot be planned"
    if not chosen.offloads and not on_gpu.fits(machine):
        phase = on_gpu.worst_phase
        peak = on_gpu.peak(phase)
        return "never", (
            f"but the plan does not fit either way: {phase} takes {peak / GIB:.1f} of "
            f"{machine.budget / GIB:.1f} GiB, beside {machine.host_budget / GIB:.1f} GiB of host "
            "memory a GPU; see `megadiff plan`"
        )
    if not chosen.offloads:
        return "never", "replicas fit beside the optimizer state"

    phase = max(
        on_gpu.phases.keys() - {"update"}, key=on_gpu.peak
    )  # an update needs it in any case
    reason = (
        f"with the optimizer state on the GPU {phase} would take {on_gpu.peak(phase) / GIB:.1f} of "
        f"{machine.budget / GIB:.1f} GiB; {chosen.host['offloaded optimizer'] / GIB:.1f} GiB of a "
        "rank's wait in host memory while replicas are awake"
    )
    return "always", reason
