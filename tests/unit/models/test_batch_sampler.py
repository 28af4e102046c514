"""A batch of groups is the groups one by one: rows keep their own noise, window and
conditioning.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys
from megadiff.models.batch_sampler import BatchSampler, split_groups
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling

SHAPE, STEPS = (6, 4), 7
SAMPLING = Sampling(height=32, width=48, num_inference_steps=STEPS, sde_window_range=(0, 6))
SCHEDULE = torch.linspace(1, 0, STEPS + 1)


def make_request(place: int, *sample_indices: int, sampling: Sampling = SAMPLING) -> RolloutRequest:
    prompt = Prompt(text="x" * (place + 1), id=f"{place:016x}")
    return RolloutRequest(
        prompt=prompt, sampling=sampling, sample_indices=sample_indices, seed=place, step=2
    )


def velocity(latents_NLC: Tensor, sigma_N: Tensor, widths_N: Tensor) -> Tensor:
    """A model whose rows do not mix; the prompt enters by its length."""
    return latents_NLC * (widths_N[:, None, None] / 8) + sigma_N[:, None, None]


def draw(requests: list[RolloutRequest]) -> list[RolloutGroup]:
    sampler = BatchSampler(
        requests, schedule=SCHEDULE, token_shape=SHAPE, device=torch.device("cpu")
    )
    widths_P = torch.tensor([len(request.prompt.text) for request in requests])
    mask_PT = torch.arange(int(widths_P.max())) < widths_P[:, None]
    sampler.conditioning = {
        "prompt_embeds": mask_PT[..., None] * torch.ones(3),
        "prompt_mask": mask_PT,
    }
    latents_NLC = sampler.initial_latents()
    for _ in range(STEPS):
        sigma_N = sampler.model_sigma(latents_NLC, torch.float32)
        latents_NLC = sampler.step(
            velocity(latents_NLC, sigma_N, sampler.per_row(widths_P)), latents_NLC
        )
    pixels = (
        (latents_NLC * 20 + 128)
        .clamp(0, 255)
        .to(torch.uint8)[:, None, :, :1, None]
        .expand(-1, 1, 6, 1, 3)
    )
    return split_groups(requests, sampler.result(pixels), policy_version=4, replica="r")


def assert_equal(left: RolloutGroup, right: RolloutGroup) -> None:
    assert left.conditioning.keys() == right.conditioning.keys()
    for name, tensor in left.conditioning.items():
        assert torch.equal(tensor, right.conditioning[name])
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
        elif name != "conditioning":
            assert value == other, name


@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "flow_cps"])
def test_a_batch_is_its_groups_one_by_one(sde_type: str) -> None:
    sampling = replace(SAMPLING, sde_type=sde_type)
    requests = [make_request(place, *range(1 + place % 3), sampling=sampling) for place in range(8)]
    groups = draw(requests)
    # or the windows are not mixed
    assert len({group.window_start for group in groups}) > 2
    for group, request in zip(groups, requests, strict=True):
        assert_equal(group, draw([request])[0])


def test_the_recorded_window_is_the_one_that_was_walked() -> None:
    requests = [make_request(place, 3, 1) for place in range(6)]
    for group, request in zip(draw(requests), requests, strict=True):
        assert group.sample_indices == (3, 1)
        assert group.log_probs_GW.dtype == torch.float64
        start = group.window_start
        for sample_index, latents_SLC in zip((3, 1), group.latents_GSLC, strict=True):
            key = group_key(seed=request.seed, step=2, prompt_id=request.prompt.id)
            (latents_LC,) = initial_latents_rows(SHAPE, sample_keys(key, [sample_index]))
            for index in range(start):  # the ODE steps before the window
                sigma, sigma_next = SCHEDULE[index], SCHEDULE[index + 1]
                width = torch.tensor([len(request.prompt.text)])
                latents_LC = latents_LC + velocity(latents_LC[None], sigma[None], width)[0] * (
                    sigma_next - sigma
                )
            assert torch.equal(latents_SLC[0], latents_LC)
            assert not torch.equal(latents_SLC[1], latents_SLC[0])


@pytest.mark.parametrize("changes", [{"sde_type": "ode"}, {"sde_window_size": 0}])
def test_without_a_window_the_clean_latents_are_kept(changes: dict) -> None:
    sampling = replace(SAMPLING, **changes)
    requests = [make_request(place, *range(2 + place), sampling=sampling) for place in range(2)]
    groups = draw(requests)
    assert [len(group.latents_GSLC) for group in groups] == [2, 3]
    for group, request in zip(groups, requests, strict=True):
        assert_equal(group, draw([request])[0])
        num_samples = len(request.sample_indices)
        assert group.window_start == STEPS
        assert group.latents_GSLC.shape == (num_samples, 1, *SHAPE)
        assert group.log_probs_GW.shape == (num_samples, 0)


def test_conditioning_without_a_mask_stays_whole() -> None:
    frames = torch.arange(12.0).view(2, 3, 2)
    sampler = BatchSampler(
        [make_request(0, 0), make_request(1, 0)],
        schedule=SCHEDULE,
        token_shape=SHAPE,
        device=torch.device("cpu"),
    )
    sampler.conditioning = {
        "first_frame": frames,
        "prompt_mask": torch.ones(2, 1, dtype=torch.bool),
    }
    result = sampler.result(torch.zeros(2, 1, 1, 1, 3, dtype=torch.uint8))
    for place, group in enumerate(
        split_groups(sampler.requests, result, policy_version=0, replica="r")
    ):
        assert torch.equal(group.conditioning["first_frame"], frames[place : place + 1])


def test_conditioning_is_cut_to_each_groups_tokens() -> None:
    for group, tokens in zip(
        draw([make_request(4, 0), make_request(0, 0), make_request(2, 0)]), (5, 1, 3), strict=True
    ):
        assert group.conditioning["prompt_embeds"].shape == (1, tokens, 3)
        assert group.conditioning["prompt_mask"].shape == (1, tokens) and bool(
            group.conditioning["prompt_mask"].all()
        )
