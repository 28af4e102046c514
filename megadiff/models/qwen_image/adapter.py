"""Adapt Qwen-Image to the trainer: conditioning, timestep unit, true CFG, schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megadiff.diffusion.guidance import true_cfg
from megadiff.diffusion.schedule import qwen_image_shift, qwen_image_sigmas
from megadiff.models.adapter import Images
from megadiff.models.image_family import ImageFamily
from megadiff.models.packing import PATCH
from megadiff.models.qwen_image.attention import QwenImageAttention
from megadiff.models.qwen_image.plan import PLAN, SERVED_NAMES
from megadiff.models.qwen_image.rotary import rotate_in_real
from megadiff.models.qwen_image.streams import keep_streams_in_float32
from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d
from megadiff.models.served_names import ServedNames
from megadiff.types import Sampling, Tensors


class QwenImageAdapter(ImageFamily):
    """Work with diffusers' own transformer, every engine's and vllm-omni's."""

    title = "Qwen-Image"
    published = {"20.4 B": "4 × H200"}
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    rollout_pipeline = "megadiff.models.qwen_image.pipeline:QwenImageRolloutPipeline"
    plan = PLAN
    attention = staticmethod(QwenImageAttention)
    served_names: ClassVar[ServedNames | None] = SERVED_NAMES
    guidance_keys = ("true_cfg_scale",)
    veomni_splits_tokens = True
    max_prompt_tokens = 1024  # as in the pipeline of diffusers
    vae_class = "AutoencoderKLQwenImage"
    tokenizer_class = "Qwen2Tokenizer"
    adapt_veomni_module = staticmethod(rotate_in_real)
    adapt_vae = staticmethod(convolve_single_frames_in_2d)
    keep_streams_in_float32 = staticmethod(keep_streams_in_float32)

    def __init__(self, model_folder: Path | str) -> None:
        super().__init__(model_folder)
        self.channels //= PATCH**2  # in_channels counts those of a token
        # it modulates the tokens of its input image differently
        if self.config.get("zero_cond_t") and not self.most_images:
            raise ValueError(
                f"{model_folder}/transformer has zero_cond_t=true, an editing model; "
                "use a text-to-image one"
            )

    def check_float32_streams(self) -> None:
        """They can be kept."""

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas. Raises ValueError without scheduler_config.json."""
        return qwen_image_sigmas(
            sampling.num_inference_steps,
            num_tokens=self.grid(sampling).num_tokens,
            scheduler_config=self.scheduler_config(),
        )

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return qwen_image_shift(
            sigmas,
            num_tokens=self.grid(sampling).num_tokens,
            scheduler_config=self.scheduler_config(),
        )

    def image_shapes(self, sampling: Sampling) -> list[tuple[int, int, int]]:
        """Return frames, rows and columns of tokens of each image that the transformer sees."""
        grid = self.grid(sampling)
        return [(1, grid.rows, grid.columns)]

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        # sigma is the transformer's time unit; it is rounded once, to the compute dtype, in there
        embeds_BTD, mask_BT = _trim(text["prompt_embeds"], text["prompt_mask"])
        return transformer(
            hidden_states=latents_BLC,
            timestep=sigma_B,
            encoder_hidden_states=embeds_BTD.to(latents_BLC.dtype),
            encoder_hidden_states_mask=mask_BT,
            # of one sample: only the first is read, and FSDP2 walks through an entry per
            # sample, which took half of a small step
            img_shapes=[self.image_shapes(sampling)],
            return_dict=False,
        )[0]

    def guide(
        self, positive_BLC: Tensor, negative_BLC: Tensor, scale: float, sigma_B: Tensor
    ) -> Tensor:
        return true_cfg(positive_BLC, negative_BLC, scale)

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        embeds_BTD, mask_BT = pipeline.encode_prompt(
            list(texts), max_sequence_length=self.max_prompt_tokens
        )
        # diffusers drops a mask that is all true
        if mask_BT is None:
            mask_BT = torch.ones(embeds_BTD.shape[:2], dtype=torch.bool)
        return {"prompt_embeds": embeds_BTD, "prompt_mask": mask_BT.bool()}


def _trim(embeds_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return embeddings and their mask, without the columns that no sample uses.

    The mask is None when all that is left is used: a mask costs the fast kernels.
    """
    # Text rotary positions count from the image's size on, whatever the width, so that padding or
    # cutting it changes nothing.
    used_T = mask_BT.bool().any(dim=0).nonzero()
    width = int(used_T[-1]) + 1 if len(used_T) else 0
    if width == 0:
        raise ValueError("prompt_mask has no True at all: a prompt must have at least one token")

    embeds_BTD = embeds_BTD[:, :width]
    mask_BT = mask_BT[:, :width].bool()
    is_needed = not bool(mask_BT.all())
    return embeds_BTD, mask_BT.to(embeds_BTD.device, non_blocking=True) if is_needed else None
