"""LoRA in both engines: from config to modules, their start, and checks of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megadiff.config.schema import Config
from megadiff.parallel.lora import Adapters, lora_spec, start_values
from megadiff.parallel.plan import ParallelPlan, is_lora
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.source_folder import SourceFolder
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


def fill_start(name: str, shards: Sequence[Shard], *, seed: int) -> None:
    """Write a low-rank tensor's start into this rank's shards of it."""
    if not shards:
        return
    rows, columns = shards[0].shape
    # whole, then cut: the draw must not depend on how ranks split the tensor
    whole = start_values(name, (rows, columns), seed=seed)
    for shard in shards:
        sizes = shard.local.shape
        box = [slice(at, at + size) for at, size in zip(shard.offsets, sizes, strict=True)]
        shard.local.copy_(whole[tuple(box)])


def read_start(source: SourceFolder, name: str, shards: Sequence[Shard], *, seed: int) -> None:
    """Fill this rank's shards of a weight with what training starts from."""
    if is_lora(name):
        fill_start(name, shards, seed=seed)
    else:
        for shard in shards:
            source.read_into(name, shard)


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

    for key in ("rank", "alpha"):
        if theirs[key] != ours[key]:
            raise ValueError(
                f"{source.folder} holds a LoRA of {key} {theirs[key]}, but lora.{key}={ours[key]}; "
                f"set lora.rank={theirs['rank']} lora.alpha={theirs['alpha']}, or start a new run"
            )

    # only the modules differ: another model, or a plan that has changed
    missing = sorted(set(theirs["modules"]) - set(lora.modules))
    extra = sorted(set(lora.modules) - set(theirs["modules"]))
    raise ValueError(
        f"{source.folder} holds a LoRA of {len(theirs['modules'])} modules, this model's plan "
        f"wraps {len(lora.modules)}: only there {missing[:4]}, only here {extra[:4]}; load it with "
        "the model and version that wrote it, or start a new run"
    )
