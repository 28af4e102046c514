"""Sum what autograd keeps of one forward of a real transformer, for tests of the memory planner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadiff.config.schema import LoraConfig
from megadiff.models.adapter import ModelAdapter
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.parallel.lora import Adapters, adapt_linears, lora_spec
from megadiff.parallel.plan import is_lora
from megadiff.planner.engine_memory import Work
from megadiff.types import Sampling

ROWS = 4
PIXELS = 256
TEXT_TOKENS = 64


def sampling_of(adapter: ModelAdapter, *, with_image: bool = False) -> Sampling:
    """Return a sampling of what the model makes: an image, an edited one, or nine frames."""
    given = ((PIXELS, PIXELS),)
    choices = [
        Sampling(
            height=PIXELS,
            width=PIXELS,
            num_frames=9,
            images=given if with_image else (),
            num_inference_steps=6,
        ),
        Sampling(height=PIXELS, width=PIXELS, num_inference_steps=6),
        Sampling(height=PIXELS, width=PIXELS, images=given, num_inference_steps=6),
    ]
    for sampling in choices[:-1]:
        try:
            adapter.validate(sampling)
        except ValueError:
            continue
        return sampling
    return choices[-1]


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
    half_head = adapter.width // adapter.num_heads // 2
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

    sampling = sampling_of(adapter, with_image=with_image)
    num_tokens, channels = adapter.latents_shape(sampling)
    conditioning = {
        name: random_rows(tensor) for name, tensor in adapter.blank_text(TEXT_TOKENS).items()
    }
    if sampling.images:
        conditioning[IMAGE_LATENTS] = torch.randn(ROWS, *adapter.image_latents_shape(sampling))
    latents_BLC = torch.randn(ROWS, num_tokens, channels)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity_BLC = adapter.velocity(
            transformer, latents_BLC, torch.rand(ROWS), conditioning, sampling
        )
    assert velocity_BLC.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def random_rows(tensor: Tensor) -> Tensor:
    """Return ROWS rows of random numbers like the one given; masks and ids are repeated."""
    rows = tensor.repeat(ROWS, *[1] * (tensor.ndim - 1))
    return torch.randn_like(rows) if rows.is_floating_point() else rows


def random_transformer(adapter: ModelAdapter, dtype: torch.dtype) -> nn.Module:
    """Return the stock transformer with random weights, as engines train it."""
    empty = adapter.empty_transformer()
    buffers = {name: buffer for name, buffer in empty.named_buffers() if not buffer.is_meta}
    transformer = empty.to_empty(device="cpu")
    for name, buffer in transformer.named_buffers():
        buffer.copy_(buffers.get(name, torch.zeros_like(buffer)))
    for parameter in transformer.parameters():
        parameter.data.normal_(std=0.02)
    for name in adapter.plan.frozen_names(dict(transformer.named_parameters())):
        transformer.get_parameter(name).requires_grad = False
    return transformer.to(dtype).train()


def adapt_with_lora(transformer: nn.Module, adapter: ModelAdapter, rank: int) -> None:
    """Put LoRA beside frozen weights, all of it small and not zero."""
    spec = lora_spec(
        LoraConfig(rank=rank), adapter.plan, [name for name, _ in transformer.named_parameters()]
    )
    transformer.requires_grad_(False)
    adapt_linears(transformer, Adapters(spec))
    for name, parameter in list(transformer.named_parameters()):
        if is_lora(name):
            parent, _, leaf = name.rpartition(".")
            values = torch.randn(parameter.shape, dtype=torch.bfloat16) / 100
            transformer.get_submodule(parent).register_parameter(leaf, nn.Parameter(values))
