"""Look at a run's config: the first thing that training would refuse, and whether it fits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megadiff.config.schema import Config
from megadiff.doctor.finding import Finding, error, ok, refusal, skipped
from megadiff.doctor.gpu_facts import GpuFacts
from megadiff.doctor.machine import GIB
from megadiff.models.registry import build_adapter
from megadiff.planner.command import overrides
from megadiff.planner.engine_memory import FLOAT32
from megadiff.planner.memory_plan import Estimate, MemoryPlan, make_plan
from megadiff.planner.model_facts import ModelFacts, model_facts
from megadiff.planner.options import gpu_of, machine_of
from megadiff.planner.options import parser as plan_parser
from megadiff.planner.work import model_shape
from megadiff.process.words import counted
from megadiff.train.check import check
from megadiff.train.components import trained_components

MASTER_AND_MOMENTS = 3  # float32 values of a trained weight in a checkpoint


def refusal_finding(config: Config, *, world_size: int) -> Finding:
    """Check a config as `megadiff train --dry-run` does, and return its first refusal."""
    try:
        with ExitStack() as stack:
            layout, _, data, _ = check(
                config, world_size=world_size, stack=stack, ranks_per_node=world_size
            )
    except (ValueError, OSError) as failure:
        return refusal("first refusal", str(failure))
    text = f"none, with {counted(world_size, 'rank')}: dp={layout.dp} sp={layout.sp} tp={layout.tp}"
    items = (
        counted(len(data), "prompt") if isinstance(data, list) else counted(data.num_items, "image")
    )

    return ok("first refusal", f"{text}, {items}")


def plan_finding(config: Config, gpus: GpuFacts, *, world_size: int, asked: int) -> Finding:
    """Say whether the config's layout fits. asked: the world size that the user named, 0 for none.

    Without GPUs here and without a world size there is nothing to plan for.
    """
    hint = "megadiff doctor CONFIG --world-size N; megadiff plan CONFIG --world-size N tells more"
    if config.run.device == "cpu" or not (gpus.devices or asked):
        reason = "no GPU here, and --world-size names none"
        if config.run.device == "cpu":
            reason = "run.device=cpu: the plan counts memory of GPUs"
        return skipped("plan", reason, fix=hint)

    arguments = ["--world-size", str(world_size)]
    if gpus.devices:
        smallest = min(device.total_bytes for device in gpus.devices)
        arguments += ["--memory-gib", str(smallest / GIB)]
        if world_size % len(gpus.devices) == 0:
            arguments += ["--gpus-per-node", str(len(gpus.devices))]
    options = plan_parser("").parse_args(arguments)

    try:
        machine = machine_of(options)
        adapter = build_adapter(Path(config.model.path), config.model.family)
        plan = make_plan(config, adapter, machine=machine, text_tokens=options.text_tokens)
    except ValueError as failure:
        return refusal("plan", str(failure))

    here = "" if gpus.devices else f" ({gpu_of(options)}, as no GPU is here)"
    size = f"{machine.num_bytes / GIB:.1f} GiB{here}"
    return _verdict(plan, config, size=size, world_size=world_size)


def _verdict(plan: MemoryPlan, config: Config, *, size: str, world_size: int) -> Finding:
    where = f"on {counted(world_size, 'GPU')} of {size}"
    budget = plan.machine.budget
    hint = f"megadiff plan CONFIG --world-size {world_size} shows every layout and what would help"
    configured = plan.configured
    if configured and configured.fits(plan.machine):
        peak = f"{_peak(configured)} of {budget / GIB:.1f} GiB"
        return ok("plan", f"fits {where}: {peak} in {configured.worst_phase}")

    problem = "the config's layout is for another number of GPUs"
    if configured:
        # without its fix, which the first refusal has
        problem = configured.obstacle.partition("; ")[0]
    if configured and not problem:
        problem = f"{_peak(configured)} GiB in {configured.worst_phase} > {budget / GIB:.1f} GiB"
        if configured.peak(configured.worst_phase) <= budget:
            problem = f"{configured.host_bytes / GIB:.1f} GiB of host memory a GPU > "
            problem += f"{plan.machine.host_budget / GIB:.1f} GiB"
    if plan.pick is None:
        return error("plan", f"no layout fits {where}: {problem}", fix=hint)
    return error("plan", f"does not fit {where}: {problem}", fix=overrides(plan.pick, config))


def _peak(estimate: Estimate) -> str:
    return f"{estimate.peak(estimate.worst_phase) / GIB:.1f}"


def checkpoint_bytes(config: Config) -> int:
    """Return the size of one checkpoint of a run. Raises ValueError for a model that is none.

    It holds masters and moments in float32, and the averages that the algorithm keeps.
    """
    adapter = build_adapter(Path(config.model.path), config.model.family)
    shape = model_shape(adapter, config.lora)
    count = len(adapter.components if config.lora.rank else trained_components(config, adapter))
    algorithm = config.algorithm
    copies = MASTER_AND_MOMENTS + bool(algorithm.ema_decay) + bool(algorithm.lagging_decay)
    return FLOAT32 * copies * count * shape.num_trained


def folder_checkpoint_bytes(folder: Path) -> int:
    """Return the size of a checkpoint that trains all weights of a model folder."""
    facts: ModelFacts = model_facts(folder, "")
    if not facts.trained:
        return 0
    trained = [component for component in facts.components if component.is_trained]
    count = sum(component.num_parameters - facts.trained.num_frozen for component in trained)
    return FLOAT32 * MASTER_AND_MOMENTS * count
