"""What a run of bench_step.py shows: medians of its stages, rates, memory beside the plan's."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import psutil

from megadiff.config.schema import Config
from megadiff.models.registry import build_adapter
from megadiff.observe.device_memory import GIB, phase_key
from megadiff.planner.communication import step_tflop
from megadiff.planner.memory_plan import USABLE_GIB, plan_configured
from megadiff.planner.work import Machine

# phase → the planner's name
PLANNED = {"parity": "log_probs", "sync": "sync", "rollout": "rollout", "train": "update"}


def figures(
    rows: list[dict], config: Config, *, model_folder: Path, options: argparse.Namespace
) -> dict:
    """Return medians over the rows, and rates from the model's FLOPs.

    The rate of rollout counts until the slowest rank has samples and rewards.
    """
    common = set.intersection(*(set(row) for row in rows))
    times = {key: _median(rows, key) for key in sorted(common) if key.startswith("time/")}
    adapter = build_adapter(model_folder, config.model.family)
    samples = config.train.prompts_per_step * config.algorithm.group_size
    tflop = step_tflop(config, adapter, options.text_tokens)
    seconds = {"rollout": times["time/sample_s"], "train": times["time/train_s"]}
    rates = {stage: tflop[stage] / num_ranks(options) / seconds[stage] for stage in seconds}
    return {
        "samples": samples,
        "seconds": times,
        "samples_per_s": samples / times["time/step_s"],
        "tflops_per_gpu": rates,
        "mfu": {stage: rate / options.peak_tflops for stage, rate in rates.items()},
        "peak_tflops": options.peak_tflops,
        **_fp8_rates(rates, config, options),
        "peak_gib": max(row["memory/peak_gib"] for row in rows),
        "grad_norm": _median(rows, "optim/grad_norm"),
        "clip_fraction": statistics.fmean(row.get("policy/clip_fraction", 0.0) for row in rows),
        "zero_std_ratio": statistics.fmean(row["reward/zero_std_ratio"] for row in rows),
        "sync_gib": _median(rows, "sync/gib"),
    }


def _fp8_rates(rates: dict[str, float], config: Config, options: argparse.Namespace) -> dict:
    """Return the share of FP8's peak, of the sides that multiply in FP8; {} without any."""
    uses = {"rollout": config.rollout.fp8, "train": config.engine.fp8 != "none"}
    shares = {stage: rate / options.peak_fp8_tflops for stage, rate in rates.items() if uses[stage]}
    return {"mfu_fp8": shares, "peak_fp8_tflops": options.peak_fp8_tflops} if shares else {}


def planned_gib(config: Config, options: argparse.Namespace) -> dict[str, float]:
    """Return the planner's phase → its peak for this config on --gpus of --gpu.

    {} where the layout cannot run on them. The gate of a new run comes before AdamW's first step,
    which makes its state.
    """
    machine = Machine(
        world_size=num_ranks(options),
        gpus_per_node=options.gpus,
        num_bytes=int(USABLE_GIB[options.gpu] * GIB),
        host_bytes=psutil.virtual_memory().total,
        headroom=0.1,
    )
    own = plan_configured(
        config,
        build_adapter(Path(config.model.path), config.model.family),
        machine=machine,
        text_tokens=options.text_tokens,
    )
    if not own:
        return {}
    planned = {phase: own.peak(phase) for phase in own.phases}
    if "log_probs" in planned:
        planned["log_probs"] -= own.phases["log_probs"].get("optimizer", 0)
    return {phase: num_bytes / GIB for phase, num_bytes in planned.items()}


def num_ranks(options: argparse.Namespace) -> int:
    """Return the trainer's ranks, those that are not there included."""
    return options.rank_of or options.gpus


def memory_gib(
    rows: list[dict], planned: dict[str, float], *, warmup: int, held_gib: float = 0.0
) -> dict[str, dict[str, float]]:
    """Return phase → measured and planned GiB, each where it is known; {} on a CPU.

    Measured is of the fullest GPU, all processes but what --hold held, after the warmup; the gate
    is before it.
    """
    found: dict[str, dict[str, float]] = {}
    for phase, name in PLANNED.items():
        first, key = 0 if phase == "parity" else warmup, phase_key(phase)
        seen = [row[key] for row in rows[first:] if row.get(key)]
        if seen:
            found[phase] = {"measured": max(seen) - held_gib}
            if name in planned:
                found[phase]["planned"] = planned[name]
    return found


def table(report: dict) -> str:
    """Return markdown: a row a stage, with its share of the step.

    Then a row a phase, with its memory.
    """
    step = report["seconds"]["time/step_s"]
    lines = ["| stage | s | share |", "|---|---|---|"]
    for key, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        lines.append(
            f"| {key.removeprefix('time/').removesuffix('_s')} | {seconds:.3f} | "
            f"{seconds / step:.0%} |"
        )
    if report["memory_gib"]:
        lines += [
            "",
            "| phase | GiB measured | planned | measured / planned |",
            "|---|---|---|---|",
        ]
        lines += [_memory_row(phase, **found) for phase, found in report["memory_gib"].items()]
    mfu = report["mfu"]
    rates = ", ".join(
        f"{stage} {value:.0f} ({mfu[stage]:.0%})"
        for stage, value in report["tflops_per_gpu"].items()
    )
    lines.append(
        f"\n{report['samples']} samples a step, {report['samples_per_s']:.2f} a second; "
        "TFLOP/s a GPU (MFU of "
        f"{report['peak_tflops']:g}): {rates}; peak {report['peak_gib']:.1f} GiB of a trainer "
        "rank; "
        f"{report['start_s']:.0f} s to the first step\n"
    )
    if shares := report.get("mfu_fp8"):
        text = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())
        lines.append(f"MFU of FP8's {report['peak_fp8_tflops']:g} TFLOP/s: {text}\n")
    if report["zero_std_ratio"]:
        lines.append(
            f"{100 * report['zero_std_ratio']:.2g} % of the groups have equal rewards. "
            "Training leaves them out where it can, "
            "and its TFLOP/s count them all. Random weights write no text: give "
            "reward.ocr.type=jpeg_size.\n"
        )
    return "\n".join(lines) + "\n"


def _memory_row(phase: str, *, measured: float, planned: float | None = None) -> str:
    beside = f"{planned:.1f} | {measured / planned:.2f}" if planned else "– | –"
    return f"| {phase} | {measured:.1f} | {beside} |"


def _median(rows: list[dict], key: str) -> float:
    return statistics.median(row[key] for row in rows)
