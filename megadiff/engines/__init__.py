"""Training engines. Each is imported only where the config names it, with its own library."""

from __future__ import annotations

import importlib
from functools import partial

from megadiff.config.schema import Config
from megadiff.engines.engine import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh

# engine.backend → the class in the module of that name
ENGINES = {"veomni": "VeOmniEngine", "megatron": "MegatronEngine"}


def check_engine_installed(config: Config) -> None:
    """Raises ValueError when the engine's packages are absent or of an untested version."""
    importlib.import_module(f"megadiff.engines.{config.engine.backend}").check_installed(config)


def build_engine(config: Config, mesh: Mesh, adapter: ModelAdapter) -> Engine:
    """Build the model's engine on engine.backend with the checkpoint's weights. Collective."""
    check_engine_installed(config)
    backend = config.engine.backend
    engine_class = getattr(importlib.import_module(f"megadiff.engines.{backend}"), ENGINES[backend])
    return Engine(config, mesh, adapter, build=partial(engine_class, config, mesh, adapter))
