"""Hold LoRA's frozen base whole on every rank, for its replica as well, instead of sharded by FSDP.

Its parameters are plain tensors, in engine.dtype, and FSDP2 does not know them: nothing is gathered
in training. Only the low-rank tensors are sharded. Memory and its layout: sync/shared_base.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.plan import is_lora
from megadiff.sync.shared_base import SharedBase
from megadiff.types import Shapes


def shares_base(
    config: Config, adapter: ModelAdapter, *, device_type: str, world_size: int
) -> bool:
    """Tell whether trainer ranks and replicas hold a frozen base once."""
    obstacle = base_obstacle(config, adapter, device_type=device_type, world_size=world_size)
    return bool(config.lora.rank) and not obstacle


def base_obstacle(
    config: Config, adapter: ModelAdapter, *, device_type: str, world_size: int
) -> str:
    """Say why trainer and replicas cannot hold LoRA's base once, with the key; "" where they do."""
    return next(_obstacles(config, adapter, device_type, world_size), "")


def _obstacles(
    config: Config, adapter: ModelAdapter, device_type: str, world_size: int
) -> Iterator[str]:
    rollout = config.rollout

    if config.lora.shared_base == "never":
        yield "lora.shared_base=never"

    if config.engine.backend != "veomni":
        yield f"engine.backend={config.engine.backend} splits the base; it takes veomni"

    if rollout.mode != "colocated":
        yield f"rollout.mode={rollout.mode}: replicas are on other GPUs; it takes colocated"

    if not (build_algorithm(config.algorithm).on_policy or config.eval.every):
        yield "nothing samples, so there are no replicas"

    if rollout.sleep == "always" and world_size > config.parallel.dp_replicate:
        # an update would then hold the whole base where it held a shard, and replicas hold none
        yield "rollout.sleep=always on several GPUs: replicas give their copies back anyway"

    if rollout.tp > 1:
        yield f"rollout.tp={rollout.tp} splits a replica's weights; it takes 1"

    if config.engine.dtype != config.model.dtype:
        yield f"engine.dtype={config.engine.dtype} is not model.dtype={config.model.dtype}"

    if len(adapter.components) > 1:
        yield f"the model has {len(adapter.components)} components; it takes one"

    if adapter.served_names is None:
        yield f"the adapter of {adapter.title} does not say how replicas pack weights"

    if adapter.plan.constants:
        yield f"replicas read {', '.join(adapter.plan.constants)} from the transformer's files"
    transports = ("auto", "shm") if device_type == "cuda" else ("auto", "http", "shm")

    if config.sync.transport not in transports:
        yield f"sync.transport={config.sync.transport}; it takes {' or '.join(transports)}"

    if device_type == "cuda" and rollout.num_replicas not in (0, world_size):
        yield (
            f"rollout.num_replicas={rollout.num_replicas} on {world_size} GPUs; "
            "it takes one on each"
        )


class WithheldBase:
    """Keep a module's parameters but LoRA's out of it while FSDP2 shards what is left.

    A withheld parameter is None in its module and keeps its place in the order.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take them out. They are on the meta device, in the dtype that they will have."""
        names = [name for name, _ in module.named_parameters() if not is_lora(name)]
        self._parameters = {name: module.get_parameter(name) for name in names}
        _set_all(module, dict.fromkeys(names))

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def put_back(self, module: nn.Module, base: SharedBase) -> None:
        """Give the module frozen parameters that are the base's memory."""
        parameters = {
            name: nn.Parameter(base.tensors[name], requires_grad=False) for name in self._parameters
        }
        _set_all(module, parameters)


def _set_all(module: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        # not by setattr: FSDP2 changes what a module's attributes do
        module.get_submodule(owner)._parameters[leaf] = parameter


def build_base(
    withheld: WithheldBase, adapter: ModelAdapter, *, dtype: torch.dtype, device: torch.device
) -> SharedBase:
    """Take memory for a withheld base, laid out as the adapter's replicas have it."""
    assert adapter.served_names is not None, "base_obstacle() names it"
    return SharedBase(
        withheld.shapes, dtype=dtype, served_names=adapter.served_names, device=device
    )
