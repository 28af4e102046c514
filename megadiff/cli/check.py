"""Say of a model folder what would be trained, how large it is, and what it lacks.

Reads configs and the headers of weight files alone: seconds, whatever the size.
exit codes: 0 whole, 1 something is missing or wrong, 2 no family recognises it
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megadiff.planner.engine_memory import GIB
from megadiff.planner.model_facts import (
    EXAMPLE_PIXELS,
    STEPS,
    ComponentFacts,
    ModelFacts,
    TrainedFacts,
    model_facts,
)
from megadiff.process.words import short_count

RANK = 64  # of the LoRA whose parameters are shown
BFLOAT16_BYTES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write the facts to stdout and return the exit code."""
    options = _parser().parse_args(argv)
    if (options.model / "config.yaml").is_file():
        sys.stderr.write(
            f"error: {options.model} is a run, not a model folder: export it by "
            f"`megadiff convert {options.model} OUT` (--to merged where it trained a LoRA), or "
            "check the model.path of its config.yaml\n"
        )
        return 2
    try:
        facts = model_facts(options.model, options.family)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2

    text = json.dumps(asdict(facts)) if options.json else "\n".join(_lines(facts))
    sys.stdout.write(f"{text}\n")
    return 1 if facts.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model folder")
    parser.add_argument(
        "--family",
        default="",
        metavar="MODULE:CLASS",
        help="the adapter's class; by default a registered family recognises the folder",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _lines(facts: ModelFacts) -> Iterator[str]:
    yield f"{facts.folder}: {facts.title} ({facts.pipeline_class}), by {facts.family}"
    if facts.components:
        yield ""
        yield f"  {'component':<16}{'parameters':>12}{'GiB':>9}  {'dtype':<10} class"
    for component in facts.components:
        yield from _component_lines(component)
    if facts.trained:
        yield ""
        yield from _trained_lines(facts.trained)
    if facts.schedule:
        yield from _schedule_lines(facts)
    yield ""
    for problem in facts.problems:
        yield f"problem: {problem}"
    if not facts.problems:
        yield "whole: nothing is missing"


def _component_lines(component: ComponentFacts) -> Iterator[str]:
    label = f"{component.name}{' *' if component.is_trained else ''}"
    parameters = short_count(component.num_parameters)
    sizes = dict(component.num_bytes)
    if not sizes:
        sizes = {"(bfloat16)": BFLOAT16_BYTES * component.num_parameters}
    for dtype, num_bytes in sizes.items():
        gib = f"{num_bytes / GIB:.2f}"
        yield f"  {label:<16}{parameters:>12}{gib:>9}  {dtype:<10} {component.class_name}"


def _trained_lines(trained: TrainedFacts) -> Iterator[str]:
    heads = f"{trained.num_heads} heads of {trained.head_width}"
    yield f"* trained: {trained.num_blocks} blocks, {heads}"
    if trained.num_unused:
        yield f"  never trained, as nobody reads them: {short_count(trained.num_unused)}"
    if trained.num_frozen:
        yield f"  frozen: {short_count(trained.num_frozen)}"
    if trained.constants:
        yield f"  constants, read and never trained: {', '.join(trained.constants)}"
    parameters = short_count(RANK * trained.lora_parameters)
    yield f"  LoRA of rank {RANK}: {parameters} in {', '.join(trained.lora)}"
    yield f"  tp: {', '.join(map(str, trained.tp))}; tp·sp divides {trained.num_heads}"


def _schedule_lines(facts: ModelFacts) -> Iterator[str]:
    schedule = dict(facts.schedule)
    sigmas = ", ".join(f"{sigma:g}" for sigma in schedule.pop("sigmas"))
    class_name = schedule.pop("_class_name", "of the family")
    keys = ", ".join(f"{key}={value}" for key, value in schedule.items())
    yield f"  schedule: {' '.join(filter(None, (str(class_name), keys)))}"
    yield f"  sigmas of {STEPS} steps at {EXAMPLE_PIXELS}²: {sigmas}"
