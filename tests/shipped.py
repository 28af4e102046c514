"""Which files make one of the shipped configs."""

from __future__ import annotations

from pathlib import Path

# folder of configs/ → what its files in algorithms/ are laid over
UNDER_ALGORITHMS = {"shapes": "flowgrpo", "recipes": "qwen_image_flowgrpo_lora_4xh200"}


def shipped_files(path: Path) -> list[str]:
    """Return the config's file, behind the one that it is laid over."""
    if path.parent.name != "algorithms":
        return [str(path)]
    folder = path.parents[1]
    return [str(folder / f"{UNDER_ALGORITHMS[folder.name]}.yaml"), str(path)]
