"""Open what a conversion reads, told by its content: a diffusers model, a checkpoint or a LoRA."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from megadiff.checkpoint.base_weights import (
    ALL,
    NOT_STORED,
    base_difference,
    base_fingerprint,
    names_not_stored,
    tensor_fingerprints,
)
from megadiff.checkpoint.run_folders import (
    chosen_checkpoint,
    is_checkpoint,
    model_path,
    read_config,
    read_progress,
)
from megadiff.convert.model_folders import (
    COMPONENT,
    ModelFolder,
    misfits,
    open_model,
    open_single_file,
)
from megadiff.parallel.lora import lora_shapes
from megadiff.tensors.lora_files import ALONE, PEFT_CONFIG, has_loras, lora_misfits, open_loras
from megadiff.tensors.lora_names import lora_from_json
from megadiff.tensors.shards import AVERAGED, LAGGING, TRAINED, ShardFolder, shard_file
from megadiff.tensors.stored_tensors import StoredTensors, from_checkpoint, listed, prefixed
from megadiff.types import LoraSpec, Progress, Shape, Shapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, checkpoint or LoRA at `path`. Only headers are read until a tensor is asked for.

    base: the model that it is, or that it was trained from; None for a LoRA alone.
    lora: set for weights that are low-rank pairs over the base; None for whole weights.
    policy: component → its tensors by their own names, the running average where there is one.
    state: all that a checkpoint would hold, under its names (`model/transformer.<name>`).
    values, progress, config: of the checkpoint, or of a run that is yet to start.
    """

    path: Path
    base: ModelFolder | None
    lora: LoraSpec | None
    policy: Mapping[str, StoredTensors]
    state: StoredTensors
    # No component has made an optimizer step: a run begins with fresh moments.
    values: Mapping[str, object] = field(default_factory=lambda: {"optimizer_steps": {}})
    progress: Progress = field(default_factory=Progress)
    config: Mapping[str, object] = field(default_factory=dict)


def open_source(
    path: Path, *, step: int | None, base: Path | None, raw: bool, family: str = ""
) -> Source:
    """Open path, whatever it is. raw: not the running average.

    family: of the model, "module:Class"; by default a run's model.family, or a registered one.

    base: the model folder where path does not say, or says another. Raises ValueError that says
    what was looked for, or what is wrong with which file and tensor.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")

    is_run = (path / "checkpoints").is_dir()
    # An option that would go unused is refused: it asks for something else than what is done.
    if step is not None and not is_run:
        raise ValueError(
            f"--step {step} chooses among the checkpoints of a run, but {path} is no run's folder "
            "(checkpoints/)"
        )

    # A file of shards alone is a checkpoint that lacks the rest, which the message then says.
    if is_run or is_checkpoint(path) or shard_file(path, 0).is_file():
        folder = chosen_checkpoint(path, step=step) if is_run else path
        return _open_checkpoint(folder, base=base, raw=raw, family=family)

    if raw:
        raise ValueError(f"--raw is for checkpoints with a running average, which {path} is not")

    # a whole model may have a LoRA beside it, as diffusers' save_lora_weights(MODEL) leaves one
    is_component = (path / "config.json").is_file() and not (path / PEFT_CONFIG).is_file()
    is_model = (path / "model_index.json").is_file() or is_component
    # a LoRA is a single file, or lies in a folder, as well
    if not is_model and has_loras(path):
        return _open_lora(path, base=open_model(base, family) if base else None)
    if path.is_file():
        return _open_model(open_single_file(path, base=base, family=family))
    if is_model:
        if base:
            raise ValueError(
                f"--base {base} is for weights without a model around them; {path} is a whole model"
            )
        return _open_model(open_model(path, family))

    raise ValueError(
        f"{path} is nothing that can be converted. Looked for: a run (checkpoints/step_…), a "
        "checkpoint (progress.json), a pipeline (model_index.json), a component (config.json), a "
        "LoRA (adapter_config.json or pytorch_lora_weights.safetensors) or one for each component, "
        "one .safetensors file"
    )


def _open_model(model: ModelFolder) -> Source:
    policy = {}
    for name, component in model.components.items():
        trained = component.model.trained_shapes
        policy[name] = {key: component.tensors[key] for key in trained}
    return Source(
        path=model.path,
        base=model,
        lora=None,
        policy=policy,
        state=_trained(policy),
    )


def _open_lora(path: Path, *, base: ModelFolder | None) -> Source:
    loras = open_loras(path)
    if ALONE in loras:
        loras = {_component_of_one(path, base): loras[ALONE]}
    spec = next(iter(loras.values())).spec
    policy = {name: lora.tensors for name, lora in loras.items()}
    if base:
        unknown = [name for name in policy if name not in base.components]
        if unknown:
            raise ValueError(
                f"{path} is of {', '.join(unknown)}, but {base.path} has "
                f"{', '.join(base.components)}; give --base the model that it was trained from"
            )
        for name, lora in loras.items():
            component = base.components[name]
            problems = lora_misfits(lora, component.model.shapes)
            if problems:
                raise ValueError(f"{lora.path} does not fit {component.folder}: {listed(problems)}")

    values = {"optimizer_steps": {}, "lora": asdict(spec)}
    return Source(
        path=path, base=base, lora=spec, policy=policy, state=_trained(policy), values=values
    )


def _component_of_one(path: Path, base: ModelFolder | None) -> str:
    """Name the component of a LoRA by its folder. Raises ValueError where that is not clear."""
    if base is None or len(base.components) == 1:
        return COMPONENT
    name = (path.parent if path.is_file() else path).resolve().name
    if name not in base.components:
        folders = " or ".join(str(component.folder) for component in base.components.values())
        raise ValueError(
            f"{path} may be of any of the {len(base.components)} components of {base.path}: give "
            f"--base {folders}, or name its folder {' or '.join(base.components)}"
        )
    return name


def _open_checkpoint(folder: Path, *, base: Path | None, raw: bool, family: str) -> Source:
    progress = read_progress(folder)
    shards = ShardFolder(folder)
    model_folder = base or model_path(folder)
    config = read_config(folder) if (folder / "config.yaml").is_file() else {}
    section = config.get("model")
    if isinstance(section, dict):
        family = family or str(section.get("family", ""))
    model = open_model(model_folder, family)
    spec = lora_from_json(shards.values.get("lora"))
    state = from_checkpoint(shards)

    shapes = _trained_shapes(model, spec)
    _check_state(state, shapes, folder=folder, base=model)
    if raw and not any(name.startswith(f"{AVERAGED}/") for name in state):
        raise ValueError(f"--raw is for checkpoints with a running average, and {folder} has none")

    policy = {}
    for component, shapes_of_component in shapes.items():
        # A component has averages of all its parameters, or of none.
        average = f"{AVERAGED}/{component}."
        is_averaged = not raw and any(name.startswith(average) for name in state)
        prefix = average if is_averaged else f"{TRAINED}/{component}."
        policy[component] = {name: state[f"{prefix}{name}"] for name in shapes_of_component}

    return Source(
        path=folder,
        base=model,
        lora=spec,
        policy=policy,
        state=state,
        values=shards.values,
        progress=progress,
        config=config,
    )


def _trained_shapes(model: ModelFolder, lora: LoraSpec | None) -> dict[str, Shapes]:
    """Return component → parameter → shape, in the model's order, of what training changes."""
    return {
        name: lora_shapes(lora, component.model.shapes) if lora else component.model.trained_shapes
        for name, component in model.components.items()
    }


def check_base(source: Source, *, is_named: bool) -> None:
    """Raise ValueError when a checkpoint belongs to other weights than the base's.

    Those are all weights under a LoRA, else the ones that the checkpoint does not hold.
    is_named: the base was given with --base, and so is meant; then there is a warning only.
    """
    theirs = source.progress.base
    key = ALL if source.lora else NOT_STORED
    if not source.base or key not in theirs:
        return

    components = source.base.components
    files = {name: component.files for name, component in components.items()}
    names = None
    if not source.lora:
        plan = next(iter(components.values())).model.plan
        names = names_not_stored(files, plan)
    # Reads the weights, and so comes after the cheap reasons to return.
    ours = base_fingerprint([tensor_fingerprints(files, names=names)])
    difference = base_difference(theirs, {"path": str(source.base.path), key: ours})
    if not difference:
        return

    problem = f"{source.path} {difference}"
    if not is_named:
        raise ValueError(f"{problem}; name the model folder that you mean with --base")
    logger.warning("warning: %s; they are taken, as --base names them", problem)


def _trained(policy: Mapping[str, StoredTensors]) -> StoredTensors:
    """Return the state of a run that is yet to start from these weights."""
    state: StoredTensors = {}
    for component, tensors in policy.items():
        state |= prefixed(f"{TRAINED}/{component}.", tensors)
    return state


def _check_state(
    state: StoredTensors,
    shapes: Mapping[str, Shapes],
    *,
    folder: Path,
    base: ModelFolder,
) -> None:
    """Raise ValueError unless the state is a checkpoint's. shapes: component → parameter → shape.

    It has weights of all parameters, averages of all of some components, moments of some
    parameters, in float32, and nothing else.
    """
    all_shapes: dict[str, Shape] = {}
    for component, shapes_of_component in shapes.items():
        all_shapes |= {f"{component}.{name}": shape for name, shape in shapes_of_component.items()}

    tensors_by_kind: dict[str, StoredTensors] = {TRAINED: {}}
    for name, stored in state.items():
        kind, _, parameter = name.rpartition("/")
        tensors_by_kind.setdefault(kind, {})[parameter] = stored

    problems = []
    for kind, tensors in tensors_by_kind.items():
        whole_components: set[str] = set()  # with a tensor of this kind for each parameter
        if kind == TRAINED:
            whole_components = set(shapes)
        elif kind in (AVERAGED, LAGGING):
            whole_components = set(map(_component, tensors))
        # Moments may lack: a parameter that never had a gradient has none.
        wanted = {
            name: shape
            for name, shape in all_shapes.items()
            if name in tensors or _component(name) in whole_components
        }
        of_kind = misfits(tensors, wanted, dtypes=(torch.float32,))
        problems += [f"{kind}: {problem}" for problem in of_kind]

    if problems:
        configs = [f"{component.folder}/config.json" for component in base.components.values()]
        raise ValueError(
            f"{folder} does not fit {', '.join(configs)}, the model it was trained from (name that "
            f"with --base): {listed(problems)}"
        )


def _component(parameter: str) -> str:
    return parameter.partition(".")[0]


def ordered_state(source: Source) -> list[str]:
    """Return the names of a checkpoint's tensors in the engines' order.

    Weights come first, then averages, then moments, each in the model's order.
    """
    parameters: list[str] = []
    assert source.base, "a checkpoint is of a model"
    for component, shapes in _trained_shapes(source.base, source.lora).items():
        parameters += [f"{component}.{name}" for name in shapes]
    order = {name: index for index, name in enumerate(parameters)}
    kinds = (TRAINED, AVERAGED, LAGGING)

    def key(name: str) -> tuple[int, int, str]:
        kind, _, parameter = name.rpartition("/")
        rank = kinds.index(kind) if kind in kinds else len(kinds)
        return rank, order[parameter], kind

    return sorted(source.state, key=key)
