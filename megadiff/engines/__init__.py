"""Training engines. `build_engine` is the table from the config's name to the class; each imports its own library."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh


def _veomni(config: Config, mesh: Mesh, adapter: ModelAdapter) -> Engine:
    from megadiff.engines.veomni import VeOmniEngine

    algorithm = config.algorithm
    return VeOmniEngine(config, mesh, adapter, keep_reference=algorithm.kl_coef > 0, average_decay=algorithm.ema_decay)


def _megatron(config: Config, mesh: Mesh, adapter: ModelAdapter) -> Engine:
    from megadiff.engines.megatron import MegatronEngine

    algorithm = config.algorithm
    return MegatronEngine(
        config, mesh, adapter, keep_reference=algorithm.kl_coef > 0, average_decay=algorithm.ema_decay
    )


ENGINES: dict[str, Callable[[Config, Mesh, ModelAdapter], Engine]] = {"veomni": _veomni, "megatron": _megatron}


def check_engine_installed(config: Config) -> None:
    """Raises ValueError when the engine's packages are absent or of another version than was tested."""
    importlib.import_module(f"megadiff.engines.{config.engine.backend}").check_installed(config)


def build_engine(config: Config, mesh: Mesh, adapter: ModelAdapter) -> Engine:
    """The engine named by engine.backend, with the checkpoint's weights loaded. Collective over the world."""
    if config.engine.backend not in ENGINES:
        raise ValueError(f"engine.backend={config.engine.backend!r} is not one of {', '.join(sorted(ENGINES))}")
    return ENGINES[config.engine.backend](config, mesh, adapter)
