"""Check what a Wan folder says of its transformers, before anything is built of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadiff.models.packing import PATCH

HIGH_NOISE = "transformer"
LOW_NOISE = "transformer_2"


def boundary_ratio_of(folder: Path, index: Mapping[str, Any]) -> float | None:
    """Return where two transformers change, None for one. Raises ValueError for anything else."""
    # model_index.json has [null, null] for a component that a pipeline lacks
    entry = index.get(LOW_NOISE)
    has_two = isinstance(entry, list) and entry[1:2] not in ([], [None])
    ratio = index.get("boundary_ratio")
    if has_two and not (isinstance(ratio, int | float) and 0 < ratio < 1):
        raise ValueError(
            f"{folder}/model_index.json has {LOW_NOISE}, but boundary_ratio={ratio} is not between "
            "0 and 1, where the experts change; set it as in the model's own repository (0.875 for "
            "T2V-A14B)"
        )
    if not has_two and ratio is not None:
        raise ValueError(
            f"{folder}/model_index.json has boundary_ratio={ratio}, but no {LOW_NOISE}; "
            "fetch both experts"
        )
    return None if ratio is None else float(ratio)


def check_experts(
    folder: Path, configs: Mapping[str, Mapping[str, Any]], *, given_channels: int
) -> None:
    """Raise ValueError for a Wan of another kind.

    configs: component → its config.json. given_channels: of the input beside the latents'.
    """
    for name, config in configs.items():
        if (
            config.get("image_dim")
            or config.get("added_kv_proj_dim")
            or config["in_channels"] != config["out_channels"] + given_channels
        ):
            raise ValueError(
                f"{folder / name} takes an image through layers or channels of its own "
                f"(in_channels={config['in_channels']}, out_channels={config['out_channels']}); "
                "use Wan2.1 T2V or Wan2.2"
            )
        if config.get("patch_size", [1, PATCH, PATCH]) != [1, PATCH, PATCH]:
            raise ValueError(
                f"{folder / name} has patch_size={config['patch_size']}; Wan has "
                f"[1, {PATCH}, {PATCH}]"
            )
