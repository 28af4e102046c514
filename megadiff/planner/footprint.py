"""Size a replica's memory from the model's folder: no engine is started and no weight is read."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from accelerate import init_empty_weights
from torch import nn

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.models.adapter import ModelAdapter
from megadiff.models.pipeline_folder import ClassPath, read_index, weighted_components
from megadiff.parallel.mesh import Layout
from megadiff.planner.activation_memory import activation_bytes
from megadiff.planner.engine_memory import FLOAT32, ModelShape, Placing
from megadiff.planner.work import Machine, num_passes, stream_itemsize, work_of
from megadiff.tensors.manifest import folder_manifest
from megadiff.train.sampling import sampling_of
from megadiff.types import DTYPES

# the text encoder's vision tower, which pipelines that are given no images drop
VISION_TOWER = "visual."


@dataclass(frozen=True, kw_only=True)
class ReplicaWeights:
    """Hold the bytes of one worker's weights.

    transformers: what a push replaces. encoder: the text encoder as a checkpoint has it.
    others: text encoder as it is served, VAE, and so on.
    unknown: components that could not be sized.
    """

    transformers: int
    encoder: int
    others: int
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Hold the bytes of one worker of a replica, which has rollout.tp of them.

    weights: while it samples; pushed: while a push lands; beside_base: at both times, where it maps
    a shared base. working: beside them while it samples.
    sleeps: whether it frees them while the trainer works; parked: what then waits on the host.
    encoder: of the text encoders that the trainer loads for the parity gate.
    per_gpu: workers on the fullest GPU of the trainer. unknown: components without a size.
    """

    weights: int = 0
    pushed: int = 0
    beside_base: int = 0
    parked: int = 0
    encoder: int
    working: int = 0
    per_gpu: int = 0
    sleeps: bool = False
    unknown: tuple[str, ...] = ()


def size_replicas(
    config: Config, model: ModelShape, machine: Machine, *, text_tokens: int
) -> Replicas:
    """Return zeros where replicas are on other GPUs than the trainer's, or nothing samples."""
    rollout = config.rollout
    dtype = config.model.dtype
    weights = replica_weights(model.adapter, dtype=dtype, tp=rollout.tp, sees_images=rollout.images)
    samples = build_algorithm(config.algorithm).on_policy or config.eval.every

    # The trainer loads the text encoder in any case, for the parity gate.
    if rollout.mode == "separate" or not samples:
        return Replicas(encoder=weights.encoder)

    is_asleep = sleeps(config, device_type="cuda")
    whole = weights.transformers + weights.others
    copies, copied = _fp8_bytes(config, model) if rollout.fp8 else (0, 0)
    # as train/replicas.py starts them
    num_replicas = rollout.num_replicas or max(1, machine.world_size // rollout.tp)

    return Replicas(
        # FP8 copies take the bfloat16 weights' memory in a replica that sleeps between samples
        weights=whole + copies - (copied if is_asleep else 0),
        pushed=whole + (0 if is_asleep else copies),
        # there bfloat16 is the trainer's, and stays
        beside_base=weights.others + copies,
        parked=weights.others if is_asleep else 0,
        encoder=weights.encoder,
        working=_working_bytes(config, model, machine, text_tokens),
        per_gpu=math.ceil(num_replicas * rollout.tp / machine.world_size),
        sleeps=is_asleep,
        unknown=weights.unknown,
    )


def _working_bytes(config: Config, model: ModelShape, machine: Machine, text_tokens: int) -> int:
    """Return the larger of what the transformer and the VAE have at work, beside weights."""
    rollout = config.rollout
    itemsize = DTYPES[config.model.dtype].itemsize
    group_size = config.algorithm.group_size
    # a call has whole groups, at least one
    rows = max(group_size, rollout.batch_size // group_size * group_size)

    sampling = sampling_of(rollout)
    tokens = model.adapter.token_count(sampling, text_tokens)
    alone = Placing(backend="veomni", layout=Layout(world_size=1, dp=1, dp_replicate=1, sp=1, tp=1))
    work = replace(
        work_of(config, model, alone, machine, text_tokens),
        rows=rows,
        image_tokens=tokens.image,
        modulates_tokens=tokens.is_modulated,
        passes=num_passes(model.adapter, sampling),
        itemsize=itemsize,
        stream_itemsize=stream_itemsize(config, config.model.dtype),
    )

    decoding = model.adapter.decoding.num_bytes(
        rows,
        num_frames=rollout.num_frames,
        height=rollout.height,
        width=rollout.width,
        itemsize=itemsize,
    )
    return max(decoding, activation_bytes(model, alone, work, training=False))


def _fp8_bytes(config: Config, model: ModelShape) -> tuple[int, int]:
    """Return the bytes of the FP8 copies and of the weights they are copies of."""
    shapes = [model.shapes[name] for name in model.plan.fp8_weights(model.shapes)]
    num_elements = sum(map(math.prod, shapes))
    num_rows = sum(shape[0] for shape in shapes)
    num_components = len(model.adapter.components)
    tp = config.rollout.tp
    # one byte an element, and a float32 scale a row
    copies = num_components * math.ceil((num_elements + FLOAT32 * num_rows) / tp)
    copied = num_components * num_elements * DTYPES[config.model.dtype].itemsize // tp
    return copies, copied


@cache
def replica_weights(
    adapter: ModelAdapter, *, dtype: str, tp: int = 1, sees_images: bool = False
) -> ReplicaWeights:
    """Return the weights' bytes in dtype. tp: workers that split the transformers' weights.

    Sizes come from the safetensors headers. Where only a component's config.json is there, they
    come from its empty module; a component with neither is unknown.
    sees_images: whether the text encoder keeps its vision tower.
    """
    model_folder = adapter.model_folder
    transformers = 0
    others = sum(adapter.root_networks().values())
    encoder = 0
    unknown = []

    networks = weighted_components(read_index(model_folder))
    if not networks:  # all lie in the folder's root
        parameters = adapter.empty_transformer().parameters()
        transformers = math.ceil(sum(parameter.numel() for parameter in parameters) / tp)

    for component, class_path in networks.items():
        shapes = _shapes(model_folder, component, class_path, dtype)
        if shapes is None:
            unknown.append(component)
            continue
        # constants are counted apart: a replica keeps them while it sleeps
        constants = adapter.plan.constants
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if name not in constants}
        served = sum(
            size for name, size in sizes.items() if sees_images or VISION_TOWER not in name
        )
        if component.startswith("transformer"):
            transformers += math.ceil(served / tp)
            continue
        others += served
        if component.startswith("text_encoder"):  # SD3 has three, and the gate loads them all
            encoder += sum(sizes.values())

    itemsize = DTYPES[dtype].itemsize
    return ReplicaWeights(
        transformers=itemsize * transformers,
        encoder=itemsize * encoder,
        others=itemsize * others,
        unknown=tuple(unknown),
    )


def _shapes(
    model_folder: Path, component: str, class_path: ClassPath, dtype: str
) -> Mapping[str, Sequence[int]] | None:
    """Return a component's name → shape, None where nothing tells.

    class_path: (library, class) as in model_index.json.
    """
    folder = model_folder / component
    has_config = (folder / "config.json").is_file()
    if list(folder.glob("*.safetensors")):
        try:
            rows = folder_manifest(model_folder, (component,), dtype=dtype)
            return {name.removeprefix(f"{component}."): row["shape"] for name, row in rows.items()}
        except ValueError:
            # half a download; a plan needs no weights where a config describes them
            if not has_config:
                raise
    if has_config:
        return {
            name: p.shape for name, p in empty_component(folder, *class_path).named_parameters()
        }
    return None


def empty_component(folder: Path, library: str, class_name: str) -> nn.Module:
    """Return the module that a component's config.json describes, on the meta device."""
    module_class = getattr(importlib.import_module(library), class_name)
    # buffers too: SD3's table of positions takes seconds to compute
    with init_empty_weights(include_buffers=True):
        if library == "diffusers":
            return module_class.from_config(module_class.load_config(folder))
        module = module_class(module_class.config_class.from_pretrained(folder))
    # a tied weight is there once
    module.tie_weights()
    return module
