"""Derive the adapter of a model under classifier-free guidance from a few facts about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.diffusion.guidance import plain_cfg
from megadiff.diffusion.schedule import static_shift, static_sigmas
from megadiff.models.adapter import Images, ModelAdapter, PromptEncoder, freed
from megadiff.models.conditioning import NEGATIVE, Conditioning, text_of_side
from megadiff.models.packing import PATCH, TokenGrid
from megadiff.models.pipeline_folder import check_sizes
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling, Tensors

# rollout keys of guidance → the value that turns each off
GUIDANCE_KEYS = {"true_cfg_scale": 1.0, "guidance_scale": 1.0, "guidance_scale_2": 0.0}
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")  # of pipelines


class GuidedFamily(ModelAdapter):
    """Adapt a model of one schedule shift, whose tokens are 1×2×2 latents.

    A family gives `title`, `pipeline_class`, `transformer_class`, `rollout_pipeline`, `plan`,
    `encode()` and `packed_pass()`. Beyond that it overrides what differs.

    guidance_keys: the rollout keys that guide the model.
    most_images: that a prompt may give. needs_images: whether it must give one.
    other_sizes: keys that transformer/config.json must have beside size_keys.
    channels: of a latent. spatial: pixels a latent, along each side. temporal: frames that the VAE
    turns into one, after the first.
    """

    components: tuple[str, ...] = ("transformer",)
    frames_per_s = 1
    veomni_splits_tokens = False
    guidance_keys: tuple[str, ...] = ("guidance_scale",)
    most_images = 0
    other_sizes: tuple[str, ...] = ("in_channels",)
    spatial = 8
    temporal = 1

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from model_folder, a diffusers pipeline folder.

        Raises ValueError when transformer/config.json is missing or lacks a size.
        """
        self.model_folder = Path(model_folder)
        self.config = self.read_config(self.components[0])
        layers, heads, head_width = self.size_keys
        self.channels: int = self.config["in_channels"]
        self.num_layers: int = self.config[layers]
        self.num_heads: int = self.config[heads]
        # some configs name the width of all heads together
        width = self.config[head_width]
        self.width: int = width if head_width == "dim" else self.num_heads * width

    def read_config(self, component: str) -> dict[str, Any]:
        """Read a transformer's config.json. Raises ValueError where it lacks a size."""
        path = self.model_folder / component / "config.json"
        config = read_json(path)
        check_sizes(path, config, (*self.size_keys, *self.other_sizes))
        return config

    @property
    def pixels_per_token(self) -> int:
        """The pixels of a token, along each side."""
        return self.spatial * PATCH

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        """Return the velocity [B, L, C] of one side of guidance, in the transformer's dtype.

        latents_BLC: in the transformer's dtype. sigma_B: float32.
        text: what encode() gives, a row for each sample, and image_latents where images are given.
        Tensors of numbers are on the latents' device, masks where they were: one on the CPU saves
        a device synchronisation.
        """
        raise NotImplementedError

    def guide(
        self, positive_BLC: Tensor, negative_BLC: Tensor, scale: float, sigma_B: Tensor
    ) -> Tensor:
        """Combine both sides' velocities, in their dtype."""
        return plain_cfg(positive_BLC, negative_BLC, scale)

    def velocity(
        self,
        transformer: Callable[..., Any],
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = "transformer",
    ) -> Tensor:
        latents_dtype_BLC = latents_BLC.to(transformer.dtype)  # type: ignore[attr-defined]  # modules
        sigma_B = sigma_B.float().to(latents_BLC.device)

        def one_side(prefix: str) -> Tensor:
            text = text_of_side(conditioning, prefix, latents_BLC.device)
            return self.packed_pass(transformer, latents_dtype_BLC, sigma_B, text, sampling)

        positive_BLC = one_side("")
        scale = self.guidance_scale(component, sampling)
        if scale <= 1:
            return positive_BLC.float()

        # Both passes carry gradient. Always two: one of 2B where widths agree would let ranks
        # differ in their number of passes, and collectives hang.
        return self.guide(positive_BLC, one_side(NEGATIVE), scale, sigma_B).float()

    def guidance_scale(self, component: str, sampling: Sampling) -> float:
        """Return the scale of the component's guidance; 1 is off."""
        return getattr(sampling, self.guidance_keys[0])

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if self.guidance_scale(component, sampling) > 1 else 1

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.check_float32_streams()

    def check_float32_streams(self) -> None:
        raise ValueError(
            f"model.float32_streams=true, but {self.title}'s streams are in its weights' dtype; "
            "set it to false"
        )

    def validate(self, sampling: Sampling) -> None:
        for name, pixels in (("height", sampling.height), ("width", sampling.width)):
            multiple = self.pixels_per_token
            if pixels < multiple or pixels % multiple:
                nearest = max(round(pixels / multiple), 1) * multiple
                raise ValueError(
                    f"rollout.{name}={pixels} is not a positive multiple of {multiple} (pixels a "
                    f"token); set rollout.{name}={nearest}"
                )
        self._check_number_of_images(sampling)
        self._check_guidance(sampling)

    def _check_number_of_images(self, sampling: Sampling) -> None:
        if self.needs_images and not sampling.images:
            raise ValueError(
                f"rollout.images=false, but {self.title} starts from given images; set it to true, "
                "and give each row of data.prompts its `image`"
            )
        if sampling.images and not self.most_images:
            raise ValueError(
                f"rollout.images=true, but this model ({self.title}) draws from text alone; "
                "set it to false"
            )
        if len(sampling.images) > self.most_images:
            raise ValueError(
                f"{len(sampling.images)} images are given, {self.title} takes {self.most_images}; "
                "give fewer"
            )

    def _check_guidance(self, sampling: Sampling) -> None:
        for key, off in GUIDANCE_KEYS.items():
            value = getattr(sampling, key)
            if value == off:
                continue
            if key not in self.guidance_keys:
                keys = " and ".join(f"rollout.{name}" for name in self.guidance_keys)
                raise ValueError(
                    f"rollout.{key}={value}, but this model ({self.title}) is guided by "
                    f"{keys} alone; set rollout.{key}={off:g}"
                )
            if value < 1:
                raise ValueError(f"rollout.{key}={value} < 1 (off); set it to 1 or more")

    def grid(self, sampling: Sampling) -> TokenGrid:
        return TokenGrid(
            frames=(sampling.num_frames - 1) // self.temporal + 1,
            rows=sampling.height // self.pixels_per_token,
            columns=sampling.width // self.pixels_per_token,
        )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return self.grid(sampling).num_tokens, self.channels * PATCH**2

    def scheduler_config(self) -> dict[str, object]:
        """Read scheduler/scheduler_config.json: the defaults of code are another schedule."""
        return read_json(self.model_folder / "scheduler" / "scheduler_config.json")

    def static_shift(self) -> float:
        """Return the schedule's shift. Raises ValueError where it is none, or depends on size."""
        config = self.scheduler_config()
        # UniPC calls it flow_shift, the flow-matching schedulers shift
        key = "flow_shift" if "UniPC" in str(config.get("_class_name")) else "shift"
        shift = config.get(key)
        # type(): isinstance takes JSON's true for 1
        if config.get("use_dynamic_shifting") or type(shift) not in (int, float) or not shift > 0:  # type: ignore[operator]  # a number by then
            raise ValueError(
                f"{self.model_folder}/scheduler/scheduler_config.json has {key}={shift!r} and "
                f"use_dynamic_shifting={config.get('use_dynamic_shifting')}; {self.title} has one "
                "shift for all sizes, which comes from there: fetch the file again"
            )
        return float(shift)  # type: ignore[arg-type]  # a number, as checked

    def last_sigma(self, num_steps: int) -> float:
        """Return where unshifted sigmas end before 0; by default at 1 / num_steps."""
        return 1 / max(num_steps, 1)

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas. Raises ValueError without scheduler_config.json."""
        num_steps = sampling.num_inference_steps
        return static_sigmas(num_steps, shift=self.static_shift(), last=self.last_sigma(num_steps))

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return static_shift(sigmas, shift=self.static_shift())

    def text_pipeline(self, dtype: torch.dtype) -> Any:
        """Load the tokenizers and text encoders, as a pipeline has them."""
        import diffusers

        # A family from outside may have a class that diffusers lacks, and its parent's encoders.
        names = [getattr(cls, "pipeline_class", "") for cls in type(self).__mro__]
        stock = next(getattr(diffusers, name) for name in names if hasattr(diffusers, name))
        unread = dict.fromkeys((*self.components, "vae", "scheduler"))
        return stock.from_pretrained(self.model_folder, torch_dtype=dtype, **unread)

    @contextmanager
    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[PromptEncoder]:
        """Encode by the checkpoint's own networks, with encode()."""
        pipeline = self.text_pipeline(dtype)

        @torch.no_grad()
        def encode(texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
            conditioning = self.encode(pipeline, texts, images)
            return {
                name: tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()
                for name, tensor in conditioning.items()
            }

        with ExitStack() as stack:
            for name in TEXT_ENCODERS:
                if (network := getattr(pipeline, name, None)) is not None:
                    stack.enter_context(freed(network.to(device)))
            yield encode
