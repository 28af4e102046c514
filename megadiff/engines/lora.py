"""LoRA in both engines: from config to modules, their start, and checks of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from megadiff.config.schema import Config, LoraConfig
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.lora import Adapters, lora_spec, start_values
from megadiff.parallel.plan import ParallelPlan, is_lora
from megadiff.tensors.lora_files import ALONE, LoraFile, has_loras, lora_misfits, open_loras
from megadiff.tensors.lora_names import lora_from_json
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.source_folder import SourceFolder
from megadiff.tensors.stored_tensors import listed
from megadiff.types import LoraSpec


def build_adapters(config: Config, plan: ParallelPlan, names: Iterable[str]) -> Adapters | None:
    """Return None unless the config asks for LoRA. names: of the base's parameters."""
    spec = lora_spec(config.lora, plan, names)
    return Adapters(spec) if spec else None


def is_frozen(config: Config, component: str) -> bool:
    """Tell whether no update will come for the component."""
    # under LoRA all components have adapters, so that replicas bind one set of modules; those of
    # a component that is left out stay zero
    chosen = config.train.components
    return bool(chosen) and component not in chosen and not config.lora.rank


def lora_start(lora: LoraConfig, components: Sequence[str]) -> dict[str, LoraFile]:
    """Open component → the LoRA that training starts from; {} without lora.start.

    Raises ValueError for what is no LoRA, or none of exactly these components.
    """
    if not lora.start:
        return {}
    path = Path(lora.start)
    if not path.exists() or not has_loras(path):
        raise ValueError(
            f"lora.start={path} {'is no LoRA' if path.exists() else 'does not exist'}; give the "
            "folder of `megadiff convert --to peft`, or a LoRA of peft or diffusers"
        )

    loras = open_loras(path)
    if ALONE in loras and len(components) == 1:
        loras = {components[0]: loras[ALONE]}
    if loras.keys() != set(components):
        named = "one LoRA" if ALONE in loras else f"those of {', '.join(loras)}"
        raise ValueError(
            f"lora.start={path} holds {named}, and training begins with one for each component; "
            f"give a folder with the folders {', '.join(components)}"
        )
    return loras


def check_start(config: LoraConfig, adapter: ModelAdapter) -> None:
    """Raise ValueError where lora's keys do not fit the model, or the LoRA to start from."""
    if not config.rank:
        return
    start = lora_start(config, adapter.components)
    for component in adapter.components:
        parameters = adapter.empty_transformer(component).named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        spec = lora_spec(config, adapter.plan, shapes)
        assert spec is not None, "None is for rank 0"
        if not start:
            continue

        lora = start[component]
        where = f"lora.start={lora.path}"
        if difference := _difference(where, lora.spec, spec):
            raise ValueError(difference)
        if misfits := lora_misfits(lora, shapes):
            raise ValueError(f"{where} does not fit {component} of the model: {listed(misfits)}")


def open_source(config: Config, adapter: ModelAdapter, component: str) -> SourceFolder:
    """Open what a component starts from: the model's weights and, where there is one, a LoRA."""
    start = lora_start(config.lora, adapter.components)
    lora = start[component].tensors if start else {}
    return SourceFolder(adapter.model_folder / component, lora)


def read_start(source: SourceFolder, name: str, shards: Sequence[Shard], *, seed: int) -> None:
    """Fill this rank's shards of a weight with what training starts from.

    That is a fresh draw for a low-rank tensor where there is no LoRA to start from.
    """
    if not is_lora(name):
        for shard in shards:
            source.read_into(name, shard)
    elif shards:
        rows, columns = shards[0].shape
        # whole, then cut: the draw must not depend on how ranks split the tensor
        if source.lora:
            whole = source.lora[name].read()
        else:
            whole = start_values(name, (rows, columns), seed=seed)
        for shard in shards:
            sizes = shard.local.shape
            box = [slice(at, at + size) for at, size in zip(shard.offsets, sizes, strict=True)]
            shard.local.copy_(whole[tuple(box)])


def check_source(source: SourceFolder, module: nn.Module, plan: ParallelPlan) -> None:
    """Raise ValueError unless the source has the module's weights and constants, and no others."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if not is_lora(name)}
    shapes |= {name: tuple(module.get_buffer(name).shape) for name in plan.constants}
    source.check_names(shapes)


def lora_values(lora: LoraSpec) -> dict[str, object]:
    """Return what a checkpoint says of its LoRA, as JSON."""
    return {"rank": lora.rank, "alpha": lora.alpha, "modules": list(lora.modules)}


def check_lora(source: ShardFolder, lora: LoraSpec | None) -> None:
    """Raises ValueError when the checkpoint's LoRA, or its absence, is not the run's."""
    theirs = source.values.get("lora")
    ours = lora_values(lora) if lora else None
    if theirs == ours:
        return

    if lora is None or ours is None:
        assert theirs is not None, "the two differ"
        raise ValueError(
            f"{source.folder} holds a LoRA of rank {theirs['rank']} and alpha {theirs['alpha']} "
            f"only, but lora.rank=0; set lora.rank={theirs['rank']} lora.alpha={theirs['alpha']}, "
            "or start a new run"
        )

    if theirs is None:
        raise ValueError(
            f"{source.folder} holds whole trained weights and no LoRA, but lora.rank={lora.rank}; "
            "set lora.rank=0 to go on with it, or start a new run from its export (model.path)"
        )

    spec = lora_from_json(theirs)
    assert spec is not None, "only the run's own is None"
    raise ValueError(f"{_difference(str(source.folder), spec, lora)}, or start a new run")


def _difference(where: str, theirs: LoraSpec, ours: LoraSpec) -> str:
    """Say in what a stored LoRA is not the run's, and what to set; "" for an equal one."""
    for key in ("rank", "alpha"):
        if getattr(theirs, key) != getattr(ours, key):
            return (
                f"{where} holds a LoRA of {key} {getattr(theirs, key)}, but "
                f"lora.{key}={getattr(ours, key)}; "
                f"set lora.rank={theirs.rank} lora.alpha={theirs.alpha}"
            )

    missing = sorted(set(theirs.modules) - set(ours.modules))
    extra = sorted(set(ours.modules) - set(theirs.modules))
    if not missing and not extra:
        return ""
    return (
        f"{where} holds a LoRA of {len(theirs.modules)} modules, this run wraps "
        f"{len(ours.modules)}: only there {missing[:4]}, only here {extra[:4]}; set lora.targets "
        "and lora.exclude to the modules that it has"
    )
