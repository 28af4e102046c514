"""Training engines. Each is imported only where the config names it, with its own library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megadiff.config.schema import Config
from megadiff.engines.components import ComponentsEngine
from megadiff.engines.sharded import ShardedEngine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh


def _veomni(config: Config, mesh: Mesh, adapter: ModelAdapter, **options: Any) -> ShardedEngine:
    from megadiff.engines.veomni import VeOmniEngine

    return VeOmniEngine(config, mesh, adapter, **options)


def _megatron(config: Config, mesh: Mesh, adapter: ModelAdapter, **options: Any) -> ShardedEngine:
    from megadiff.engines.megatron import MegatronEngine

    return MegatronEngine(config, mesh, adapter, **options)


ENGINES: dict[str, Callable[..., ShardedEngine]] = {"veomni": _veomni, "megatron": _megatron}


def check_engine_installed(config: Config) -> None:
    """Raises ValueError when the engine's packages are absent or of an untested version."""
    importlib.import_module(f"megadiff.engines.{config.engine.backend}").check_installed(config)


def build_engine(config: Config, mesh: Mesh, adapter: ModelAdapter) -> ComponentsEngine:
    """Build the model's engine on engine.backend with the checkpoint's weights. Collective."""
    if config.engine.backend not in ENGINES:
        raise ValueError(
            f"engine.backend={config.engine.backend!r} is not one of {', '.join(sorted(ENGINES))}"
        )

    def build(component: str) -> ShardedEngine:
        is_trained = component in config.train.components or not config.train.components
        return ENGINES[config.engine.backend](
            config,
            mesh,
            adapter,
            component=component,
            # under LoRA all components have adapters, so that replicas bind one set of modules;
            # those of a component that is left out stay zero
            frozen=not is_trained and not config.lora.rank,
            keep_reference=config.algorithm.kl_coef > 0,
            average_decay=config.algorithm.ema_decay,
        )

    return ComponentsEngine(config, mesh, adapter, build=build)
