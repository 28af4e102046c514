"""Which images a supervised step takes and what noise they get: the same for every layout, and
continued after a stop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadiff.data.flow import FlowBatches
from megadiff.data.latents import EMPTY_CAPTION, LatentDataset
from megadiff.data.row_files import write_tensor
from megadiff.diffusion.schedule import qwen_image_shift
from megadiff.types import FlowBatch, Sampling

SAMPLING = Sampling(height=32, width=32, num_inference_steps=4)
SHIFT = partial(
    qwen_image_shift,
    num_tokens=1024,
    scheduler_config={
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 8192,
        "max_shift": 0.9,
        "use_dynamic_shifting": True,
    },
)
CAPTIONS = [EMPTY_CAPTION, "a", "bb", "ccc"]


@pytest.fixture
def dataset(tmp_path: Path) -> LatentDataset:
    return make_dataset(tmp_path / "cache")


def make_dataset(
    folder: Path, *, num_images: int = 7, captions: list[str] = CAPTIONS
) -> LatentDataset:
    """Image i has latents of i everywhere, and the caption 1 + i mod 3, whose tokens are its
    number.
    """
    folder.mkdir()
    write_tensor(
        folder / "latents_00000_00000.safetensors",
        torch.arange(num_images).float()[:, None, None].expand(-1, 4, 8),
    )
    lengths = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    write_tensor(folder / "lengths.prompt_mask_00000_00000.safetensors", lengths)
    numbers_N = torch.arange(4.0).repeat_interleave(lengths)
    write_tensor(
        folder / "tokens.prompt_embeds_00000_00000.safetensors", numbers_N[:, None].expand(-1, 5)
    )
    write_tensor(folder / "caption_index.safetensors", (1 + torch.arange(num_images) % 3).int())
    (folder / "captions.json").write_text(json.dumps(captions))
    return LatentDataset(folder)


@pytest.fixture
def make(dataset: LatentDataset):
    """FlowBatches whose threads end with the test."""
    made = []

    def make_one(dataset: LatentDataset = dataset, **changes: object) -> FlowBatches:
        settings: dict = dict(
            items_per_step=4, draws_per_item=3, caption_drop=0.25, sampling=SAMPLING, shift=SHIFT
        )
        settings |= dict(dp=1, dp_rank=0, seed=5, shuffle=True)
        made.append(FlowBatches(dataset, **settings | changes))
        return made[-1]

    yield make_one
    for batches in made:
        batches.close()


def rows_of(batch: FlowBatch) -> dict[str, Tensor]:
    """Field → its value of every row; the text of a row is its caption's number, once for each of
    its tokens.
    """
    embeds_NTD = batch.conditioning["prompt_embeds"][batch.group_index_N]
    mask_NT = batch.conditioning["prompt_mask"][batch.group_index_N]
    text_N = (embeds_NTD[..., 0] * mask_NT).sum(dim=1) + 100 * mask_NT.sum(dim=1)
    return {
        "latents": batch.latents_NLC,
        "noise": batch.noise_NLC,
        "sigma": batch.sigma_N,
        "weights": batch.weights_N,
        "text": text_N,
    }


@pytest.mark.parametrize("dp", [2, 4])
def test_the_union_over_ranks_does_not_depend_on_dp(
    make: Callable[..., FlowBatches], dp: int
) -> None:
    whole, parts = make(), [make(dp=dp, dp_rank=rank) for rank in range(dp)]
    for _ in range(5):  # 20 images of 7: over epochs
        expected, found = next(whole), [next(part) for part in parts]
        assert {each.denominator for each in found} == {expected.denominator} == {12.0}
        shares = [rows_of(each) for each in found]
        for name, values in rows_of(expected).items():
            assert torch.equal(torch.cat([share[name] for share in shares]), values), name


def test_a_batch_is_what_its_docstring_says(make: Callable[..., FlowBatches]) -> None:
    batch = next(make())
    assert batch.num_rows == 12 and batch.sampling == SAMPLING
    assert batch.noise_NLC.shape == batch.latents_NLC.shape == (12, 4, 8)
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    assert {
        value.dtype
        for name, value in tensors.items()
        if name in ("latents_NLC", "noise_NLC", "sigma_N")
    } == {torch.float32}
    images = batch.latents_NLC[:, 0, 0].reshape(4, 3)
    assert (images == images[:, :1]).all() and len(
        images[:, 0].unique()
    ) == 4  # draws of one image follow each other
    assert len(batch.noise_NLC[:, 0, 0].unique()) == len(batch.sigma_N.unique()) == 12
    assert 0 < batch.sigma_N.min() and batch.sigma_N.max() < 1


def test_each_row_has_the_text_of_its_image_or_the_empty_one(
    make: Callable[..., FlowBatches],
) -> None:
    batches, dropped = make(items_per_step=7, draws_per_item=40), []
    for _ in range(10):
        rows = rows_of(next(batches))
        number = 1 + rows["latents"][:, 0, 0] % 3
        own = number * (number + 1) + 100 * (number + 1)  # as many tokens as its number and one
        is_empty = rows["text"] == 100
        assert ((rows["text"] == own) | is_empty).all()
        dropped.append(is_empty)
    share = torch.cat(dropped).float().mean()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 2800) ** 0.5


@pytest.mark.parametrize(("caption_drop", "expected"), [(0.0, False), (1.0, True)])
def test_no_caption_or_every_caption_is_dropped(
    make: Callable[..., FlowBatches], caption_drop: float, expected: bool
) -> None:
    batch = next(make(caption_drop=caption_drop, draws_per_item=200))
    assert ((rows_of(batch)["text"] == 100) == expected).all()


def test_sigmas_are_logit_normal_and_shifted(make: Callable[..., FlowBatches]) -> None:
    """Quantiles against the formula: sigma = m·s/(1 + (m − 1)·s), s = 1/(1 + exp(−z)), m = exp(mu)
    of 512×512.
    """
    batches = make(draws_per_item=1000)
    sigmas = torch.cat([next(batches).sigma_N for _ in range(5)]).double()
    levels = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98], dtype=torch.float64)
    odds = torch.exp(torch.special.ndtri(levels) + 0.538710)  # a shift in log odds
    expected = odds / (1 + odds)
    below = (sigmas[:, None] < expected).double().mean(dim=0)
    assert (below - levels).abs().max() < 4 * (0.25 / len(sigmas)) ** 0.5


@pytest.mark.parametrize("dp", [1, 2])
def test_a_saved_state_continues_under_any_dp(make: Callable[..., FlowBatches], dp: int) -> None:
    batches = make()
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    resumed = [make(dp=dp, dp_rank=rank) for rank in range(dp)]
    for each in resumed:
        next(each)  # and one made ahead, for another position
        each.load_state(state)
        assert each.state() == state
    for _ in range(2):
        expected, shares = rows_of(next(batches)), [rows_of(next(each)) for each in resumed]
        for name, values in expected.items():
            assert torch.equal(torch.cat([share[name] for share in shares]), values), name


def test_a_state_of_other_data_is_refused(make: Callable[..., FlowBatches], tmp_path: Path) -> None:
    state = make().state()
    more = make(make_dataset(tmp_path / "more", num_images=8))
    message = "num_prompts=7, .*; this run has num_prompts=8, .*data.prompts, data.images or"
    with pytest.raises(ValueError, match=message):
        more.load_state(state)
    others = make(make_dataset(tmp_path / "others", captions=[EMPTY_CAPTION, "a", "bb", "cc"]))
    with pytest.raises(ValueError, match=f"digest={state['digest']}, from data.images; this run"):
        others.load_state(state)
    others.load_state(state, accept_changes=True)
    make(make_dataset(tmp_path / "copy")).load_state(state)
    with pytest.raises(ValueError, match="seed=5, from .*; this run has seed=6"):
        make(seed=6).load_state(state)


def test_what_fails_in_the_background_is_raised_by_next(
    make: Callable[..., FlowBatches], dataset: LatentDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make()
    monkeypatch.setattr(dataset, "latents", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_steps_differ_and_seeds_too(make: Callable[..., FlowBatches]) -> None:
    batches = make(items_per_step=7, shuffle=False)
    first, second, other = (
        next(batches),
        next(batches),
        next(make(items_per_step=7, shuffle=False, seed=6)),
    )
    assert torch.equal(first.latents_NLC, second.latents_NLC) and torch.equal(
        first.latents_NLC, other.latents_NLC
    )
    for batch in (second, other):
        assert (
            not (batch.noise_NLC == first.noise_NLC).any()
            and not (batch.sigma_N == first.sigma_N).any()
        )


PAIRED = {"images_per_item": 2, "items_per_step": 2}


@pytest.fixture
def pairs(tmp_path: Path) -> LatentDataset:
    """Five pairs: images 2i and 2i + 1 have the same caption."""
    dataset = make_dataset(tmp_path / "pairs", num_images=10)
    dataset.caption_index = (1 + torch.arange(5) % 3).repeat_interleave(2)
    return dataset


def test_pairs_share_noise_sigma_and_caption(
    make: Callable[..., FlowBatches], pairs: LatentDataset
) -> None:
    batches = make(pairs, **PAIRED)
    seen: set[float] = set()
    num_dropped = 0
    for _ in range(10):
        batch = next(batches)
        rows = rows_of(batch)
        assert batch.num_rows == batch.denominator == 2 * 3 * 2
        chosen_M = rows["latents"][0::2, 0, 0]
        assert (chosen_M % 2 == 0).all()
        assert torch.equal(rows["latents"][1::2, 0, 0], chosen_M + 1)
        for name in ("noise", "sigma", "text"):
            assert torch.equal(rows[name][0::2], rows[name][1::2]), name
        # draws of a pair follow each other, and each has numbers of its own
        assert (chosen_M.view(2, 3) == chosen_M.view(2, 3)[:, :1]).all()
        assert len(rows["sigma"].unique()) == len(rows["noise"][:, 0, 0].unique()) == 6
        seen |= set(chosen_M.tolist())
        num_dropped += int((rows["text"] == 100).sum()) // 2
    assert seen == {0, 2, 4, 6, 8}
    assert 0 < num_dropped < 60


def test_pairs_do_not_depend_on_dp_and_resume(
    make: Callable[..., FlowBatches], pairs: LatentDataset
) -> None:
    whole = make(pairs, **PAIRED)
    parts = [make(pairs, **PAIRED, dp=2, dp_rank=rank) for rank in range(2)]
    for _ in range(4):
        expected = next(whole)
        found = [next(part) for part in parts]
        assert {batch.denominator for batch in found} == {expected.denominator}
        local_rows = [rows_of(batch) for batch in found]
        for name, values in rows_of(expected).items():
            assert torch.equal(torch.cat([rows[name] for rows in local_rows]), values), name

    state = whole.state()
    assert (state["position"], state["num_prompts"]) == (8, 5)
    resumed = make(pairs, **PAIRED)
    resumed.load_state(state)
    found_rows = rows_of(next(resumed))
    for name, values in rows_of(next(whole)).items():
        assert torch.equal(found_rows[name], values), name


def test_a_pair_draws_what_an_image_draws(
    make: Callable[..., FlowBatches], pairs: LatentDataset
) -> None:
    """The numbers of an item do not depend on how many images it has."""
    paired = next(make(pairs, **PAIRED))
    single = next(make(items_per_step=2))
    assert torch.equal(paired.sigma_N[0::2], single.sigma_N)
    assert torch.equal(paired.noise_NLC[1::2], single.noise_NLC)
