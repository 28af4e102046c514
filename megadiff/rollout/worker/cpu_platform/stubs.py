"""Provide import-only stand-ins for torchvision and torchaudio.

vllm-omni imports both at module level, but their wheels on PyPI are CUDA builds that fail to import
beside a CPU torch. Neither is used for text-to-image or text-to-video. So whichever is *not
installed* becomes a stub that raises when called.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

STUBBED = ("torchvision", "torchaudio")


def install_stubs() -> None:
    """Make `import torchvision` and `import torchaudio` work where they are not installed.

    A second call does nothing.
    """
    missing = {
        name
        for name in STUBBED
        if name not in sys.modules and importlib.util.find_spec(name) is None
    }
    if not missing:
        return

    # transformers caches its answers to "is it installed": it must look before the stubs say yes
    from transformers.utils import is_torchaudio_available, is_torchvision_available

    is_torchaudio_available()
    is_torchvision_available()
    sys.meta_path.append(_StubFinder(missing))


class _Missing:
    """Stand for any attribute of a stub; raises ImportError when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> _Missing:
        if attribute.startswith("__"):  # Python asks for many of these to see what a value can do
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise ImportError(f"{self.__name__} is not installed; CPU replicas run without it")


class _StubModule(ModuleType):
    __version__ = "0.0.0"
    __path__: list[str] = []

    __getattr__ = _Missing.__getattr__


class _StubFinder(Loader):
    """Find and load stubs, at the end of sys.meta_path: only what nothing else provides."""

    def __init__(self, roots: set[str]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return ModuleSpec(name, loader=self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
