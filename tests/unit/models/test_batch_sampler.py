"""A batch of groups is the groups one by one: rows keep their own noise, window and
conditioning. Rows of one noise are computed once, and are what they would be.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys
from megadiff.models.batch_sampler import BatchSampler, initial_noise, split_groups
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


def draw(
    requests: list[RolloutRequest], *, computed: list[int] | None = None, shares: bool = True
) -> list[RolloutGroup]:
    """computed: gets the rows of each step's forward. shares: as a pipeline does, else all rows."""
    sampler = BatchSampler(
        requests, schedule=SCHEDULE, token_shape=SHAPE, device=torch.device("cpu")
    )
    widths_P = torch.tensor([len(request.prompt.text) for request in requests])
    mask_PT = torch.arange(int(widths_P.max())) < widths_P[:, None]
    sampler.conditioning = {
        "prompt_embeds": mask_PT[..., None] * torch.ones(3),
        "prompt_mask": mask_PT,
    }
    latents_NLC = sampler.initial_latents(initial_noise(sampler.requests, SHAPE))
    for _ in range(STEPS):
        rows_B, index_N = sampler.distinct_rows()
        if not shares:
            rows_B = index_N = torch.arange(len(latents_NLC))
        sigma_B = sampler.sigma_rows(len(rows_B))
        widths_B = sampler.per_row(widths_P)[rows_B]
        velocity_BLC = velocity(latents_NLC[rows_B], sigma_B, widths_B)
        latents_NLC = sampler.step(velocity_BLC[index_N], latents_NLC)
        if computed is not None:
            computed.append(len(rows_B))
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


@pytest.mark.parametrize(
    "changes",
    [
        {"sde_type": "flow_sde"},
        {"sde_type": "dance_sde"},
        {"sde_type": "flow_cps"},
        {"same_noise": True},
        {"ode_solver": "dpm2"},
        {"same_noise": True, "ode_solver": "dpm2"},
    ],
)
def test_a_batch_is_its_groups_one_by_one(changes: dict) -> None:
    sampling = replace(SAMPLING, **changes)
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
        "image_latents": frames,
        "prompt_mask": torch.ones(2, 1, dtype=torch.bool),
    }
    result = sampler.result(torch.zeros(2, 1, 1, 1, 3, dtype=torch.uint8))
    for place, group in enumerate(
        split_groups(sampler.requests, result, policy_version=0, replica="r")
    ):
        assert torch.equal(group.conditioning["image_latents"], frames[place : place + 1])


def test_conditioning_is_cut_to_each_groups_tokens() -> None:
    for group, tokens in zip(
        draw([make_request(4, 0), make_request(0, 0), make_request(2, 0)]), (5, 1, 3), strict=True
    ):
        assert group.conditioning["prompt_embeds"].shape == (1, tokens, 3)
        assert group.conditioning["prompt_mask"].shape == (1, tokens) and bool(
            group.conditioning["prompt_mask"].all()
        )


@pytest.mark.parametrize("size", [1, 2, STEPS - 1])  # the last: DanceGRPO's, noise at every step
@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "flow_cps"])
def test_a_group_of_one_noise_is_computed_once_until_its_window(sde_type: str, size: int) -> None:
    sampling = replace(SAMPLING, sde_type=sde_type, sde_window_size=size, same_noise=True)
    requests = [make_request(place, *range(place, 5), sampling=sampling) for place in range(5)]
    computed: list[int] = []
    groups = draw(requests, computed=computed)
    for group, unshared in zip(groups, draw(requests, shares=False), strict=True):
        assert_equal(group, unshared)

    num_rows = sum(len(group.sample_indices) for group in groups)
    assert sum(computed) == sum(group.num_forwards for group in groups)
    # all rows once every window has begun, and before that a row for each group that waits
    latest = max(group.window_start for group in groups)
    assert computed[0] == 5 and computed[latest + 1 :] == [num_rows] * (STEPS - latest - 1)
    saved = sum((len(group.sample_indices) - 1) * (group.window_start + 1) for group in groups)
    assert sum(computed) == num_rows * STEPS - saved

    for group in groups[:-1]:  # the last has one sample
        begins_GLC = group.latents_GSLC[:, 0]
        assert torch.equal(begins_GLC, begins_GLC[:1].expand_as(begins_GLC))
        assert not torch.equal(group.latents_GSLC[0, 1], group.latents_GSLC[1, 1])
        assert group.log_probs_GW.shape == (len(group.sample_indices), size)


def test_without_one_noise_every_row_is_computed() -> None:
    requests = [make_request(place, 0, 1, 2) for place in range(4)]
    computed: list[int] = []
    groups = draw(requests, computed=computed)
    assert computed == [12] * STEPS
    assert [group.num_forwards for group in groups] == [3 * STEPS] * 4


def test_one_noise_is_the_first_samples_own() -> None:
    """Groups of one prompt in a step have other samples, and so other noise."""
    sampling = replace(SAMPLING, same_noise=True)
    first, second = draw(
        [make_request(0, 0, 1, sampling=sampling), make_request(0, 2, 3, sampling=sampling)]
    )
    (alone,) = draw([make_request(0, 0, 1)])
    assert torch.equal(first.latents_GSLC[0], alone.latents_GSLC[0])
    assert not torch.equal(first.latents_GSLC[1], alone.latents_GSLC[1])
    assert not torch.equal(first.latents_GSLC[:, 0], second.latents_GSLC[:, 0])


def test_dpm2_leaves_all_that_is_recorded_of_a_window() -> None:
    requests = [make_request(place, 0, 1) for place in range(6)]
    second_order = replace(SAMPLING, ode_solver="dpm2")
    others = [replace(request, sampling=second_order) for request in requests]
    groups = draw(requests)
    assert min(group.window_start for group in groups) + 3 < STEPS  # or no step may look back
    for group, other in zip(groups, draw(others), strict=True):
        assert torch.equal(group.latents_GSLC, other.latents_GSLC)
        assert torch.equal(group.log_probs_GW, other.log_probs_GW)
        # the pixels are of the last latents: after Euler's first step there are two or more left
        if group.window_start + SAMPLING.sde_window_size + 2 < STEPS:
            assert not torch.equal(group.pixels_GFHWC, other.pixels_GFHWC)


def solve(schedule: Tensor, solver: str) -> tuple[Tensor, Tensor]:
    """Return latents before the schedule's first step and after its last, without a window."""
    sampling = replace(SAMPLING, sde_window_size=0, ode_solver=solver)
    sampler = BatchSampler(
        [make_request(0, 0, 1, sampling=sampling)],
        schedule=schedule,
        token_shape=SHAPE,
        device=torch.device("cpu"),
    )
    noise_NLC = sampler.initial_latents(initial_noise(sampler.requests, SHAPE))
    latents_NLC = noise_NLC
    for sigma in schedule[:-1]:
        latents_NLC = sampler.step(gaussian_velocity(latents_NLC, sigma), latents_NLC)
    return noise_NLC, latents_NLC


def gaussian_velocity(latents_NLC: Tensor, sigma: Tensor) -> Tensor:
    """The exact one of clean latents that are normal with mean 1 and std 0.5."""
    clean_std = 0.5
    variance = ((1 - sigma) * clean_std) ** 2 + sigma**2
    centred_NLC = latents_NLC - (1 - sigma)
    clean_NLC = 1 + (1 - sigma) * clean_std**2 / variance * centred_NLC
    noise_NLC = sigma / variance * centred_NLC
    return noise_NLC - clean_NLC


def test_dpm2_is_of_second_order() -> None:
    """On an ODE whose solution is known: a mean and a std that move with sigma."""

    def error(num_steps: int, solver: str) -> float:
        schedule = torch.linspace(0.9, 0.1, num_steps + 1)
        noise_NLC, ends_NLC = solve(schedule, solver)
        std, std_end = (torch.hypot((1 - s) * 0.5, s) for s in (schedule[0], schedule[-1]))
        exact_NLC = (noise_NLC - (1 - schedule[0])) / std * std_end + (1 - schedule[-1])
        return float((ends_NLC - exact_NLC).abs().max())

    first = [error(num_steps, "euler") for num_steps in (32, 64, 128)]
    second = [error(num_steps, "dpm2") for num_steps in (32, 64, 128)]
    for coarse, fine in pairwise(first):
        assert 1.9 < coarse / fine < 2.1
    for coarse, fine in pairwise(second):
        assert 3.8 < coarse / fine < 4.2
    assert second[0] < first[0] / 10


@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_dpm2_is_that_of_diffusers(num_steps: int) -> None:
    """From sigma 1 to 0, where the log SNR is infinite: the first two steps and the last one are
    Euler's.
    """
    stock = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    stock.set_timesteps(num_steps)
    schedule = torch.linspace(1, 0, num_steps + 1) ** 1.3
    stock.sigmas = schedule
    expected_NLC, ends_NLC = solve(schedule, "dpm2")
    for timestep, sigma in zip(stock.timesteps, schedule, strict=False):
        velocity_NLC = gaussian_velocity(expected_NLC, sigma)
        expected_NLC = stock.step(velocity_NLC, timestep, expected_NLC).prev_sample
    assert (ends_NLC - expected_NLC).abs().max() <= 2e-6
    is_eulers = torch.equal(ends_NLC, solve(schedule, "euler")[1])
    assert is_eulers == (num_steps <= 3)


def test_dpm2_adds_nothing_where_the_log_snr_is_infinite() -> None:
    sigmas = [torch.tensor(value) for value in (1.0, 0.8, 0.5, 0.0)]
    assert sde.dpm2_gain(*sigmas[:3]) == 0
    assert sde.dpm2_gain(*sigmas[1:]) == 0
    assert sde.dpm2_gain(sigmas[0], sigmas[2], sigmas[3]) == 0
    assert sde.dpm2_gain(*(torch.tensor(value) for value in (0.9, 0.8, 0.5))) > 0
