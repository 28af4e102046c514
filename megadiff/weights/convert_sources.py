"""What a conversion reads, recognised by its content: a diffusers model, a checkpoint, a LoRA of another library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from megadiff.parallel.lora import lora_shapes
from megadiff.parallel.plan import is_lora
from megadiff.types import LoraSpec, Progress
from megadiff.weights.lora_files import LoraFile, is_lora_file, is_lora_folder, lora_misfits, open_lora
from megadiff.weights.lora_names import lora_from_json
from megadiff.weights.model_folders import COMPONENT, ModelFolder, listed, misfits, open_model, open_single_file
from megadiff.weights.row_sources import Finish, RowSource, ShardRows
from megadiff.weights.run_folders import chosen_checkpoint, is_checkpoint, model_path, read_config, read_progress
from megadiff.weights.shards import AVERAGED, TRAINED, ShardFolder, shard_file


@dataclass(frozen=True, kw_only=True)
class Source:
    """path: what is read. base: the model that it is, or that it was trained from; None of a LoRA alone.

    lora: of weights that are low-rank pairs over the base; None of whole weights. policy: the component's tensors (the
    running average where there is one), by their own names. state: all that a checkpoint would hold, under its names
    (`model/transformer.<name>`). values, progress, config: of the checkpoint, or of a run that is yet to start.
    """

    path: Path
    base: ModelFolder | None
    lora: LoraSpec | None
    policy: RowSource
    state: RowSource
    values: Mapping[str, object]
    progress: Progress = field(default_factory=Progress)
    config: Mapping[str, object] = field(default_factory=dict)
    is_checkpoint: bool = False

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
        return _open_checkpoint(chosen_checkpoint(path, step=step) if is_run else path, base=base, raw=raw)
    if raw:
        raise ValueError(f"--raw is for checkpoints with a running average, which {path} is not")
    if is_lora_folder(path) or (path.is_file() and is_lora_file(path)):
        return _open_lora(open_lora(path), base=open_model(base) if base else None)
    if path.is_file():
        return _open_model(open_single_file(path, base=base))
    if (path / "model_index.json").is_file() or (path / "config.json").is_file():
        if base:
            raise ValueError(f"--base {base} is for weights without a model around them; {path} is a whole model")
        return _open_model(open_model(path))
    raise ValueError(
        f"{path} is nothing that can be converted. Looked for: a run (checkpoints/step_…), a checkpoint (progress.json), a "
        "pipeline (model_index.json), a component (config.json), a LoRA (adapter_config.json or "
        "pytorch_lora_weights.safetensors), one .safetensors file"
    )


class Prefixed:
    """Another source's tensors under names with a prefix."""

    def __init__(self, rows: RowSource, prefix: str) -> None:
        self._rows, self._prefix = rows, prefix
        self.tensors = {f"{prefix}{name}": meta for name, meta in rows.tensors.items()}

    def fetch(self, name: str, begin: int, rows: torch.Tensor) -> Finish:
        return self._rows.fetch(name.removeprefix(self._prefix), begin, rows)

    def file_of(self, name: str) -> str:
        return self._rows.file_of(name.removeprefix(self._prefix))


def _open_model(model: ModelFolder) -> Source:
    rows = model.rows()
    state = Prefixed(rows, f"{TRAINED}/{COMPONENT}.")
    return Source(path=model.path, base=model, lora=None, policy=rows, state=state, values={"optimizer_steps": 0})


def _open_lora(lora: LoraFile, *, base: ModelFolder | None) -> Source:
    problems = lora_misfits(lora.rows, lora.spec, base.model.shapes) if base else []
    if problems:
        raise ValueError(f"{lora.path} does not fit {base.path}: {listed(problems)}")
    state = Prefixed(lora.rows, f"{TRAINED}/{COMPONENT}.")
    values = {"optimizer_steps": 0, "lora": asdict(lora.spec)}
    return Source(path=lora.path, base=base, lora=lora.spec, policy=lora.rows, state=state, values=values)


def _open_checkpoint(folder: Path, *, base: Path | None, raw: bool) -> Source:
    progress, shards = read_progress(folder), ShardFolder(folder)
    model = open_model(base or model_path(folder))
    spec = lora_from_json(shards.values.get("lora"))
    shapes = lora_shapes(spec, model.model.shapes) if spec else model.model.shapes
    state = ShardRows(shards, {name: name for name in shards.shapes})
    _check_state(state, shapes, folder=folder, base=model)
    kind = TRAINED if raw or not any(name.startswith(f"{AVERAGED}/") for name in shards.shapes) else AVERAGED
    return Source(
        path=folder,
        base=model,
        lora=spec,
        policy=ShardRows(shards, {name: f"{kind}/{COMPONENT}.{name}" for name in shapes}),
        state=state,
        values=shards.values,
        progress=progress,
        config=read_config(folder) if (folder / "config.yaml").is_file() else {},
        is_checkpoint=True,
    )


def _check_state(state: ShardRows, shapes: Mapping[str, tuple[int, ...]], *, folder: Path, base: ModelFolder) -> None:
    """Weights (and averages) of all the parameters, moments of some, float32, nothing else; all pieces there."""
    of_kind: dict[str, dict] = {TRAINED: {}}
    for name, meta in state.tensors.items():
        kind, _, parameter = name.rpartition("/")
        of_kind.setdefault(kind, {})[parameter.removeprefix(f"{COMPONENT}.")] = meta
    problems = []
    for kind, tensors in of_kind.items():
        wanted = shapes if kind in (TRAINED, AVERAGED) else {name: shapes[name] for name in shapes if name in tensors}
        found = misfits(
            tensors, wanted, file_of=lambda name, kind=kind: _file(state, kind, name), dtypes=(torch.float32,)
        )
        problems += [f"{kind}: {problem}" for problem in found]
    if problems:
        raise ValueError(
            f"{folder} does not fit {base.component}/config.json, the model it was trained from (name that with --base): "
            f"{listed(problems)}"
        )


def _file(state: ShardRows, kind: str, name: str) -> str:
    return state.file_of(f"{kind}/{COMPONENT}.{name}")


def state_order(name: str, order: Mapping[str, int]) -> tuple[int, int, str]:
    """Sorts a checkpoint's names as the engines write them: weights, averages, then moments, each in the model's order."""
    kind, _, parameter = name.rpartition("/")
    place = order[parameter.removeprefix(f"{COMPONENT}.")]
    return (TRAINED, AVERAGED).index(kind) if kind in (TRAINED, AVERAGED) else 2, place, kind


def parameter_order(source: Source) -> dict[str, int]:
    """Parameter → its place in the model."""
    if not source.base:
        return {name: place for place, name in enumerate(sorted(source.policy.tensors))}
    shapes = source.base.model.shapes
    names = [name for name in source.policy.tensors if is_lora(name)]
    whole = list(shapes) if not names else list(lora_shapes(source.lora, shapes))
    return {name: place for place, name in enumerate(whole)}
