"""Read a Wan2.2 folder's sizes, experts and schedule, for trainer and replica alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.diffusion.schedule import static_shift, wan_sigmas
from megadiff.models.adapter import check_pixels
from megadiff.models.packing import PATCH, TokenGrid
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling

HIGH_NOISE = "transformer"
LOW_NOISE = "transformer_2"
NUM_TIMESTEPS = 1000


class WanCheckpoint:
    """Describe one transformer (TI2V-5B), or two experts that divide the schedule (A14B).

    boundary_ratio: the high-noise expert is in charge from this sigma on; None with one
    transformer. flow_shift: of the schedule.
    expands_timesteps: they are of single tokens, 0 for those of a given first frame.
    given_channels: of the transformer's input beside the latents', for a given first frame.
    channels: of a latent. spatial, temporal: how many pixels, and frames after the first, the VAE
    turns into one. width: channels of a token inside the transformer. ffn_width: of its
    feed-forward layer.
    """

    given_channels = 0

    def __init__(self, model_folder: Path | str) -> None:
        """Read the folder's JSON files.

        Raises ValueError for a missing file or key, and for a Wan that this family does not cover.
        """
        folder = Path(model_folder)
        index = read_json(folder / "model_index.json")
        vae = read_json(folder / "vae" / "config.json")

        self.model_folder = folder
        self.boundary_ratio = _boundary_ratio(folder, index)
        self.components: tuple[str, ...] = (HIGH_NOISE, LOW_NOISE)
        if self.boundary_ratio is None:
            self.components = (HIGH_NOISE,)

        configs = [
            _transformer_config(folder / name, self.given_channels) for name in self.components
        ]
        config = configs[0]
        differing = [key for key in _SIZES if configs[-1][key] != config[key]]
        if differing:
            raise ValueError(
                f"{folder}: its experts differ in {', '.join(differing)}; they must be of one shape"
            )

        self.flow_shift = _flow_shift(folder)
        self.expands_timesteps = bool(index.get("expand_timesteps"))
        # as the authors play TI2V-5B's and T2V-A14B's videos; no file says it
        self.frames_per_s = 24 if self.expands_timesteps else 16

        self.channels: int = config["out_channels"]
        # diffusers' defaults, for a config that names neither
        self.spatial: int = vae.get("scale_factor_spatial") or 8
        self.temporal: int = vae.get("scale_factor_temporal") or 4
        self.num_layers: int = config["num_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.width: int = self.num_heads * config["attention_head_dim"]
        self.ffn_width: int = config["ffn_dim"]

    def component_of(self, sigma: float) -> str:
        """Return the expert in charge: high noise from 1000·boundary_ratio on."""
        if self.boundary_ratio is None:
            return HIGH_NOISE
        # to a thousandth, as a float32 sigma of 0.9 lies a little below 0.9
        timestep = round(NUM_TIMESTEPS * sigma, 3)
        boundary = round(NUM_TIMESTEPS * self.boundary_ratio, 3)
        return HIGH_NOISE if timestep >= boundary else LOW_NOISE

    def guidance_scale(self, component: str, sampling: Sampling) -> float:
        """Return the scale of the component's velocity; 1 is off."""
        if component == LOW_NOISE:
            return sampling.guidance_scale_2 or sampling.guidance_scale
        return sampling.guidance_scale

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if self.guidance_scale(component, sampling) > 1 else 1

    def validate(self, sampling: Sampling) -> None:
        """Raise ValueError for a size, length, guidance or given images that are not possible."""
        check_pixels(sampling, self.spatial * PATCH)
        frames = sampling.num_frames
        temporal = self.temporal
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(round((frames - 1) / temporal), 0) * temporal + 1
            raise ValueError(
                f"rollout.num_frames={frames} is not 1 + a multiple of {temporal} (frames a latent "
                f"after the first); set rollout.num_frames={nearest}"
            )

        self._check_images(sampling)
        self._check_guidance(sampling)

    def _check_images(self, sampling: Sampling) -> None:
        if not sampling.images:
            return
        if not self.expands_timesteps and not self.given_channels:
            raise ValueError(
                "rollout.images=true, but this model draws from text alone (no "
                "expand_timesteps in its model_index.json); use Wan2.2 TI2V-5B or I2V-A14B, or set "
                "rollout.images=false"
            )
        if len(sampling.images) != 1:
            raise ValueError(
                f"{len(sampling.images)} images are given, a video begins with 1; give one"
            )
        if sampling.images[0] != (sampling.height, sampling.width):
            rows, columns = sampling.images[0]
            raise ValueError(
                f"a given image has {columns}x{rows} pixels, a first frame must have the video's "
                f"{sampling.width}x{sampling.height}; scale or crop the file, or set rollout.width "
                "and rollout.height"
            )
        if sampling.num_frames == 1:
            raise ValueError(
                "rollout.images=true with rollout.num_frames=1: the only frame is given and "
                f"nothing is drawn; set rollout.num_frames={1 + self.temporal} or more"
            )

    def _check_guidance(self, sampling: Sampling) -> None:
        if sampling.true_cfg_scale != 1:
            raise ValueError(
                f"rollout.true_cfg_scale={sampling.true_cfg_scale}, but Wan's guidance is plain; "
                "set rollout.guidance_scale instead and leave true_cfg_scale at 1"
            )
        if sampling.guidance_scale < 1:
            raise ValueError(
                f"rollout.guidance_scale={sampling.guidance_scale} < 1 (off); set it to 1 or more"
            )

        scale = sampling.guidance_scale_2
        if scale and len(self.components) == 1:
            raise ValueError(
                f"rollout.guidance_scale_2={scale}, but this model has no second expert; "
                "set it to 0 and use guidance_scale"
            )
        if scale and scale < 1:
            raise ValueError(
                f"rollout.guidance_scale_2={scale} is below 1 (off); set it to 1 or more, or to 0 "
                "for guidance_scale's value"
            )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        """Return (tokens, channels) of what is drawn: all frames, or all but a given first."""
        grid = self.grid(sampling)
        num_given = grid.tokens_per_frame if self.has_clean_tokens(sampling) else 0
        return grid.num_tokens - num_given, self.channels * PATCH**2

    def has_clean_tokens(self, sampling: Sampling) -> bool:
        """Tell whether the first frame's tokens are given, and not drawn."""
        return bool(sampling.images) and self.expands_timesteps

    def grid(self, sampling: Sampling) -> TokenGrid:
        """Return the grid of the transformer's input: all frames."""
        pixels = self.spatial * PATCH
        return TokenGrid(
            frames=(sampling.num_frames - 1) // self.temporal + 1,
            rows=sampling.height // pixels,
            columns=sampling.width // pixels,
        )

    def schedule(self, sampling: Sampling) -> Tensor:
        return wan_sigmas(sampling.num_inference_steps, flow_shift=self.flow_shift)

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return static_shift(sigmas, shift=self.flow_shift)

    def timestep(self, sigma_B: Tensor) -> Tensor:
        """Return [B] float32, as the transformer takes it."""
        # never in the model's dtype: bfloat16 rounds 978 to 980
        return NUM_TIMESTEPS * sigma_B.to(torch.float32)


_SIZES = (
    "in_channels",
    "out_channels",
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "ffn_dim",
    "text_dim",
)


def _boundary_ratio(folder: Path, index: dict) -> float | None:
    """Return where two transformers change, None for one. Raises ValueError for anything else."""
    # model_index.json has [null, null] for a component that a pipeline lacks
    has_two = (index.get(LOW_NOISE) or [None, None])[1] is not None
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


def _transformer_config(component: Path, given_channels: int) -> dict[str, Any]:
    """Read an expert's config.json. Raise ValueError for a Wan of another kind."""
    config = read_json(component / "config.json")
    missing = [key for key in _SIZES if config.get(key) is None]
    if missing:
        raise ValueError(f"{component}/config.json lacks {', '.join(missing)}; fetch it again")

    if (
        config.get("image_dim")
        or config.get("added_kv_proj_dim")
        or config["in_channels"] != config["out_channels"] + given_channels
    ):
        raise ValueError(
            f"{component} takes an image through layers or channels of its own "
            f"(in_channels={config['in_channels']}, out_channels={config['out_channels']}); "
            "use Wan2.1 T2V or Wan2.2"
        )
    if tuple(config.get("patch_size", (1, PATCH, PATCH))) != (1, PATCH, PATCH):
        raise ValueError(
            f"{component} has patch_size={config['patch_size']}; Wan2.2 has [1, {PATCH}, {PATCH}]"
        )
    return config


def _flow_shift(folder: Path) -> float:
    """Return the schedule's shift from its file, never a default of the code."""
    config = read_json(folder / "scheduler" / "scheduler_config.json")
    # UniPC calls it flow_shift, the flow-matching schedulers shift
    name = "flow_shift" if "UniPC" in str(config.get("_class_name")) else "shift"
    value = config.get(name)
    if not (isinstance(value, int | float) and value > 0):
        raise ValueError(
            f"{folder}/scheduler/scheduler_config.json has {name}={value}; the schedule's shift "
            "comes from there (5 for TI2V-5B, 12 for T2V-A14B), never from a default"
        )
    return float(value)
