"""Say what a model folder holds and what of it would be trained, from headers and configs alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadiff.models.adapter import ModelAdapter
from megadiff.models.pipeline_folder import read_index, weighted_components
from megadiff.models.registry import CONSTRUCTOR_ERRORS, build_adapter, family_of
from megadiff.parallel.lora import lora_shapes
from megadiff.planner.footprint import empty_component
from megadiff.tensors.model_files import open_weights, read_json, weight_files
from megadiff.tensors.stored_tensors import listed
from megadiff.tensors.tensor_file import DTYPES_BY_NAME
from megadiff.types import LoraSpec, Sampling, Shape, Shapes

MAX_TP = 64  # more ranks share no model
SCHEDULE_KEYS = (  # of scheduler_config.json
    "shift",
    "flow_shift",
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "shift_terminal",
)
STEPS = 4  # of the schedule that is shown
EXAMPLE_PIXELS = 512


@dataclass(frozen=True, kw_only=True)
class ComponentFacts:
    """Describe one network of the folder.

    num_bytes: dtype → bytes in its files; empty where it has none, and sizes come from config.json.
    """

    name: str
    class_name: str
    is_trained: bool
    num_parameters: int
    num_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class TrainedFacts:
    """Describe a trained transformer; several components are of one shape.

    num_unused, num_frozen: parameters that are never trained. constants: tensors in its files that
    are no weights. lora: names of a block's linears that LoRA wraps, by how many blocks have them.
    lora_parameters: for each unit of rank.
    """

    num_blocks: int
    num_heads: int
    head_width: int
    num_unused: int
    num_frozen: int
    constants: tuple[str, ...]
    lora: Mapping[str, int]
    lora_parameters: int
    tp: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Describe a model folder. problems: what is missing or wrong; empty for a whole one.

    family: "module:Class". trained: None where configs are too damaged to build it.
    schedule: keys of scheduler_config.json, and sigmas of STEPS steps at EXAMPLE_PIXELS².
    """

    folder: str
    title: str
    family: str
    pipeline_class: str
    components: tuple[ComponentFacts, ...] = ()
    trained: TrainedFacts | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def model_facts(folder: Path, family: str = "") -> ModelFacts:
    """Return the facts of a folder. Raises ValueError where no family recognises it."""
    choice = family_of(folder, family)
    index = read_index(folder)
    problems = list(choice.folder_problems(folder, index))
    shapes: dict[str, Shape] = {}
    schedule: dict[str, Any] = {}
    trained = None
    components: list[ComponentFacts] = []
    try:
        adapter = build_adapter(folder, family)
        transformer = adapter.empty_transformer()
        shapes = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
        trained = _trained(adapter, shapes)
        for name in adapter.components:
            problems += _name_problems(folder / name, shapes, adapter.plan.constants)
        components = _components(folder, adapter, shapes)
        schedule = _schedule(folder, adapter)
    except CONSTRUCTOR_ERRORS as error:
        # a folder that lacks a file says so once
        if str(error) not in problems:
            problems.append(str(error))

    return ModelFacts(
        folder=str(folder),
        title=choice.title,
        family=f"{choice.__module__}:{choice.__qualname__}",
        pipeline_class=choice.pipeline_class,
        components=tuple(components),
        trained=trained,
        schedule=schedule,
        problems=tuple(problems),
    )


def _trained(adapter: ModelAdapter, shapes: Shapes) -> TrainedFacts:
    plan = adapter.plan
    modules = plan.lora_modules(shapes)
    # without the block's own name, e.g. attn.to_q
    linears = Counter(module.removeprefix(f"{plan.block_of(module)}.") for module in modules)
    pairs = lora_shapes(LoraSpec(rank=1, alpha=1, modules=modules), shapes)
    return TrainedFacts(
        num_blocks=len({plan.block_of(name) for name in shapes} - {None}),
        num_heads=adapter.num_heads,
        head_width=adapter.width // adapter.num_heads,
        num_unused=_count(shapes, plan.unused_names(shapes)),
        num_frozen=_count(shapes, plan.frozen_names(shapes)),
        constants=plan.constants,
        lora=dict(sorted(linears.items())),
        lora_parameters=sum(map(math.prod, pairs.values())),
        tp=tuple(_possible_tp(adapter, shapes)),
    )


def _count(shapes: Shapes, names: set[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)


def _possible_tp(adapter: ModelAdapter, shapes: Shapes) -> list[int]:
    """Return the sizes of tensor parallelism that divide the heads and every sharded weight."""
    possible = []
    for tp in range(1, min(adapter.num_heads, MAX_TP) + 1):
        if adapter.num_heads % tp:
            continue
        try:
            adapter.plan.placements(shapes, tp=tp, tp_rank=0, sequence_parallel=True)
        except ValueError:
            continue
        possible.append(tp)
    return possible


def _name_problems(component: Path, shapes: Shapes, constants: tuple[str, ...]) -> list[str]:
    """Say what a trained component's files lack or have too much, by names and shapes."""
    stored: dict[str, Shape] = {}
    try:
        for path in weight_files(component):
            file = open_weights(path)
            stored |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except ValueError:
        # told already, as a file that is missing or torn
        return []
    problems = [f"missing {name}" for name in shapes.keys() - stored.keys()]
    problems += [f"missing {name}" for name in constants if name not in stored]
    extra = stored.keys() - shapes.keys() - set(constants)
    problems += [f"not in the model: {name}" for name in extra]
    for name in shapes.keys() & stored.keys():
        if stored[name] != shapes[name]:
            problems.append(f"{name} has shape {stored[name]}, the model's is {shapes[name]}")
    if not problems:
        return []
    return [f"{component} does not fit its config: {listed(sorted(problems))}"]


def _components(folder: Path, adapter: ModelAdapter, shapes: Shapes) -> list[ComponentFacts]:
    """Return the folder's networks: the trained ones, then the others of model_index.json."""
    classes = weighted_components(read_index(folder))
    names = [*adapter.components, *(name for name in classes if name not in adapter.components)]
    components = []
    for name in names:
        is_trained = name in adapter.components
        library, class_name = classes.get(name, ("", adapter.transformer_class))
        num_parameters, num_bytes = _stored_sizes(folder / name)
        if is_trained:
            num_parameters = sum(map(math.prod, shapes.values()))
        elif not num_bytes and (folder / name / "config.json").is_file():
            module = empty_component(folder / name, library, class_name)
            num_parameters = sum(parameter.numel() for parameter in module.parameters())
        facts = ComponentFacts(
            name=name,
            class_name=class_name,
            is_trained=is_trained,
            num_parameters=num_parameters,
            num_bytes=num_bytes,
        )
        components.append(facts)
    for name, num_parameters in adapter.root_networks().items():
        facts = ComponentFacts(
            name=name,
            class_name="in the folder's root",
            is_trained=False,
            num_parameters=num_parameters,
            num_bytes={},
        )
        components.append(facts)
    return components


def _stored_sizes(component: Path) -> tuple[int, dict[str, int]]:
    """Return (elements, bytes by dtype) of a component's files; zeros where they are not whole."""
    elements = 0
    num_bytes: Counter[str] = Counter()
    try:
        for path in weight_files(component):
            file = open_weights(path)
            for name in file.keys():
                header = file.get_slice(name)
                dtype = DTYPES_BY_NAME[header.get_dtype()]
                size = math.prod(header.get_shape())
                elements += size
                num_bytes[str(dtype).removeprefix("torch.")] += size * dtype.itemsize
    except ValueError:
        return 0, {}
    return elements, dict(num_bytes)


def _schedule(folder: Path, adapter: ModelAdapter) -> dict[str, Any]:
    """Return what decides the schedule, and an example of it."""
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json(path) if path.is_file() else {}
    facts = {key: config[key] for key in ("_class_name", *SCHEDULE_KEYS) if key in config}
    sampling = Sampling(
        height=EXAMPLE_PIXELS, width=EXAMPLE_PIXELS, num_inference_steps=STEPS, sde_window_size=0
    )
    return facts | {"sigmas": [round(sigma, 4) for sigma in adapter.schedule(sampling).tolist()]}
