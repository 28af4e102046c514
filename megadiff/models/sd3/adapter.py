"""Adapt Stable Diffusion 3 and 3.5 to the trainer: three text encoders, timesteps, schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.diffusion.schedule import static_shift
from megadiff.models.adapter import Images
from megadiff.models.image_family import ImageFamily
from megadiff.models.sd3.attention import SD3Attention
from megadiff.models.sd3.plan import PLAN
from megadiff.types import Sampling, Tensors

CLIP_TOKENS = 77  # what CLIP can see, marks of start and end included
T5_TOKENS = 256  # as in the pipeline of diffusers
NUM_TIMESTEPS = 1000  # default of the scheduler's class


class SD3Adapter(ImageFamily):
    """Work with diffusers' own transformer, every engine's and vllm-omni's."""

    title = "Stable Diffusion 3 and 3.5"
    published = {"3 medium, 2 B": "", "3.5 medium, 2.2 B": "1 × H200", "3.5 large, 8 B": ""}
    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    rollout_pipeline = "megadiff.models.sd3.pipeline:SD3RolloutPipeline"
    plan = PLAN
    attention = staticmethod(SD3Attention)
    # Both CLIP encoders cut a text off, as in every pipeline of SD3. T5 sees more of it, and what
    # it cannot see is refused.
    max_prompt_tokens = T5_TOKENS
    text_tokens = CLIP_TOKENS + T5_TOKENS  # all of them are attended to, padding as well
    other_sizes = ("in_channels", "pos_embed_max_size")
    tokenizer_class = "T5TokenizerFast"
    tokenizer_folder = "tokenizer_3"

    def empty_transformer(self, component: str = "transformer") -> nn.Module:
        """Return the stock transformer on the meta device, its table of positions being zeros.

        Whoever computes with it reads the table, a constant of the plan, from the model folder.
        """
        from accelerate import init_empty_weights

        stock = self.module_class()
        # 384² positions are 0.8 GiB, which take seconds to compute for each plan and each start
        with init_empty_weights(include_buffers=True):
            transformer = stock.from_config(stock.load_config(self.model_folder / component))
        transformer.pos_embed.pos_embed = torch.zeros(transformer.pos_embed.pos_embed.shape)
        return transformer

    def __init__(self, model_folder: Path | str) -> None:
        super().__init__(model_folder)
        self.positions_per_side = self.config["pos_embed_max_size"]

    def last_sigma(self, num_steps: int) -> float:
        """Return the scheduler's sigma_min, which is shifted already and will be once more."""
        num_timesteps = self.scheduler_config().get("num_train_timesteps", NUM_TIMESTEPS)
        if not isinstance(num_timesteps, int) or num_timesteps < 1:
            raise ValueError(
                f"{self.model_folder}/scheduler/scheduler_config.json has num_train_timesteps="
                f"{num_timesteps!r}, which is no positive integer; fetch the file again"
            )
        smallest = torch.tensor(1 / num_timesteps, dtype=torch.float32)
        return float(static_shift(smallest, shift=self.static_shift()))

    def one_pass(
        self,
        transformer: Any,
        latents_BCHW: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the velocity [B, C, H, W] in the transformer's dtype.

        The timestep 1000·sigma stays float32: in bfloat16 978 would be 976.
        text: prompt_embeds [B, tokens, D], pooled_prompt_embeds [B, D].
        """
        return transformer(
            hidden_states=latents_BCHW,
            timestep=1000 * sigma_B,
            encoder_hidden_states=text["prompt_embeds"].to(latents_BCHW.dtype),
            pooled_projections=text["pooled_prompt_embeds"].to(latents_BCHW.dtype),
            return_dict=False,
        )[0]

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        """Encode by both CLIP encoders and T5."""
        embeds_BTD, _, pooled_BD, _ = pipeline.encode_prompt(
            list(texts),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=T5_TOKENS,
        )
        return {"prompt_embeds": embeds_BTD, "pooled_prompt_embeds": pooled_BD}

    def blank_text(self, num_tokens: int) -> Tensors:
        return {
            "prompt_embeds": torch.zeros(1, self.text_tokens, self.config["joint_attention_dim"]),
            "pooled_prompt_embeds": torch.zeros(1, self.config["pooled_projection_dim"]),
        }

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Count what ImageFamily does, and the image's attention to itself in some blocks."""
        num_blocks = len(self.config.get("dual_attention_layers") or ())
        num_tokens, _ = self.latents_shape(sampling)
        d = self.width
        one_pass = num_blocks * (8 * num_tokens * d**2 + 4 * num_tokens**2 * d)
        num_passes = self.num_passes(self.components[0], sampling)
        return super().flops(sampling, num_text_tokens) + one_pass * num_passes
