"""BAGEL's generation pass as one plain module, for the trainer.

Names are those of ema.safetensors without `language_model.model.`. The prompt and the two marks
around the image go through the understanding expert, which is frozen. Latents go through the
generation expert (`*_moe_gen`), which is trained. Prompt and marks are one stream, the context. The
prompt is causal and never sees the image, so it carries no gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.models.bagel.attention import GENERATION, BagelAttention, BagelStreams
from megadiff.models.packing import PATCH
from megadiff.tensors.model_files import read_json

FREQUENCIES = 256  # of the timestep's embedding
LARGEST_SIZE = 1 << 18  # a module with 10**9 layers would be built without end


# BagelSizes' field → key of llm_config.json
LANGUAGE_KEYS = {
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}


@dataclass(frozen=True, kw_only=True)
class BagelSizes:
    """Hold what config.json and llm_config.json say of the transformer.

    latent_channels: of the VAE. table_side: of the square table of learned positions.
    """

    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    latent_channels: int
    table_side: int

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def norm(self) -> nn.RMSNorm:
        """Return a norm of a token's channels: in float32, rounded once."""
        return nn.RMSNorm(self.width, self.norm_eps)

    @classmethod
    def read(cls, folder: Path) -> BagelSizes:
        """Read a model folder. Raises ValueError for one whose settings are not BAGEL's."""
        config = read_json(folder / "config.json")
        language = read_json(folder / "llm_config.json")
        try:
            sizes = {name: language[key] for name, key in LANGUAGE_KEYS.items()}
            sizes["latent_channels"] = config["vae_config"]["z_channels"]
            sizes["table_side"] = config["max_latent_size"]
            patch = config["latent_patch_size"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{folder}: config.json and llm_config.json lack {error}; fetch them again"
            ) from error
        if patch != PATCH:
            raise ValueError(f"{folder} has latent_patch_size={patch!r}; BAGEL has {PATCH}")
        for name, size in sizes.items():
            # type(): True is an int too
            is_size = type(size) is int and 0 < size <= LARGEST_SIZE
            rule = f"a whole number from 1 to {LARGEST_SIZE}"
            if name in ("norm_eps", "rope_theta"):
                is_size = type(size) in (int, float) and 0 < size < math.inf
                rule = "a number above 0"
            if not is_size:
                raise ValueError(
                    f"{folder} has {name}={size!r}, not {rule}; fetch config.json and "
                    "llm_config.json again"
                )
        read = cls(**sizes)
        if read.width % read.num_heads or read.num_heads % read.num_kv_heads:
            raise ValueError(
                f"{folder} has width={read.width}, num_heads={read.num_heads} and "
                f"num_kv_heads={read.num_kv_heads}, of which each must divide the one before; "
                "fetch llm_config.json again"
            )
        return read


class GatedMLP(nn.Module):
    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionSite(nn.Module):
    """Hold both experts' projections. A processor, as in diffusers, does the work."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        self.heads = sizes.num_kv_heads  # of keys, the fewer: they limit tp and sp
        self.head_dim = sizes.head_dim
        kv_width = sizes.num_kv_heads * sizes.head_dim
        for expert in ("", GENERATION):
            self.add_module(f"q_proj{expert}", nn.Linear(sizes.width, sizes.width))
            self.add_module(f"k_proj{expert}", nn.Linear(sizes.width, kv_width))
            self.add_module(f"v_proj{expert}", nn.Linear(sizes.width, kv_width))
            self.add_module(f"o_proj{expert}", nn.Linear(sizes.width, sizes.width, bias=False))
            self.add_module(f"q_norm{expert}", nn.RMSNorm(sizes.head_dim, sizes.norm_eps))
            self.add_module(f"k_norm{expert}", nn.RMSNorm(sizes.head_dim, sizes.norm_eps))
        self.processor = BagelAttention()

    def set_processor(self, processor: BagelAttention) -> None:
        self.processor = processor

    def forward(self, *streams: Any) -> tuple[Tensor, Tensor]:
        return self.processor(self, *streams)


class DecoderLayer(nn.Module):
    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        self.self_attn = AttentionSite(sizes)
        self.mlp = GatedMLP(sizes)
        self.mlp_moe_gen = GatedMLP(sizes)
        self.input_layernorm = sizes.norm()
        self.input_layernorm_moe_gen = sizes.norm()
        self.post_attention_layernorm = sizes.norm()
        self.post_attention_layernorm_moe_gen = sizes.norm()

    def forward(
        self, context_BSC: Tensor, latents_BSC: Tensor, streams: BagelStreams
    ) -> tuple[Tensor, Tensor]:
        context, latents = self.self_attn(
            self.input_layernorm(context_BSC), self.input_layernorm_moe_gen(latents_BSC), streams
        )
        context_BSC = context_BSC + context
        latents_BSC = latents_BSC + latents
        return (
            context_BSC + self.mlp(self.post_attention_layernorm(context_BSC)),
            latents_BSC + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(latents_BSC)),
        )


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timestep_B: Tensor) -> Tensor:
        # Here: commands that only look at a model's sizes import no diffusers.
        from diffusers.models.embeddings import get_timestep_embedding

        waves_BC = get_timestep_embedding(
            timestep_B, FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0
        )
        return self.mlp(waves_BC.to(next(self.mlp.parameters()).dtype))


class PositionTable(nn.Module):
    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(side * side, width))


class BagelTransformer(nn.Module):
    """Compute the velocity of latents, whose context is prompt and marks."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        channels = PATCH**2 * sizes.latent_channels
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.num_layers))
        self.norm_moe_gen = sizes.norm()
        self.time_embedder = TimestepEmbedder(sizes.width)
        self.vae2llm = nn.Linear(channels, sizes.width)
        self.llm2vae = nn.Linear(sizes.width, channels)
        self.latent_pos_embed = PositionTable(sizes.table_side, sizes.width)
        self._call: Callable[..., Any] = operator.call

    @property
    def dtype(self) -> torch.dtype:
        return self.vae2llm.weight.dtype

    def enable_gradient_checkpointing(self, call: Callable[..., Any]) -> None:
        """Let `call` run each layer, as in diffusers."""
        self._call = call

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        context_ids: Tensor,
        prompt_mask: Tensor,
        position_ids: Tensor,
        streams: BagelStreams | None = None,
    ) -> tuple[Tensor]:
        """Return the velocity [B, L, C].

        hidden_states: latents [B, L, C]. timestep: sigma [B], never rounded.
        context_ids: [B, T + 2] of the prompt, padded to T, and of the two marks.
        prompt_mask: [B, T] bool, true first; T = 0 is the branch without a prompt.
        position_ids: [B, L] rows of the table of positions.
        streams: facts of the whole streams, where this rank has a part of them.
        """
        streams = streams or BagelStreams.of(self.sizes, hidden_states, context_ids, prompt_mask)
        context_BSC = self.embed_tokens(context_ids)
        latents_BSC = self.vae2llm(hidden_states) + self.time_embedder(timestep)[:, None]
        latents_BSC = latents_BSC + self.latent_pos_embed.pos_embed[position_ids]
        latents_BSC = latents_BSC.to(context_BSC.dtype)

        for layer in self.layers:
            context_BSC, latents_BSC = self._call(layer, context_BSC, latents_BSC, streams)
        return (self.llm2vae(self.norm_moe_gen(latents_BSC)),)
