"""Sum what autograd keeps of one forward of a real transformer, for tests of the memory planner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadiff.models.adapter import IMAGE_LATENTS, ModelAdapter
from megadiff.planner.engine_memory import Work
from megadiff.types import Sampling

ROWS = 4
PIXELS = 256
TEXT_TOKENS = 64


def sampling_of(adapter: ModelAdapter, *, with_image: bool = False) -> Sampling:
    """Return the sampling of an image, or of nine frames where the model makes videos."""
    images = ((PIXELS, PIXELS),) if with_image else ()
    image = Sampling(height=PIXELS, width=PIXELS, num_inference_steps=6)
    video = Sampling(
        height=PIXELS, width=PIXELS, num_frames=9, images=images, num_inference_steps=6
    )
    try:
        adapter.validate(video)
    except ValueError:
        return image
    return video


def activation_work(
    adapter: ModelAdapter, itemsize: int, *, budget: float = 1.0, with_image: bool = False
) -> Work:
    """Describe the forward in kept_by_autograd to the planner."""
    tokens = adapter.token_count(sampling_of(adapter, with_image=with_image), TEXT_TOKENS)
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
    adapter: ModelAdapter, transformer: nn.Module, *, with_image: bool = False
) -> int:
    """Return the bytes of the distinct storages, without weights and tables of rotary angles."""
    half_head = transformer.config.attention_head_dim // 2
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        # gathered weights of FSDP2 come and go within the forward
        weights = {
            parameter.untyped_storage().data_ptr()
            for parameter in transformer.parameters()
            if not hasattr(parameter, "to_local")
        }
        # the same for all blocks and rows: complex, or cosines and sines [S, 1, D / 2]
        is_table = tensor.is_complex() or (tensor.ndim == 3 and tensor.shape[1:] == (1, half_head))
        if storage not in weights and not is_table:
            kept[storage] = tensor  # alive, so that no address comes twice
        return tensor

    config = transformer.config
    sampling = sampling_of(adapter, with_image=with_image)
    num_tokens, channels = adapter.latents_shape(sampling)
    text_dim = getattr(config, "joint_attention_dim", None) or config.text_dim
    conditioning = {
        "prompt_embeds": torch.randn(ROWS, TEXT_TOKENS, text_dim),
        "prompt_mask": torch.ones(ROWS, TEXT_TOKENS, dtype=torch.bool),
    }
    if with_image:
        conditioning[IMAGE_LATENTS] = torch.randn(ROWS, *adapter.image_latents_shape(sampling))
    latents_BLC = torch.randn(ROWS, num_tokens, channels)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity_BLC = adapter.velocity(
            transformer, latents_BLC, torch.rand(ROWS), conditioning, sampling
        )
    assert velocity_BLC.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
