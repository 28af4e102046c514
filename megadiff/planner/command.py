"""megadiff plan CONFIG.yaml … key=value … --world-size N: which layouts fit on the GPUs, and which to take.

Of the model only the config files are read (model_index.json, transformer/config.json; text encoder and VAE for the
replicas), so that a run can be planned before its weights are there. docs/memory.md explains the figures. Exit codes: 0 a
layout fits, 1 none does, 2 the config or an argument is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.models.registry import build_adapter
from megadiff.planner.engine_memory import GIB, ModelShape, Placing
from megadiff.planner.memory_plan import (
    PHASES,
    USABLE_GIB,
    Estimate,
    Machine,
    MemoryPlan,
    largest_budget,
    make_plan,
)
from megadiff.train.sampling import sampling_of


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the plan to stdout and returns the exit code."""
    options, config_arguments = _parser().parse_known_args(argv)
    try:
        config = load_config([*options.config, *config_arguments])
        machine = _machine(options)
        plan = _plan(config, machine, text_tokens=options.text_tokens)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    text = json.dumps(to_json(plan)) if options.json else to_text(plan, config, gpu=options.gpu)
    sys.stdout.write(f"{text}\n")
    return 0 if plan.pick else 1


def _plan(config: Config, machine: Machine, *, text_tokens: int) -> MemoryPlan:
    validate(config, dp=1)
    adapter = build_adapter(Path(config.model.path))
    adapter.validate(sampling_of(config.rollout))
    if config.model.float32_streams:
        adapter.check_float32_streams()
    return make_plan(config, adapter, machine=machine, text_tokens=text_tokens)


def _machine(options: argparse.Namespace) -> Machine:
    for name in ("world_size", "gpus_per_node", "text_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)} < 1; give a positive number"
            )
    if not 0 <= options.headroom < 1:
        raise ValueError(
            f"--headroom {options.headroom} is not in [0, 1); it is a share of the memory, e.g. 0.1"
        )
    gib = USABLE_GIB[options.gpu] if options.memory_gib is None else options.memory_gib
    if gib <= 0:
        raise ValueError(f"--memory-gib {gib} is not positive; give the memory of one GPU")
    if options.world_size > options.gpus_per_node and options.world_size % options.gpus_per_node:
        raise ValueError(
            f"--world-size {options.world_size} is not a multiple of --gpus-per-node {options.gpus_per_node}; "
            "give whole nodes"
        )
    return Machine(
        world_size=options.world_size,
        gpus_per_node=options.gpus_per_node,
        num_bytes=int(gib * GIB),
        headroom=options.headroom,
    )


def to_json(plan: MemoryPlan) -> dict[str, object]:
    """Every figure in bytes; `pick` and `config` are indices into `layouts`, null where there is none."""
    layouts = plan.estimates
    return {
        "parameters": plan.model.num_parameters,
        "trained": plan.model.num_trained,
        "machine": asdict(plan.machine) | {"budget": plan.machine.budget},
        "replicas": asdict(plan.replicas),
        "layouts": [_json_layout(estimate, plan.machine) for estimate in layouts],
        "pick": layouts.index(plan.pick) if plan.pick else None,
        "config": layouts.index(plan.own) if plan.own else None,
        "overrides": overrides(plan.pick.placing) if plan.pick else None,
    }


def _json_layout(estimate: Estimate, machine: Machine) -> dict[str, object]:
    placing = estimate.placing
    return {
        "backend": placing.backend,
        **asdict(placing.layout),
        "sequence_parallel": placing.sequence_parallel,
        "work": asdict(estimate.work),
        "static": asdict(estimate.static) if estimate.static else None,
        "phases": estimate.phases,
        "peak": estimate.peak(estimate.worst_phase) if estimate.phases else None,
        "host": estimate.host,
        "fits": estimate.fits(machine),
        "obstacle": estimate.obstacle,
    }


def overrides(placing: Placing) -> str:
    """The keys that select a layout, whatever the config says."""
    layout = placing.layout
    keys = {
        "engine.backend": placing.backend,
        "parallel.dp": layout.dp,
        "parallel.dp_replicate": layout.dp_replicate,
    }
    keys |= {"parallel.sp": layout.sp, "parallel.tp": layout.tp}
    if layout.tp > 1:
        keys["parallel.sequence_parallel"] = str(placing.sequence_parallel).lower()
    return " ".join(f"{key}={value}" for key, value in keys.items())


def to_text(plan: MemoryPlan, config: Config, *, gpu: str) -> str:
    """A table in GiB per GPU, in the order of preference, and the advice under it."""
    machine = plan.machine
    work = plan.estimates[0].work
    lines = [
        f"{_size(plan.model)} parameters in {config.engine.dtype} on {machine.world_size} x {gpu}, "
        f"{_gib(machine.num_bytes)} GiB each, of which {machine.headroom:.0%} are kept free: {_gib(machine.budget)} GiB",
        *_lora_lines(plan, config),
        f"a microbatch: {config.train.microbatch_size} x ({work.image_tokens} image + {work.text_tokens} text tokens), "
        f"{'two passes (guidance)' if work.passes == 2 else 'one pass'}, "
        f"{config.engine.activation_memory_budget:.0%} of the blocks' activations kept",
        _replica_line(plan),
        "",
        *_header(),
        *(_row(plan, estimate) for estimate in plan.estimates),
        "",
    ]
    return "\n".join([*lines, *_advice(plan, config)])


def _size(model: ModelShape) -> str:
    """Of every component that is trained."""
    times = f"{model.num_components} x " if model.num_components > 1 else ""
    return f"{times}{model.num_parameters / 1e9:.2f} B"


def _lora_lines(plan: MemoryPlan, config: Config) -> list[str]:
    if not config.lora.rank:
        return []
    return [
        f"LoRA of rank {config.lora.rank}: {plan.model.num_trained / 1e9:.3g} B are trained, all else is frozen"
    ]


def _header() -> list[str]:
    names = ("engine", "dp", "repl", "sp", "tp", "SP", "params", "grads", "optim", *PHASES)
    top = f"{'':34}{'stays, GiB per GPU':>24}   {'peak of each phase, GiB per GPU':>39}"
    return [top, _cells(" ", names, "fits")]


def _cells(mark: str, cells: Sequence[str], last: str) -> str:
    layout, static, phases = cells[:6], cells[6:9], cells[9:]
    return (
        f"{mark} {layout[0]:<9}" + "".join(f"{cell:>5}" for cell in layout[1:]) + " "
        + "".join(f"{cell:>8}" for cell in static) + "   " + "".join(f"{cell:>10}" for cell in phases) + f"  {last}"
    )  # fmt: skip


def _row(plan: MemoryPlan, estimate: Estimate) -> str:
    placing, layout = estimate.placing, estimate.placing.layout
    mark = ">" if estimate is plan.pick else "*" if estimate is plan.own else " "
    split = "-" if layout.tp == 1 else "on" if placing.sequence_parallel else "off"
    cells = [
        placing.backend,
        *map(str, (layout.dp, layout.dp_replicate, layout.sp, layout.tp)),
        split,
    ]
    static = estimate.static
    if static is None:
        return _cells(mark, cells + ["-"] * 7, f"no: {_brief(estimate.obstacle)}")
    cells += map(_gib, (static.parameters, static.gradients, static.optimizer))
    cells += [_gib(estimate.peak(phase)) if phase in estimate.phases else "-" for phase in PHASES]
    if estimate.obstacle:
        return _cells(mark, cells, f"no: {_brief(estimate.obstacle)}")
    over = estimate.peak(estimate.worst_phase) - plan.machine.budget
    return _cells(
        mark, cells, "yes" if over <= 0 else f"no: {_gib(over)} over in {estimate.worst_phase}"
    )


def _replica_line(plan: MemoryPlan) -> str:
    replicas = plan.replicas
    if not replicas.per_gpu:
        return "replicas: none on these GPUs"
    asleep = (
        f"asleep, with {_gib(replicas.parked)} GiB in host memory," if replicas.sleeps else "awake"
    )
    landing = (
        f" ({_gib(replicas.pushed)} while a push lands)"
        if replicas.pushed != replicas.weights
        else ""
    )
    text = (
        f"replicas: {replicas.per_gpu} a GPU, {_gib(replicas.weights)} GiB of weights{landing} and "
        f"{_gib(replicas.working)} GiB at work, {asleep} while the trainer works"
    )
    missing = f"; not counted, for want of their config.json: {', '.join(replicas.unknown)}"
    return text + (missing if replicas.unknown else "")


def _advice(plan: MemoryPlan, config: Config) -> list[str]:
    if plan.pick is None:
        return _nothing_fits(plan, config)
    estimate = plan.pick
    worst = estimate.worst_phase
    host = sum(estimate.host.values())
    lines = [
        f"> take: {overrides(estimate.placing)}",
        f"  the first that fits in the order: least tp, then least sp, then gathering within a node, then engine.backend="
        f"{config.engine.backend}, then sequence parallelism.",
        f"  Its peak is {_gib(estimate.peak(worst))} GiB, in {worst}: "
        + ", ".join(f"{part} {_gib(size)}" for part, size in estimate.phases[worst].items() if size)
        + (f"; host memory {_gib(host)} GiB a GPU" if host else ""),
    ]
    budget, peak = largest_budget(plan, estimate)
    if budget > config.engine.activation_memory_budget:
        lines.append(
            f"  by this estimate engine.activation_memory_budget={budget:g} fits too, with {_gib(peak)} GiB in update: less is "
            "computed again"
        )
    own, backend = plan.own, config.engine.backend
    if own and own is not estimate:
        verdict = (
            "fits too"
            if own.fits(plan.machine)
            else "does not fit"
            if not own.obstacle
            else "cannot run"
        )
        lines.append(f"* is what the config asks for; it {verdict}")
    if estimate.placing.backend != backend:
        fitting = [
            one
            for one in plan.estimates
            if one.placing.backend == backend and one.fits(plan.machine)
        ]
        first = overrides(fitting[0].placing) if fitting else "no layout of it fits"
        lines.append(f"  of engine.backend={backend} the first: {first}")
    return lines


def _nothing_fits(plan: MemoryPlan, config: Config) -> list[str]:
    possible = [estimate for estimate in plan.estimates if not estimate.obstacle]
    if not possible:
        return ["no layout is possible; the last column says why"]
    nearest = min(possible, key=lambda estimate: estimate.peak(estimate.worst_phase))
    worst = nearest.worst_phase
    return [
        f"nothing fits. Nearest: {overrides(nearest.placing)}",
        f"  with {_gib(nearest.peak(worst))} GiB > {_gib(plan.machine.budget)} GiB in {worst}: "
        + ", ".join(f"{part} {_gib(size)}" for part, size in nearest.phases[worst].items() if size),
        f"  {_remedy(nearest, plan, config)}",
    ]


def _remedy(estimate: Estimate, plan: MemoryPlan, config: Config) -> str:
    train, engine, phase = config.train, config.engine, estimate.worst_phase
    remedies = {
        f"train.microbatch_size below {train.microbatch_size}": "activations"
        in estimate.phases[phase]
        and train.microbatch_size > 1,
        "engine.activation_memory_budget=0": phase == "update"
        and engine.activation_memory_budget > 0,
        "rollout.sleep=always": phase == "update"
        and plan.replicas.per_gpu > 0
        and not plan.replicas.sleeps,
        "rollout.mode=separate": config.rollout.mode == "colocated",
    }
    possible = [remedy for remedy, helps in remedies.items() if helps]
    return f"try {', or '.join([*possible, 'more GPUs'])}"


def _brief(reason: str) -> str:
    """Without the rule and the fix, for which there is no room in a table."""
    return re.split("[:;,] ", reason)[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="*", help="yaml files and key=value overrides, as for train"
    )
    parser.add_argument("--world-size", type=int, required=True, help="GPUs that train")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", choices=sorted(USABLE_GIB), default="h200")
    parser.add_argument("--memory-gib", type=float, help="of one GPU, instead of what --gpu has")
    parser.add_argument(
        "--headroom", type=float, default=0.1, help="share of the memory that is kept free"
    )
    parser.add_argument(
        "--text-tokens",
        type=int,
        default=128,
        help="of the longest prompt, unless all are padded",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object with every figure, in bytes"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
