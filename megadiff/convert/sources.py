"""What a conversion reads, recognised by its content: a diffusers model, a checkpoint, a LoRA of another library."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from megadiff.checkpoint.base_weights import base_fingerprint, tensor_fingerprints
from megadiff.checkpoint.run_folders import (
    chosen_checkpoint,
    is_checkpoint,
    model_path,
    read_config,
    read_progress,
)
from megadiff.convert.lora_files import has_loras, lora_misfits, open_loras
from megadiff.convert.model_folders import (
    ModelFolder,
    listed,
    misfits,
    open_model,
    open_single_file,
)
from megadiff.parallel.lora import lora_shapes
from megadiff.parallel.plan import is_lora
from megadiff.tensors.lora_names import lora_from_json
from megadiff.tensors.row_sources import JoinedRows, RowSource, ShardRows
from megadiff.tensors.shards import AVERAGED, TRAINED, ShardFolder, shard_file
from megadiff.types import LoraSpec, Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """path: what is read. base: the model that it is, or that it was trained from; None of a LoRA alone.

    lora: of weights that are low-rank pairs over the base; None of whole weights. policy: component → its tensors (the
    running average where there is one), by their own names. state: all that a checkpoint would hold, under its names
    (`model/transformer.<name>`). values, progress, config: of the checkpoint, or of a run that is yet to start.
    """

    path: Path
    base: ModelFolder | None
    lora: LoraSpec | None
    policy: Mapping[str, RowSource]
    state: RowSource
    values: Mapping[str, object]
    progress: Progress = field(default_factory=Progress)
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def read_from(self) -> list[Path]:
        return [self.path, *([self.base.path] if self.base else [])]


def open_source(path: Path, *, step: int | None, base: Path | None, raw: bool) -> Source:
    """base: the model folder where path does not say, or says another. raw: not the running average.

    Only headers are read. Raises ValueError that says what was looked for, or what is wrong with which file and tensor.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    is_run = (path / "checkpoints").is_dir()
    if step is not None and not is_run:
        raise ValueError(
            f"--step {step} chooses among the checkpoints of a run, but {path} is no run's folder (checkpoints/)"
        )
    if is_run or is_checkpoint(path) or shard_file(path, 0).is_file():
        return _open_checkpoint(
            chosen_checkpoint(path, step=step) if is_run else path, base=base, raw=raw
        )
    if raw:
        raise ValueError(f"--raw is for checkpoints with a running average, which {path} is not")
    if has_loras(path):
        return _open_lora(path, base=open_model(base) if base else None)
    if path.is_file():
        return _open_model(open_single_file(path, base=base))
    if (path / "model_index.json").is_file() or (path / "config.json").is_file():
        if base:
            raise ValueError(
                f"--base {base} is for weights without a model around them; {path} is a whole model"
            )
        return _open_model(open_model(path))
    raise ValueError(
        f"{path} is nothing that can be converted. Looked for: a run (checkpoints/step_…), a checkpoint (progress.json), a "
        "pipeline (model_index.json), a component (config.json), a LoRA (adapter_config.json or "
        "pytorch_lora_weights.safetensors) or one for each component, one .safetensors file"
    )


def _open_model(model: ModelFolder) -> Source:
    policy = {name: component.rows() for name, component in model.components.items()}
    return Source(
        path=model.path,
        base=model,
        lora=None,
        policy=policy,
        state=_trained(policy),
        values={"optimizer_steps": {}},
    )


def _open_lora(path: Path, *, base: ModelFolder | None) -> Source:
    loras = open_loras(path, base=base)
    spec = next(iter(loras.values())).spec
    policy: dict[str, RowSource] = {name: lora.rows for name, lora in loras.items()}
    if base:
        _check_components(path, policy, base)
        for name, lora in loras.items():
            component = base.components[name]
            problems = lora_misfits(lora.rows, spec, component.model.shapes)
            if problems:
                raise ValueError(f"{lora.path} does not fit {component.folder}: {listed(problems)}")
    values = {"optimizer_steps": {}, "lora": asdict(spec)}
    return Source(
        path=path, base=base, lora=spec, policy=policy, state=_trained(policy), values=values
    )


def _open_checkpoint(folder: Path, *, base: Path | None, raw: bool) -> Source:
    progress, shards = read_progress(folder), ShardFolder(folder)
    model = open_model(base or model_path(folder))
    spec = lora_from_json(shards.values.get("lora"))
    state = ShardRows(shards, {name: name for name in shards.shapes})
    shapes = {
        name: lora_shapes(spec, component.model.shapes) if spec else component.model.shapes
        for name, component in model.components.items()
    }
    _check_state(state, shapes, folder=folder, base=model)
    averaged = (
        set()
        if raw
        else {name.partition("/")[2] for name in shards.shapes if name.startswith(f"{AVERAGED}/")}
    )
    kinds = {name: AVERAGED if name in map(_component, averaged) else TRAINED for name in shapes}
    return Source(
        path=folder,
        base=model,
        lora=spec,
        policy={
            component: ShardRows(
                shards, {name: f"{kinds[component]}/{component}.{name}" for name in of_component}
            )
            for component, of_component in shapes.items()
        },
        state=state,
        values=shards.values,
        progress=progress,
        config=read_config(folder) if (folder / "config.yaml").is_file() else {},
    )


def check_base(source: Source, *, is_named: bool) -> None:
    """Raise ValueError when a checkpoint's LoRA belongs to other weights than the base's.

    is_named: the base was given with --base, and so is meant; then there is a warning only.
    """
    theirs = source.progress.base
    if not theirs or not source.base:
        return
    files = {name: component.files for name, component in source.base.components.items()}
    ours = base_fingerprint([tensor_fingerprints(files)])
    if ours == theirs["fingerprint"]:
        return
    problem = (
        f"{source.path} was trained over the weights of {theirs['path']} (fingerprint "
        f"{theirs['fingerprint']}), but {source.base.path} holds others (fingerprint {ours})"
    )
    if not is_named:
        raise ValueError(f"{problem}; name the model folder that you mean with --base")
    logger.warning("warning: %s; they are taken, as --base names them", problem)


def _trained(policy: Mapping[str, RowSource]) -> JoinedRows:
    """The state of a run that is yet to start from these weights."""
    return JoinedRows({f"{TRAINED}/{component}.": rows for component, rows in policy.items()})


def _check_components(path: Path, policy: Mapping[str, RowSource], base: ModelFolder) -> None:
    unknown = [name for name in policy if name not in base.components]
    if unknown:
        raise ValueError(
            f"{path} is of {', '.join(unknown)}, but {base.path} has {', '.join(base.components)}; give --base the model "
            "that it was trained from"
        )


def _check_state(
    state: ShardRows,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    *,
    folder: Path,
    base: ModelFolder,
) -> None:
    """Weights of all the parameters of all components, averages of all of some components, moments of some parameters,
    float32, nothing else; all pieces there. shapes: component → parameter → shape."""
    wanted_of_all = {
        f"{component}.{name}": shape
        for component, held in shapes.items()
        for name, shape in held.items()
    }
    of_kind: dict[str, dict] = {TRAINED: {}}
    for name, meta in state.tensors.items():
        kind, _, parameter = name.rpartition("/")
        of_kind.setdefault(kind, {})[parameter] = meta
    problems = []
    for kind, tensors in of_kind.items():
        whole = {TRAINED: set(shapes), AVERAGED: set(map(_component, tensors))}.get(kind, set())
        wanted = {
            name: shape
            for name, shape in wanted_of_all.items()
            if name in tensors or _component(name) in whole
        }
        found = misfits(
            tensors,
            wanted,
            file_of=lambda name, kind=kind: state.file_of(f"{kind}/{name}"),
            dtypes=(torch.float32,),
        )
        problems += [f"{kind}: {problem}" for problem in found]
    if problems:
        configs = ", ".join(
            f"{component.folder}/config.json" for component in base.components.values()
        )
        raise ValueError(
            f"{folder} does not fit {configs}, the model it was trained from (name that with --base): {listed(problems)}"
        )


def _component(parameter: str) -> str:
    return parameter.partition(".")[0]


def state_order(name: str, order: Mapping[str, int]) -> tuple[int, int, str]:
    """Sorts a checkpoint's names as the engines write them: weights, averages, then moments, each in the model's order."""
    kind, _, parameter = name.rpartition("/")
    return (
        (TRAINED, AVERAGED).index(kind) if kind in (TRAINED, AVERAGED) else 2,
        order[parameter],
        kind,
    )


def parameter_order(source: Source) -> dict[str, int]:
    """Parameter (`transformer.<name>`) → its place in the model."""
    names = [
        f"{component}.{name}"
        for component, rows in source.policy.items()
        for name in _ordered(source, component, rows)
    ]
    return {name: place for place, name in enumerate(names)}


def _ordered(source: Source, component: str, rows: RowSource) -> list[str]:
    if not source.base:
        return sorted(rows.tensors)
    shapes = source.base.components[component].model.shapes
    return list(lora_shapes(source.lora, shapes) if any(map(is_lora, rows.tensors)) else shapes)
