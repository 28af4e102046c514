"""What autograd keeps of one forward of a transformer, for tests of the memory planner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadiff.models.adapter import FIRST_FRAME, ModelAdapter
from megadiff.planner.engine_memory import Work
from megadiff.types import Sampling

ROWS, PIXELS, TEXT_TOKENS = 4, 256, 64


def sampling_of(adapter: ModelAdapter, *, first_frame: bool = False) -> Sampling:
    """An image, or of a model of videos nine frames."""
    sampling = Sampling(height=PIXELS, width=PIXELS, num_inference_steps=6)
    try:
        videos = Sampling(
            height=PIXELS,
            width=PIXELS,
            num_frames=9,
            first_frame=first_frame,
            num_inference_steps=6,
        )
        adapter.validate(videos)
    except ValueError:
        return sampling
    return videos


def activation_work(
    adapter: ModelAdapter, itemsize: int, *, budget: float = 1.0, first_frame: bool = False
) -> Work:
    """Of the forward in kept_by_autograd."""
    tokens = adapter.token_count(sampling_of(adapter, first_frame=first_frame), TEXT_TOKENS)
    return Work(
        rows=ROWS,
        image_tokens=tokens.image,
        text_tokens=tokens.text,
        modulates_tokens=tokens.is_modulated,
        passes=1,
        itemsize=itemsize,
        stream_itemsize=itemsize,
        budget=budget,
        num_microbatches=1,
        accumulates=False,
        keeps_average=True,
    )


def kept_by_autograd(
    adapter: ModelAdapter, transformer: nn.Module, *, first_frame: bool = False
) -> int:
    """Bytes of the distinct storages, without weights and without the tables of rotary angles: complex, or of cosines and
    sines [S, 1, D / 2], the same for all blocks."""
    half_head = transformer.config.attention_head_dim // 2
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        weights = {
            p.untyped_storage().data_ptr()
            for p in transformer.parameters()
            if not hasattr(p, "to_local")
        }
        is_table = tensor.is_complex() or (tensor.ndim == 3 and tensor.shape[1:] == (1, half_head))
        if storage not in weights and not is_table:
            kept[storage] = tensor  # alive, so that no address comes twice
        return tensor

    sampling = sampling_of(adapter, first_frame=first_frame)
    num_tokens, channels = adapter.latents_shape(sampling)
    text_dim = (
        getattr(transformer.config, "joint_attention_dim", None) or transformer.config.text_dim
    )
    conditioning = {
        "prompt_embeds": torch.randn(ROWS, TEXT_TOKENS, text_dim),
        "prompt_mask": torch.ones(ROWS, TEXT_TOKENS, dtype=torch.bool),
    }
    if first_frame:
        given = adapter.token_count(sampling, TEXT_TOKENS).image - num_tokens
        conditioning[FIRST_FRAME] = torch.randn(ROWS, given, channels)
    latents_BLC = torch.randn(ROWS, num_tokens, channels)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity_BLC = adapter.velocity(
            transformer, latents_BLC, torch.rand(ROWS), conditioning, sampling
        )
    assert velocity_BLC.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
