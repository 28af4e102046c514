"""Training engines. `build_engine` is the table from the config's name to the class; each imports its own library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megadiff.config.schema import Config
from megadiff.engines.components import ComponentsEngine
from megadiff.engines.sharded import ShardedEngine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh


def _veomni(config: Config, mesh: Mesh, adapter: ModelAdapter, component: str) -> ShardedEngine:
    from megadiff.engines.veomni import VeOmniEngine

    return VeOmniEngine(config, mesh, adapter, component=component, **_kept(config, component))


def _megatron(config: Config, mesh: Mesh, adapter: ModelAdapter, component: str) -> ShardedEngine:
    from megadiff.engines.megatron import MegatronEngine

    return MegatronEngine(config, mesh, adapter, component=component, **_kept(config, component))


def _kept(config: Config, component: str) -> dict[str, Any]:
    """Which weights beside the policy's the algorithm needs, and whether the component's are trained at all. Under LoRA all
    have adapters, so that replicas bind one set of modules; those of a component that is left out stay zero."""
    algorithm, chosen = config.algorithm, config.train.components
    frozen = bool(chosen) and component not in chosen and not config.lora.rank
    return {
        "frozen": frozen,
        "keep_reference": algorithm.kl_coef > 0,
        "average_decay": algorithm.ema_decay,
    }


ENGINES: dict[str, Callable[[Config, Mesh, ModelAdapter, str], ShardedEngine]] = {
    "veomni": _veomni,
    "megatron": _megatron,
}


def check_engine_installed(config: Config) -> None:
    """Raises ValueError when the engine's packages are absent or of another version than was tested."""
    importlib.import_module(f"megadiff.engines.{config.engine.backend}").check_installed(config)


def build_engine(config: Config, mesh: Mesh, adapter: ModelAdapter) -> ComponentsEngine:
    """The model's engine on engine.backend, with the checkpoint's weights loaded. Collective over the world."""
    if config.engine.backend not in ENGINES:
        raise ValueError(
            f"engine.backend={config.engine.backend!r} is not one of {', '.join(sorted(ENGINES))}"
        )
    build = ENGINES[config.engine.backend]
    return ComponentsEngine(
        config, mesh, adapter, build=lambda component: build(config, mesh, adapter, component)
    )
