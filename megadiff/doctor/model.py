"""Look at a model folder: family, sizes, dtypes, what is missing, and what would be trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megadiff.doctor.downloads import download_findings
from megadiff.doctor.finding import Finding, error, ok, refusal, size_text
from megadiff.planner.model_facts import ComponentFacts, ModelFacts, model_facts
from megadiff.process.words import short_count
from megadiff.tensors.stored_tensors import FLOATS

TRAINABLE = [str(dtype).removeprefix("torch.") for dtype in FLOATS]
MISFIT = "does not fit its config"  # of model_facts: tensors by name and shape
RANK = 64  # of the LoRA whose parameters are shown


def model_findings(folder: Path, family: str = "") -> Iterator[Finding]:
    """Yield what there is to say of a folder. family: as model.family."""
    try:
        facts = model_facts(folder, family)
    except ValueError as failure:
        yield _unknown(str(failure))
        return

    yield ok("family", f"{facts.title} ({facts.pipeline_class}), by {facts.family}")
    for component in facts.components:
        yield ok(component.name, _sizes(component))
        yield from _dtypes(component, folder)
    if facts.trained:
        yield _trained(facts)

    told = []
    for finding in download_findings(folder):
        told.append(finding.text)
        yield finding
    yield from _problems(facts, told)


def _unknown(message: str) -> Finding:
    if "supported" not in message:
        return refusal("family", message)
    fix = "take a model of one of these, or add its family: docs/adding_a_model.md"
    return refusal("family", message, fix=fix)


def _sizes(component: ComponentFacts) -> str:
    stored = [f"{size_text(size)} {dtype}" for dtype, size in component.num_bytes.items()]
    text = f"{short_count(component.num_parameters)} parameters, "
    text += " and ".join(stored) or "no weights here"
    return f"{text}, {component.class_name}{'; trained' if component.is_trained else ''}"


def _dtypes(component: ComponentFacts, folder: Path) -> Iterator[Finding]:
    foreign = [dtype for dtype in component.num_bytes if dtype not in TRAINABLE]
    if component.is_trained and foreign:
        sizes = ", ".join(f"{component.num_bytes[dtype]} bytes {dtype}" for dtype in foreign)
        yield error(
            "dtype",
            f"{folder / component.name} holds {sizes}; trained are 0 bytes of other than "
            f"{', '.join(TRAINABLE)}",
            fix="fetch the model's bfloat16 release: quantised weights are not trained",
        )


def _trained(facts: ModelFacts) -> Finding:
    trained = facts.trained
    assert trained is not None
    components = [component for component in facts.components if component.is_trained]
    count = sum(component.num_parameters for component in components)
    never = len(components) * (trained.num_frozen + trained.num_unused)
    lora = RANK * trained.lora_parameters

    return ok(
        "trained",
        f"{short_count(count - never)} of {short_count(count)} parameters in {trained.num_blocks} "
        f"blocks; a LoRA of rank {RANK} trains {short_count(lora)} of each component",
    )


def _problems(facts: ModelFacts, told: list[str]) -> Iterator[Finding]:
    """Yield the folder's problems, without those of files that are told already."""
    for problem in facts.problems:
        path = problem.partition(" ")[0]
        if any(text.startswith(f"{path} ") for text in told):
            continue
        if MISFIT in problem:
            fix = "fetch the component again, with the config.json that belongs to it"
            yield error("tensors", problem, fix=fix)
        else:
            yield refusal("files", problem)
    if not facts.problems:
        yield ok("files", f"{len(facts.components)} components are whole, none lacks a tensor")
