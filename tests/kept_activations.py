"""What autograd keeps of one forward of a transformer, for tests of the memory planner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadiff.engines.memory import Work
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.types import Sampling

ROWS, PIXELS, IMAGE_TOKENS, TEXT_TOKENS = 4, 256, 256, 64


def activation_work(itemsize: int, *, recompute_every: int) -> Work:
    """Of the forward in kept_by_autograd."""
    return Work(
        rows=ROWS,
        image_tokens=IMAGE_TOKENS,
        text_tokens=TEXT_TOKENS,
        passes=1,
        itemsize=itemsize,
        recompute_every=recompute_every,
        num_microbatches=1,
        accumulates=False,
        keeps_average=True,
    )


def kept_by_autograd(adapter: QwenImageAdapter, transformer: nn.Module) -> int:
    """Bytes of the distinct storages, without weights and without the table of rotary angles, which is complex."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        weights = {p.untyped_storage().data_ptr() for p in transformer.parameters() if not hasattr(p, "to_local")}
        if storage not in weights and not tensor.is_complex():
            kept[storage] = tensor  # alive, so that no address comes twice
        return tensor

    conditioning = {
        "prompt_embeds": torch.randn(ROWS, TEXT_TOKENS, transformer.config.joint_attention_dim),
        "prompt_mask": torch.ones(ROWS, TEXT_TOKENS, dtype=torch.bool),
    }
    latents_BLC = torch.randn(ROWS, IMAGE_TOKENS, adapter.channels)
    sampling = Sampling(height=PIXELS, width=PIXELS, num_inference_steps=6)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity_BLC = adapter.velocity(transformer, latents_BLC, torch.rand(ROWS), conditioning, sampling)
    assert velocity_BLC.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
