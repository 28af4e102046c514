"""Estimate the activations of one update or forward on one GPU, from what one row saves."""

from __future__ import annotations

import torch

from megadiff.parallel.recompute import kept_blocks
from megadiff.planner.engine_memory import ModelShape, Placing, Work, round_up
from megadiff.planner.saved import HEADS, INPUTS, TEXT_TOKENS, TOKENWISE, Saved, SavedRow, measure

# Alive at once while a block is at work, in numbers of a token and feature: these in the norms'
# dtype and one in engine.dtype. They are small beside saved bytes, and held against peaks only.
FORWARD = 3  # the stream, its norm and their sum; the modulated norm is in engine.dtype
BACKWARD = 2  # gradients, of which one is gone by then
MLP_TENSORS = 2  # of the MLP's width: before and after its activation, or their gradients
MODULATIONS = 6  # shift, scale and gate of attention and MLP

# A compiled block computes norms and modulations again from matrix products. Compiling one to count
# its bytes takes 5 s, so these are shares of an eager block's, counted on Qwen-Image at full width
# by the partition that torch.compile makes. Wan's share is 0.61.
COMPILED = 0.68
COMPILED_LORA = 0.84


def activation_bytes(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Return what is saved for the backward, and what the one block at work has beside it."""
    # tokens whose norms this rank computes, and tokens that its MLPs see
    split = split_tokens(model, placing, work)
    gathered = split * (placing.layout.tp if placing.sequence_parallel else 1)
    mlp_width = model.adapter.mlp_ratio * model.adapter.width / placing.layout.tp

    numbers = BACKWARD if training else FORWARD
    token_bytes = numbers * _saved(model, work).norm_itemsize + work.itemsize
    at_work: float = token_bytes * model.adapter.width * split
    at_work += MLP_TENSORS * work.itemsize * mlp_width * gathered

    if not training:
        return round(at_work)
    # a recomputed block saves all of its own for a while
    again = _block_bytes(model, placing, work) if work.budget < 1 else 0
    return kept_bytes(model, placing, work) + round(again + at_work)


def kept_bytes(model: ModelShape, placing: Placing, work: Work) -> int:
    """Return what autograd keeps of the forward passes before a backward.

    Of a compiled block these are its inputs and the budget's share of the rest. Others keep all,
    or their inputs alone.
    """
    num_whole = model.num_blocks * work.budget
    # Ulysses' exchanges cut a block into several graphs, so there whole blocks are chosen
    if not work.compiled or placing.layout.sp > 1:
        num_whole = len(kept_blocks(model.num_blocks, work.budget))

    outside = _row_bytes(_saved(model, work).outside, model, placing, work)
    # checkpoint() keeps a block's input, which is the stream
    inputs = work.stream_itemsize * model.adapter.width * split_tokens(model, placing, work)
    recomputed = (model.num_blocks - num_whole) * inputs
    if work.modulates_tokens and recomputed:
        # and the modulations of each token, which are an input of all blocks
        modulation = MODULATIONS * work.itemsize * model.adapter.width
        recomputed += modulation * split_tokens(model, placing, work)

    whole = num_whole * _block_bytes(model, placing, work)
    return work.passes * round(outside + recomputed + whole)


def _block_bytes(model: ModelShape, placing: Placing, work: Work) -> float:
    compiled = COMPILED_LORA if model.lora else COMPILED
    block = _row_bytes(_saved(model, work).block, model, placing, work)
    return block * (compiled if work.compiled else 1)


def _row_bytes(row: SavedRow, model: ModelShape, placing: Placing, work: Work) -> float:
    """Scale the bytes of one row on one GPU to this rank's rows, tokens and heads."""
    layout = placing.layout
    num_slices = _num_slices(placing)
    image = round_up(work.image_tokens, num_slices)
    text = round_up(work.text_tokens, num_slices) / TEXT_TOKENS
    num_bytes = 0.0
    ranks = {TOKENWISE: num_slices, INPUTS: layout.sp, HEADS: layout.sp * layout.tp}
    for kind, num_ranks in ranks.items():
        num_bytes += row.image_token[kind] * image / num_ranks
        if model.plan.text_is_stream:
            num_bytes += row.text[kind] * text / num_ranks
        else:
            # Text that cross attention reads is not split over tokens. Under sequence parallelism
            # each slice of the image also reads its own copy of all keys and values.
            copies_heads = kind != HEADS or placing.sequence_parallel
            num_bytes += row.text[kind] / (1 if copies_heads else layout.tp)
    return work.rows * num_bytes


def split_tokens(model: ModelShape, placing: Placing, work: Work) -> int:
    """Return how many tokens of a stream this rank has between attention and MLPs."""
    num_slices = _num_slices(placing)
    tokens = round_up(work.image_tokens, num_slices)
    if model.plan.text_is_stream:
        tokens += round_up(work.text_tokens, num_slices)
    return work.rows * tokens // num_slices


def _num_slices(placing: Placing) -> int:
    """Return over how many ranks tokens are split between attention and MLPs."""
    layout = placing.layout
    return layout.sp * (layout.tp if placing.sequence_parallel else 1)


def _saved(model: ModelShape, work: Work) -> Saved:
    return measure(
        model.adapter,  # type: ignore[arg-type]  # hashed by identity
        lora=model.lora_spec,
        dtype=torch.float32 if work.itemsize == torch.float32.itemsize else torch.bfloat16,
        float32_streams=work.stream_itemsize > work.itemsize,
        modulates_tokens=work.modulates_tokens,
    )
