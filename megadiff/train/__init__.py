"""Call `megadiff.train(config)` to train in this process: see megadiff.api.train.

The files of this package are the loops, and what a step consists of.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from megadiff.config.schema import Config


class _CallableModule(ModuleType):
    """Let `from megadiff import train` be a function, although the package has that name."""

    def __call__(self, config: Config) -> Path:
        """Train as megadiff.api.train does."""
        # by its name, when it is called: the files here import nothing of the API
        return importlib.import_module("megadiff.api").train(config)


sys.modules[__name__].__class__ = _CallableModule
