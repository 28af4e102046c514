"""Estimate the activations of one update or forward on one GPU, from what one row saves."""

from __future__ import annotations

from dataclasses import replace

import torch

from megadiff.parallel.recompute import kept_blocks
from megadiff.planner.engine_memory import ModelShape, Placing, Work, round_up
from megadiff.planner.saved import HEADS, INPUTS, TOKENWISE, Saved, SavedRow, measure

# Alive at once while a block is at work, in numbers of a token and feature: these in the norms'
# dtype and one in engine.dtype. They are small beside saved bytes, and held against peaks only.
FORWARD = 3  # the stream, its norm and their sum; the modulated norm is in engine.dtype
BACKWARD = 2  # gradients, of which one is gone by then
MLP_TENSORS = 2  # of the MLP's width: before and after its activation, or their gradients

# A compiled block computes norms and modulations again from matrix products. Compiling one to count
# its bytes takes 5 s, so this is a share of an eager block's, counted on Qwen-Image at full width
# by the partition that torch.compile makes. SD3's share is the same. Others have less, so that
# their plans err on the safe side: Wan 0.61, BAGEL 0.58, Z-Image 0.43.
COMPILED = 0.68
COMPILED_LORA = 0.84
# Of a budget below 1. On an H200 15 blocks with LoRA needed 0.50 at budgets of 0.25 to 0.75, and
# 2 GiB more for all else than planned, so 0.7 is within 6 % (docs/performance.md, Memory).
BUDGETED_LORA = 0.7


def activation_bytes(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Return what is saved for the backward, and what the one block at work has beside it."""
    # tokens whose norms this rank computes, and tokens that its MLPs see
    split = split_tokens(model, placing, work)
    gathered = gathered_tokens(model, placing, work)
    mlp_width = model.adapter.mlp_ratio * model.adapter.width / placing.layout.tp

    numbers = BACKWARD if training else FORWARD
    token_bytes = numbers * _saved(model, work).norm_itemsize + work.itemsize
    at_work: float = token_bytes * model.adapter.width * split
    at_work += MLP_TENSORS * work.itemsize * mlp_width * gathered

    if not training:
        return round(at_work)
    # a recomputed block saves all of its own for a while
    again = max(_block_bytes(model, placing, work)) if work.budget < 1 else 0
    return kept_bytes(model, placing, work) + round(again + at_work)


def kept_bytes(model: ModelShape, placing: Placing, work: Work) -> int:
    """Return what autograd keeps of the forward passes before a backward.

    Of a compiled block these are its inputs and the budget's share of the rest. Others keep all,
    or their inputs alone.
    """
    num_blocks = model.num_blocks
    kept_shares = [work.budget] * num_blocks
    # VeOmni's exchanges for Ulysses cut a block into several graphs, so whole blocks are chosen
    is_cut = placing.backend == "veomni" and placing.layout.sp > 1
    if not work.compiled or is_cut:
        whole_blocks = kept_blocks(num_blocks, work.budget)
        kept_shares = [float(block in whole_blocks) for block in range(num_blocks)]

    saved = _saved(model, work)
    # Blocks before a joint stream are not split: each rank computes all their tokens and heads.
    around = placing
    if model.plan.joint_stream:
        around = replace(placing, layout=replace(placing.layout, sp=1, tp=1))
    modules = saved.whole if all(share == 1 for share in kept_shares) else saved.recomputed
    total = _row_bytes(modules.outside, model, around, work)

    whole = _block_bytes(model, placing, work)
    inputs = [_row_bytes(row, model, placing, work) for row in saved.recomputed.blocks]
    for share, whole_bytes, input_bytes in zip(kept_shares, whole, inputs, strict=True):
        total += share * whole_bytes + (1 - share) * input_bytes
    return work.passes * round(total)


def _block_bytes(model: ModelShape, placing: Placing, work: Work) -> list[float]:
    """Return what each block saves that keeps all."""
    compiled = COMPILED
    if model.lora:
        compiled = COMPILED_LORA if work.budget == 1 else BUDGETED_LORA
    rows = _saved(model, work).whole.blocks
    share = compiled if work.compiled else 1
    return [share * _row_bytes(row, model, placing, work) for row in rows]


def _row_bytes(row: SavedRow, model: ModelShape, placing: Placing, work: Work) -> float:
    """Scale the bytes of one row on one GPU to this rank's rows, tokens and heads."""
    layout = placing.layout
    num_slices = _num_slices(placing)
    image = round_up(work.image_tokens, num_slices)
    text = round_up(work.text_tokens, num_slices) / row.text_tokens
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


def gathered_tokens(model: ModelShape, placing: Placing, work: Work) -> int:
    """Return how many tokens of a stream the MLPs of this rank see, and attention takes in."""
    split = split_tokens(model, placing, work)
    return split * (placing.layout.tp if placing.sequence_parallel else 1)


def _num_slices(placing: Placing) -> int:
    """Return over how many ranks tokens are split between attention and MLPs."""
    layout = placing.layout
    return layout.sp * (layout.tp if placing.sequence_parallel else 1)


def _saved(model: ModelShape, work: Work) -> Saved:
    return measure(
        model.adapter,
        lora=model.lora_spec,
        dtype=torch.float32 if work.itemsize == torch.float32.itemsize else torch.bfloat16,
        float32_streams=work.stream_itemsize > work.itemsize,
        modulates_tokens=work.modulates_tokens,
    )
