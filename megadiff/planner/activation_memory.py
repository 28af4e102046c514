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
# What torch's partition keeps of that where a budget below 1 allows it: every matrix product, and
# norms as well. Counted on Qwen-Image and SD3, with LoRA: 0.442 to 0.448 and 0.598 to 0.613; all
# weights: 0.475 to 0.482 and 0.633. A stage is planned from SOONEST of its share on, as blocks'
# shares differ.
STAGES = (0.45, 0.64)
SOONEST = 0.94


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
    again = _recomputed_bytes(model, placing, work)
    return kept_bytes(model, placing, work) + round(again + at_work)


def _recomputed_bytes(model: ModelShape, placing: Placing, work: Work) -> float:
    """Return what a block saves for a while whose forward is computed again."""
    if work.budget == 1:
        return 0.0
    inputs = _input_bytes(model, placing, work)
    most = _beyond_inputs(model, placing, work)
    already_kept = [0.0] * len(most)
    if _has_budget(placing, work):
        already_kept = _within_budget(model, placing, work)
    parts = zip(inputs, most, already_kept, strict=True)
    return max(given + rest - already for given, rest, already in parts)


def kept_bytes(model: ModelShape, placing: Placing, work: Work) -> int:
    """Return what autograd keeps of the forward passes before a backward.

    Of a compiled block these are its inputs and what the budget lets it keep of the rest. Others
    keep all, or their inputs alone.
    """
    if _has_budget(placing, work):
        keeps_all = work.budget == 1
        beyond_inputs = _within_budget(model, placing, work)
    else:
        whole_blocks = kept_blocks(model.num_blocks, work.budget)
        keeps_all = len(whole_blocks) == model.num_blocks
        most = _beyond_inputs(model, placing, work)
        beyond_inputs = [most[block] for block in whole_blocks]

    # Blocks before a joint stream are not split: each rank computes all their tokens and heads.
    around = placing
    if model.plan.joint_stream:
        around = replace(placing, layout=replace(placing.layout, sp=1, tp=1))
    saved = _saved(model, work)
    modules = saved.whole if keeps_all else saved.recomputed
    around_blocks = _row_bytes(modules.outside, model, around, work)
    inputs = _input_bytes(model, placing, work)
    return work.passes * round(around_blocks + sum(inputs) + sum(beyond_inputs))


def _has_budget(placing: Placing, work: Work) -> bool:
    """Tell whether each block keeps a part of its activations. Else whole blocks are chosen."""
    # VeOmni's exchanges for Ulysses cut a block into several graphs
    is_cut = placing.backend == "veomni" and placing.layout.sp > 1
    return work.compiled and not is_cut


def _within_budget(model: ModelShape, placing: Placing, work: Work) -> list[float]:
    """Return what each compiled block keeps beyond its inputs."""
    rows = _saved(model, work).whole.blocks
    return [
        kept_beyond_inputs(most, row.unread_bytes / placing.layout.tp, work.budget)
        for most, row in zip(_beyond_inputs(model, placing, work), rows, strict=True)
    ]


def kept_beyond_inputs(most: float, unread: float, budget: float) -> float:
    """Return the bytes that a compiled block keeps within torch's activation_memory_budget.

    most: what it keeps at a budget of 1. unread: of frozen weights that its backward does not read.

    torch's budget is a share of what the backward reads less what the forward reads
    (choose_saved_values_set in torch/_functorch/partitioners.py). Unread weights are in the second
    and not in the first. So LoRA's blocks keep less than the budget's share until every product
    fits, and more from there on. With few rows that is so at any budget.
    """
    counted = most - unread
    if budget == 0:
        return 0.0
    if budget == 1 or counted <= 0:
        return most

    allowed = budget * counted
    reached = [stage * most for stage in STAGES if allowed > SOONEST * stage * most - unread]
    return max(reached[-1], min(allowed, STAGES[-1] * most)) if reached else allowed


def _input_bytes(model: ModelShape, placing: Placing, work: Work) -> list[float]:
    """Return what each block saves that keeps its inputs alone."""
    rows = _saved(model, work).recomputed.blocks
    return [_row_bytes(row, model, placing, work) for row in rows]


def _beyond_inputs(model: ModelShape, placing: Placing, work: Work) -> list[float]:
    """Return what each block saves beyond its inputs that keeps all."""
    share = 1.0
    if work.compiled:
        share = COMPILED_LORA if model.lora else COMPILED
        # a norm is computed again in its kernel, from the stream, which is an input
        work = replace(work, stream_itemsize=work.itemsize)
    saved = _saved(model, work)
    return [
        share * _row_bytes(whole, model, placing, work) - _row_bytes(inputs, model, placing, work)
        for whole, inputs in zip(saved.whole.blocks, saved.recomputed.blocks, strict=True)
    ]


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
