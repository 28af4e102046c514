"""Name the tested versions of the libraries, the installed ones, and that of our own sources.

`megadiff doctor` reads them here without an import of torch, which takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

VEOMNI = ("0.1.12",)
MEGATRON_CORE = ("0.16.1",)
TORCHAO = ("0.18.0",)
VLLM_OMNI = ("0.26", "0.28")  # minor versions: 0.26 on CPU and GPU, 0.28 on CPU
PYTHON = ("3.11", "3.12")
NOT_INSTALLED = "(not installed)"
# What makes samples and takes weights, in megadiff/. The rest, such as an algorithm or a report,
# may be edited while a run goes on.
SAMPLING_SOURCES = ("diffusion", "models", "rollout", "sync", "tensors", "types.py")
PACKAGE = Path(__file__).parents[1]


def installed_version(package: str) -> str:
    """Return a distribution's version, NOT_INSTALLED where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


@cache
def sampling_code() -> dict[str, str]:
    """Name the code that this process samples with: our sources' digest, and two versions.

    The first call decides. Make it when the process starts: files may change while it lives, and
    what it has imported does not.
    """
    libraries = {name: installed_version(name) for name in ("torch", "vllm-omni")}
    return {"megadiff": sources_digest(PACKAGE), **libraries}


def sources_digest(package: Path) -> str:
    """Return 12 hex digits of a package's SAMPLING_SOURCES; takes some milliseconds."""
    digest = hashlib.sha256()
    for name in SAMPLING_SOURCES:
        source = package / name
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        for file in files:
            digest.update(f"{file.relative_to(package)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def check_version(package: str, *, tested: tuple[str, ...]) -> None:
    """Raises ValueError when another version than the tested ones is installed, or none."""
    version = installed_version(package)
    if version not in tested:
        raise ValueError(
            f"{package} {version} is none of {', '.join(tested)}, on which this engine was tested"
        )
