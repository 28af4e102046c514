"""Print which layouts fit on the GPUs, and which to take.

    megadiff plan CONFIG.yaml … key=value … --world-size N | --nodes N

Of the model config files are read (model_index.json, transformer/config.json; text encoder and VAE
for the replicas), and headers of weights that are there. A run can be planned without any.
docs/memory.md explains the figures.
Exit codes: 0 a layout fits, 1 none does, 2 the config or an argument is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.models.registry import build_adapter
from megadiff.planner.communication import Network, default_links
from megadiff.planner.engine_memory import GIB
from megadiff.planner.memory_plan import (
    PHASES,
    Estimate,
    MemoryPlan,
    largest_budget,
    make_plan,
)
from megadiff.planner.network_text import layout_cells, network_lines
from megadiff.planner.options import gpu_of, machine_of, parser
from megadiff.planner.remedies import LORA_RANK, find_remedy, more_machines, with_settings
from megadiff.process.words import counted
from megadiff.train.check_algorithm import check_algorithm
from megadiff.train.check_model import check_model, check_replicas
from megadiff.train.dry_run import node_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plan to stdout and return the exit code."""
    options, config_arguments = parser(__doc__ or "").parse_known_args(argv)

    try:
        config = load_config([*options.config, *config_arguments])
        machine = machine_of(options)
        # dp=1 divides everything: what depends on dp is an obstacle of a layout, not of the config.
        algorithm = build_algorithm(config.algorithm)
        on_policy = algorithm.on_policy
        validate(config, dp=1, on_policy=on_policy)
        check_algorithm(config, algorithm)
        adapter = build_adapter(Path(config.model.path), config.model.family)
        check_model(config, adapter, on_policy=on_policy)
        check_replicas(config, adapter, num_nodes=machine.num_nodes)
        plan = make_plan(config, adapter, machine=machine, text_tokens=options.text_tokens)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2

    network = Network(
        plan=plan,
        links=default_links(machine, options.network_gbs),
        gpu=gpu_of(options),
    )
    text = json.dumps(to_json(network)) if options.json else to_text(network)
    sys.stdout.write(f"{text}\n")
    if options.gpu is None and options.memory_gib is None:
        sys.stderr.write(f"(no --gpu given: {gpu_of(options)} assumed; --gpu h100)\n")

    return 0 if plan.pick else 1


def to_json(network: Network) -> dict[str, object]:
    """Return every figure in bytes. `pick` and `config` are indices into `layouts`, or null.

    `nodes`: the most that the layout to take pays on, and what stops it.
    """
    plan = network.plan
    layouts = plan.estimates

    return {
        "parameters": plan.model.num_parameters,
        "trained": plan.model.num_trained,
        "machine": asdict(plan.machine) | {"budget": plan.machine.budget},
        "replicas": asdict(plan.replicas),
        "links": asdict(network.links),
        "layouts": [_json_layout(estimate, network) for estimate in layouts],
        "pick": layouts.index(plan.pick) if plan.pick else None,
        "config": layouts.index(plan.configured) if plan.configured else None,
        "overrides": overrides(plan.pick, plan.config) if plan.pick else None,
        "nodes": network.limit(plan.pick.placing) if plan.pick else None,
    }


def _json_layout(estimate: Estimate, network: Network) -> dict[str, object]:
    placing = estimate.placing
    communication = network.of(placing, estimate.work) if estimate.static else None
    return {
        "backend": placing.backend,
        **asdict(placing.layout),
        "sequence_parallel": placing.sequence_parallel,
        "offloads": estimate.offloads,
        "work": asdict(estimate.work),
        "static": asdict(estimate.static) if estimate.static else None,
        "phases": estimate.phases,
        "peak": estimate.peak(estimate.worst_phase) if estimate.phases else None,
        "host": estimate.host,
        "network": communication.to_json() if communication else None,
        "fits": estimate.fits(network.plan.machine),
        "obstacle": estimate.obstacle,
    }


def overrides(estimate: Estimate, config: Config) -> str:
    """Return the keys that select a layout, whatever the config says of it."""
    placing = estimate.placing
    layout = placing.layout
    keys = {
        # All of them, also those with a default: the line must hold whatever else is given.
        "engine.backend": placing.backend,
        "parallel.dp": layout.dp,
        "parallel.dp_replicate": layout.dp_replicate,
        "parallel.sp": layout.sp,
        "parallel.tp": layout.tp,
    }
    if layout.tp > 1:
        keys["parallel.sequence_parallel"] = str(placing.sequence_parallel).lower()
    # Beside replicas on other GPUs only idle components' state moves, which is auto's to do.
    if estimate.offloads and config.rollout.mode == "colocated":
        keys["engine.offload"] = "always"
    return " ".join(f"{key}={value}" for key, value in keys.items())


def _count(number: int) -> str:
    """Return a number of parameters in billions, of a tiny model in millions or thousands."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= unit / 10:
            return f"{number / unit:.2f} {letter}"
    return f"{number / 1e3:.2f} k"


def to_text(network: Network) -> str:
    """Return a table in GiB per GPU, in the order of preference, and the advice under it."""
    plan = network.plan
    config = plan.config
    model = plan.model
    machine = plan.machine
    work = plan.estimates[0].work
    times = f"{model.num_components} x " if model.num_components > 1 else ""
    lines = [
        f"{times}{_count(model.num_parameters)} parameters in {config.engine.dtype} on "
        f"{machine.world_size} x {network.gpu}, {_gib(machine.num_bytes)} GiB each, of which "
        f"{machine.headroom:.0%} are kept free: {_gib(machine.budget)} GiB"
    ]

    if config.lora.rank:
        trained = f"{model.num_trained / 1e9:.3g} B are trained"
        lines.append(f"LoRA of rank {config.lora.rank}: {trained}, all else is frozen")
        if _shares_base(plan):
            lines.append("the frozen base is on a GPU once, for its trainer rank and its replica")

    num_passes = "two passes (guidance)" if work.passes == 2 else "one pass"
    names = ("engine", "dp", "repl", "sp", "tp", "SP", "params", "grads", "optim", *PHASES)
    lines += [
        f"a microbatch: {config.train.microbatch_size} x ({work.image_tokens} image + "
        f"{work.text_tokens} text tokens), {num_passes}, "
        f"{config.engine.activation_memory_budget:.0%} of the blocks' activations kept",
        _replica_line(plan),
        "",
        f"{'':34}{'stays, GiB per GPU':>24}   {'peak of each phase, GiB per GPU':>39}",
        _cells(" ", names, "fits"),
        *_rows(plan),
        "",
        *_advice(plan),
    ]
    if plan.pick:
        node = {"world_size": machine.world_size, "ranks_per_node": machine.gpus_per_node}
        lines += [*network_lines(network), "", *node_lines(config, **node)]

    return "\n".join(lines)


def _cells(mark: str, cells: Sequence[str], last: str) -> str:
    layout = "".join(f"{cell:>5}" for cell in cells[1:6])
    static = "".join(f"{cell:>8}" for cell in cells[6:9])
    phases = "".join(f"{cell:>10}" for cell in cells[9:])
    return f"{mark} {cells[0]:<9}{layout} {static}   {phases}  {last}"


def _rows(plan: MemoryPlan) -> list[str]:
    """Return a line for each layout, and one for all others that one obstacle rules out."""
    lines = []
    ruled_out: Counter[str] = Counter()

    for estimate in plan.estimates:
        if estimate.obstacle and estimate is not plan.configured:
            ruled_out[_brief(estimate.obstacle)] += 1
        else:
            lines.append(_row(plan, estimate))
    for obstacle, count in ruled_out.items():
        lines.append(f"  and {counted(count, 'layout')} that cannot run: {obstacle}")
    return lines


def _row(plan: MemoryPlan, estimate: Estimate) -> str:
    mark = ">" if estimate is plan.pick else "*" if estimate is plan.configured else " "
    cells = layout_cells(estimate.placing)

    static = estimate.static
    if static is None:
        return _cells(mark, cells + ["-"] * 7, f"no: {_brief(estimate.obstacle)}")
    cells += map(_gib, (static.parameters, static.gradients, static.optimizer))
    cells += [_gib(estimate.peak(phase)) if phase in estimate.phases else "-" for phase in PHASES]
    if estimate.obstacle:
        return _cells(mark, cells, f"no: {_brief(estimate.obstacle)}")

    worst = estimate.worst_phase
    over = estimate.peak(worst) - plan.machine.budget
    host_over = estimate.host_bytes - plan.machine.host_budget
    verdict = "yes, offloading" if estimate.offloads else "yes"
    if host_over > 0:
        verdict = f"no: {_gib(host_over)} over in host memory"
    if over > 0:
        verdict = f"no: {_gib(over)} over in {worst}"
    return _cells(mark, cells, verdict)


def _shares_base(plan: MemoryPlan) -> bool:
    """Tell whether replicas map the trainer's base in a layout of the configured engine."""
    backend = plan.config.engine.backend
    return any(row.work.shares_base for row in plan.estimates if row.placing.backend == backend)


def _replica_line(plan: MemoryPlan) -> str:
    replicas = plan.replicas
    if not replicas.per_gpu:
        return "replicas: none on these GPUs"
    weights = f"{_gib(replicas.weights)} GiB of weights"
    if replicas.pushed != replicas.weights:
        weights += f" ({_gib(replicas.pushed)} while a push lands)"
    if _shares_base(plan):
        weights = f"{_gib(replicas.beside_base)} GiB of weights beside the base"
    text = f"replicas: {replicas.per_gpu} a GPU, {weights}"

    asleep = "awake"
    if replicas.sleeps:
        asleep = f"asleep, with {_gib(replicas.parked)} GiB in host memory,"
    text += f" and {_gib(replicas.working)} GiB at work, {asleep} while the trainer works"
    if replicas.unknown:
        text += f"; not counted, for want of their config.json: {', '.join(replicas.unknown)}"
    return text


def _advice(plan: MemoryPlan) -> list[str]:
    if plan.pick is None:
        return _nothing_fits(plan)

    config = plan.config
    estimate = plan.pick
    backend = config.engine.backend
    worst = estimate.worst_phase
    lines = [
        f"> take: {overrides(estimate, config)}",
        "  the first that fits in the order: least tp, then least sp, then gathering within a "
        f"node, then engine.backend={backend}, then sequence parallelism.",
        f"  Its peak is {_gib(estimate.peak(worst))} GiB, in {worst}: {_parts(estimate, worst)}"
        + _host_part(plan, estimate),
    ]
    if estimate.offloads:
        lines.append(
            "  optimizer state waits in host memory between updates (engine.offload), and comes "
            "back beside the next one's forward and backward"
        )

    # Only a larger budget is worth a line: a smaller one costs time for memory that is there.
    budget, peak = largest_budget(plan, estimate)
    if budget > config.engine.activation_memory_budget:
        lines.append(
            f"  by this estimate engine.activation_memory_budget={budget:g} fits too, with "
            f"{_gib(peak)} GiB in update: less is computed again"
        )

    configured = plan.configured
    if configured and configured is not estimate:
        verdict = "cannot run" if configured.obstacle else "does not fit"
        if configured.fits(plan.machine):
            verdict = "fits too"
        lines.append(f"* is what the config asks for; it {verdict}")

    if estimate.placing.backend != backend:
        fitting = [other for other in plan.estimates if other.fits(plan.machine)]
        of_backend = [other for other in fitting if other.placing.backend == backend]
        first = overrides(of_backend[0], config) if of_backend else "no layout of it fits"
        lines.append(f"  of engine.backend={backend} the first: {first}")

    return lines


def _nothing_fits(plan: MemoryPlan) -> list[str]:
    if not plan.nearest:
        return ["no layout is possible; the last column says why"]

    nearest = plan.nearest[0]
    worst = nearest.worst_phase
    head = f"nothing fits. Nearest: {overrides(nearest, plan.config)}"
    if nearest.peak(worst) <= plan.machine.budget:
        return [
            head,
            f"  its GPUs suffice, but {_gib(nearest.host_bytes)} GiB of host memory a GPU > "
            f"{_gib(plan.machine.host_budget)} GiB; try nodes with more (--host-gib), or more GPUs",
        ]

    return [
        head,
        f"  with {_gib(nearest.peak(worst))} GiB > {_gib(plan.machine.budget)} GiB in {worst}: "
        f"{_parts(nearest, worst)}",
        *_remedy_lines(plan),
    ]


def _parts(estimate: Estimate, phase: str) -> str:
    """List what a phase's peak is made of."""
    parts = estimate.phases[phase].items()
    return ", ".join(f"{part} {_gib(num_bytes)}" for part, num_bytes in parts if num_bytes)


def _host_part(plan: MemoryPlan, estimate: Estimate) -> str:
    """Say how much host memory a GPU takes, of how much."""
    if not estimate.host_bytes:
        return ""
    used = _gib(estimate.host_bytes)
    budget = _gib(plan.machine.host_budget)
    return f"; host memory {used} of {budget} GiB a GPU"


def _remedy_lines(plan: MemoryPlan) -> list[str]:
    """Say with which settings it fits, which have been planned."""
    remedy = find_remedy(plan)
    if remedy is None:
        machines = [plan.machine, *more_machines(plan.machine)]
        most = machines[-1].world_size
        lora = "" if plan.config.lora.rank else f", nor with LoRA of rank {LORA_RANK}"
        return [
            f"  no setting was found with which it fits, on up to {most} GPUs either{lora}; try "
            "GPUs with more memory, or a smaller model"
        ]

    estimate = remedy.estimate
    changed = with_settings(plan.config, [remedy.settings])
    layout = overrides(estimate, changed)
    settings = " ".join(f"{key}={value}" for key, value in remedy.settings.items())
    num_gpus = remedy.machine.world_size
    more = f"--world-size {num_gpus} " if num_gpus > plan.machine.world_size else ""
    worst = estimate.worst_phase
    lines = [
        f"> it fits with: {more}{settings}{' ' if settings else ''}{layout}",
        f"  Its peak is {_gib(estimate.peak(worst))} GiB, in {worst}.",
    ]
    if "lora.rank" in remedy.settings:
        lines.append("  All weights fit in no way that was tried; low-rank pairs beside them do.")
    if "rollout.registry" in remedy.settings:
        count = changed.rollout.num_replicas
        tp = changed.rollout.tp
        lines.append(
            f"  You then start {counted(count, 'replica')} (rollout.tp={tp}) on other GPUs, for "
            "which the run waits: `megadiff serve CONFIG.yaml …` announces one in that folder."
        )

    return lines


def _brief(reason: str) -> str:
    """Cut off the rule and the fix, which a table is too narrow for."""
    return re.split("[:;,] ", reason)[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
