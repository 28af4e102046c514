"""Name the tested versions of the libraries, and compare them with the installed ones.

`megadiff doctor` reads them here without an import of torch, which takes seconds.
"""

from __future__ import annotations

import importlib.metadata

VEOMNI = ("0.1.12",)
MEGATRON_CORE = ("0.16.1",)
TORCHAO = ("0.18.0",)
VLLM_OMNI = ("0.26", "0.28")  # minor versions: 0.26 on CPU and GPU, 0.28 on CPU
PYTHON = ("3.11", "3.12")
NOT_INSTALLED = "(not installed)"


def installed_version(package: str) -> str:
    """Return a distribution's version, NOT_INSTALLED where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def check_version(package: str, *, tested: tuple[str, ...]) -> None:
    """Raises ValueError when another version than the tested ones is installed, or none."""
    version = installed_version(package)
    if version not in tested:
        raise ValueError(
            f"{package} {version} is none of {', '.join(tested)}, on which this engine was tested"
        )
