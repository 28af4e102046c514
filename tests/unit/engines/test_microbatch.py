"""What a loss sees of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import Config
from megadiff.engines.microbatch import (
    ComponentRows,
    cut_rows,
    loss_inputs,
    microbatches,
    padded_microbatches,
)
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.train.rows import ROWS, to_train_batch, update_parts
from megadiff.types import FlowBatch, RolloutGroup, TrainBatch
from tests.distributed.engines import train_batch
from tests.scored import GROUP_SIZE, STEPS, make_group, scored_groups


def test_log_probs_keep_their_precision(tiny_model):
    """float32 around 1 is half a percent of a clip range of 1e-5 apart; the rest is computed in
    float32.
    """
    batch = train_batch(QwenImageAdapter(tiny_model))
    log_probs_NW = -1 - 1e-9 * torch.rand(batch.num_samples, 2, dtype=torch.float64)
    batch = replace(batch, old_log_probs_NW=log_probs_NW, rollout_log_probs_NW=log_probs_NW - 1e-9)
    cpu = torch.device("cpu")
    pieces = list(microbatches(batch, torch.arange(2 * batch.num_samples), 5, cpu))
    inputs = [loss_inputs(batch, piece, piece.latents_BLC) for piece in pieces]
    old, rollout = (
        torch.cat([getattr(one, f"{name}_log_prob_B") for one in inputs]).view(-1, 2)
        for name in ("old", "rollout")
    )
    assert torch.equal(old, log_probs_NW) and torch.equal(rollout, log_probs_NW - 1e-9)
    assert (
        {one.advantage_B.dtype for one in inputs}
        == {piece.latents_BLC.dtype for piece in pieces}
        == {torch.float32}
    )


def with_images(index: int, num_steps: int = STEPS) -> RolloutGroup:
    """Return a group with as many images of 8 x 8 as its index says, modulo 3, a token each."""
    group = make_group(index, num_steps=num_steps)
    count = index % 3
    return replace(
        group,
        sampling=replace(group.sampling, images=((8, 8),) * count),
        conditioning={**group.conditioning, "image_latents": torch.full((1, count, 2), index)},
    )


def check_rows(batch: TrainBatch | FlowBatch, size: int) -> list[int]:
    """Check every microbatch against its rows' own groups. Returns the rows in their order."""
    rows = []
    for piece in microbatches(batch, torch.arange(batch.num_rows), size, torch.device("cpu")):
        rows += piece.row_B.tolist()
        columns = batch.num_rows // len(batch.weights_N)
        groups = batch.group_index_N[piece.row_B // columns].tolist()
        latents_BLC = piece.conditioning["image_latents"]
        assert latents_BLC[:, 0:1, 0].flatten().tolist() == [group for group in groups if group % 3]
        assert {len(batch.images_P[group]) for group in groups} == {latents_BLC.shape[1]}
        assert piece.sampling.images == ((8, 8),) * latents_BLC.shape[1]
        expected = batch.conditioning["prompt_embeds"][groups]
        assert torch.equal(piece.conditioning["prompt_embeds"], expected)
    return rows


def test_rows_with_images_of_other_sizes_share_no_forward() -> None:
    """Five groups with none, one or two images, and each row in exactly one microbatch."""
    groups = [with_images(index) for index in range(5)]
    ones = torch.ones(5, GROUP_SIZE)
    batch = to_train_batch(groups, ones, ones)
    for size in (1, 3, 4, 100):
        rows = check_rows(batch, size)
        assert sorted(rows) == list(range(batch.num_rows))
        # none: groups 0 and 3, one: 1 and 4, two: 2
        counts = [2 * GROUP_SIZE * STEPS, 2 * GROUP_SIZE * STEPS, GROUP_SIZE * STEPS]
        expected = sum(-(-count // size) for count in counts)
        assert len(cut_rows(batch, torch.arange(batch.num_rows), size)) == expected
    for part in update_parts(batch, num_updates=2):
        check_rows(part, 3)


def test_without_images_rows_are_cut_in_their_order() -> None:
    ones = torch.ones(3, GROUP_SIZE)
    batch = to_train_batch([make_group(index) for index in range(3)], ones, ones)
    rows_R = torch.tensor([0, 2, 3, 5, 9])
    assert [rows.tolist() for rows in cut_rows(batch, rows_R, 2)] == [[0, 2], [3, 5], [9]]
    assert cut_rows(batch, rows_R[:0], 2) == []


def test_pairs_stay_pairs_beside_images_of_other_sizes() -> None:
    config = Config()
    config.algorithm.name = "dpo"
    config.algorithm.noise_levels = 3
    scored = scored_groups(range(5))
    scored = replace(scored, groups=[with_images(index, num_steps=0) for index in range(5)])
    batch = ROWS["pairs"](scored, config, build_algorithm(config.algorithm))
    rows = check_rows(batch, 4)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    assert all(best + 1 == worst and best % 2 == 0 for best, worst in pairs)


def test_a_rank_with_fewer_sizes_makes_as_many_forwards() -> None:
    """One rank's groups have three sizes, another's one: the latter adds fillers."""
    ones = torch.ones(3, GROUP_SIZE)
    mixed = to_train_batch([with_images(index) for index in range(3)], ones, ones)
    alike = to_train_batch([with_images(index) for index in (0, 3, 0)], ones, ones)
    rows_R = torch.arange(mixed.num_rows)
    size = GROUP_SIZE * STEPS + 1  # a size's rows do not fill it, two groups' do
    most = max(len(cut_rows(batch, rows_R, size)) for batch in (mixed, alike))
    assert most == 3
    for batch, counted in ((mixed, 3), (alike, 3)):
        rows = ComponentRows(rows_R=rows_R, num_microbatches=most + 1, num_pairs=1.0)
        pieces = list(padded_microbatches(batch, rows, size, torch.device("cpu")))
        assert [counts for _, counts in pieces] == [True] * counted + [False] * (4 - counted)
