"""Draw prompt groups together and record each one's stochastic window, whatever the model.

Rules that the trainer's adapter follows too:
- latents live in `sampling.latents_dtype` (float32) between steps; step arithmetic is float32;
- the transformer's input is `latents` cast to the model's dtype;
- the transformer's timestep is made of `sigma`, from the float32 schedule: Qwen-Image's is sigma
  cast once to the model's dtype, Wan's is 1000·sigma and stays float32.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megadiff.diffusion.noise import (
    group_key,
    initial_keys,
    initial_latents_rows,
    sample_keys,
    sde_noise_rows,
    window_start,
)
from megadiff.diffusion.sde import SdeStep, dpm2_gain, ode_step, sde_step
from megadiff.models.conditioning import MASK, mask_of
from megadiff.types import DTYPES, RolloutGroup, RolloutRequest, Tensors

T = TypeVar("T", bound=Hashable)

CONDITIONING_PREFIX = "conditioning."
THOUGHT_PREFIX = "thought."  # then a group's index


class BatchSampler:
    """Draw the groups of one or more requests together, step by step, and record each row's window.

    A row of the batch is one sample; groups follow one another. Noise comes from a row's identity
    and is the same in any batch, order or replica. Each group has a window of its own, so that a
    step is stochastic for some rows and ODE for the others.
    Without a window (size 0, or sde_type "ode") only the clean latents are recorded, window_start
    is T and log_probs is [N, 0].
    Under sampling.same_noise a group is one state until its window: see distinct_rows().

    requests: of equal sampling; their seed, step, prompt and number of samples may differ.
    schedule: [T+1] float32. token_shape: (L, C) of one sample's packed latents.
    conditioning: name → [P, tokens, …], padded, a row for each group; the pipeline sets it.
    thoughts: what the model wrote about each group's prompt, where it did; set likewise.
    """

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        *,
        schedule: Tensor,
        token_shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.requests = requests
        self.token_shape = token_shape
        self.device = device
        self.sampling = requests[0].sampling
        self.schedule = schedule.to(device)
        self.num_steps = len(schedule) - 1
        self.storage_dtype = DTYPES[self.sampling.latents_dtype]
        self.window_size = self.sampling.sde_window_size
        if self.sampling.sde_type == "ode":
            self.window_size = 0

        groups = [_group_key(request) for request in requests]
        starts = [self.num_steps] * len(requests)  # without a window: after the last step
        if self.window_size:
            window_range = self.sampling.sde_window_range
            starts = [
                window_start(group, window_size=self.window_size, window_range=window_range)
                for group in groups
            ]
        # on the CPU: which rows a step records is known without waiting for the GPU
        self.window_starts_P = torch.tensor(starts)

        self.sample_keys: list[str] = []
        for group, request in zip(groups, requests, strict=True):
            self.sample_keys += sample_keys(group, request.sample_indices)
        self.step_index = 0
        self.conditioning: Tensors = {}
        self.thoughts: list[str] = []

        sizes_P = torch.tensor([len(request.sample_indices) for request in requests])
        self._group_N = torch.arange(len(requests)).repeat_interleave(sizes_P)
        self._is_first_N = self._group_N.diff(prepend=torch.tensor([-1])) > 0
        self._starts_N = self.per_row(self.window_starts_P)
        # The window's end, or 0 without one: from here on dpm2 has a history. Not before it, where
        # the parity gate replays Euler's steps.
        self._solved_from_N = (self._starts_N + self.window_size) % self.num_steps
        self._clean_NLC: Tensor | None = None  # clean latents as the step before predicted them
        num_rows = len(self.sample_keys)
        self._states_NSLC = torch.empty(
            (num_rows, self.window_size + 1, *token_shape), dtype=self.storage_dtype, device=device
        )
        self._log_probs_NW = torch.empty(
            (num_rows, self.window_size), dtype=torch.float64, device=device
        )

    def per_row(self, value_P: Tensor) -> Tensor:
        """Spread [P, …], a row for each group, to [N, …], a row for each sample."""
        return value_P[self._group_N.to(value_P.device)]

    def initial_latents(self, noise_NLC: Tensor) -> Tensor:
        """Return initial noise on the device in the storage dtype."""
        return noise_NLC.to(self.device, self.storage_dtype)

    def distinct_rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows whose velocity this step needs [B], and which of them each row takes [N].

        Samples of one noise are in one state up to their window's first step, that one included:
        its noise is the first to tell them apart. Until then a group's first row stands for all.
        """
        is_alike_N = self.sampling.same_noise & (self.step_index <= self._starts_N)
        is_needed_N = self._is_first_N | ~is_alike_N
        rows_B = is_needed_N.nonzero().squeeze(1)
        # a group's rows follow each other: one that is left out takes the last needed one before it
        index_N = is_needed_N.cumsum(0) - 1
        return (
            rows_B.to(self.device, non_blocking=True),
            index_N.to(self.device, non_blocking=True),
        )

    def sigma_rows(self, num_rows: int) -> Tensor:
        """Return the current sigma, [num_rows] float32."""
        return self.schedule[self.step_index].expand(num_rows)

    def step(self, velocity_NLC: Tensor, latents_NLC: Tensor) -> Tensor:
        """Return the next, less noisy latents in the storage dtype.

        The step is stochastic and recorded for rows whose window it is in, ODE for the others.
        """
        self._record_states(latents_NLC)
        index = self.step_index
        sigma = self.schedule[index]
        sigma_next = self.schedule[index + 1]

        # every row takes the ODE step; stochastic rows are overwritten
        next_NLC = ode_step(latents_NLC, velocity_NLC, sigma, sigma_next)
        if self.sampling.ode_solver == "dpm2":
            next_NLC += self._second_order(latents_NLC, velocity_NLC)
        next_NLC = next_NLC.to(self.storage_dtype)

        rows_B, offset_B = self._rows_in_window(self.window_size)
        if len(rows_B):
            keys = [self.sample_keys[row] for row in rows_B.tolist()]
            noise_BLC = sde_noise_rows(self.token_shape, keys, step_index=index)
            rows_B = rows_B.to(self.device, non_blocking=True)
            sde = SdeStep(
                self.sampling,
                self.schedule,
                sigma.expand(len(rows_B)),
                sigma_next.expand(len(rows_B)),
            )
            prev_sample_BLC, log_prob_B = sde_step(
                sde,
                latents_NLC[rows_B],
                velocity_NLC[rows_B],
                noise_BLC.to(self.device, non_blocking=True),
                storage_dtype=self.storage_dtype,
            )
            next_NLC[rows_B] = prev_sample_BLC
            offset_B = offset_B.to(self.device, non_blocking=True)
            self._log_probs_NW[rows_B, offset_B] = log_prob_B

        self.step_index += 1
        if self.step_index == self.num_steps:
            self._record_states(next_NLC)  # without a window it "starts" at T
        return next_NLC

    def result(self, pixels_NFHWC: Tensor) -> Tensors:
        """Return the batch's tensors on the CPU for `split_groups`. pixels_NFHWC: uint8."""
        tensors = {
            "latents": self._states_NSLC,
            "log_probs": self._log_probs_NW,
            "schedule": self.schedule,
            "window_starts": self.window_starts_P,
            "pixels": pixels_NFHWC,
            **{CONDITIONING_PREFIX + name: tensor for name, tensor in self.conditioning.items()},
        }
        for index, thought in enumerate(self.thoughts):
            # a result is tensors alone
            tensors[f"{THOUGHT_PREFIX}{index}"] = torch.tensor([*thought.encode()]).byte()
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _rows_in_window(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the rows that are less than `length` steps into their window, and how many."""
        offset_N = self.step_index - self._starts_N
        rows_B = ((offset_N >= 0) & (offset_N < length)).nonzero().squeeze(1)
        return rows_B, offset_N[rows_B]

    def _second_order(self, latents_NLC: Tensor, velocity_NLC: Tensor) -> Tensor:
        """Return what dpm2 adds to Euler's step: 0 for rows without a deterministic step before."""
        before_NLC = self._clean_NLC
        index = self.step_index
        self._clean_NLC = latents_NLC.float() - self.schedule[index] * velocity_NLC.float()
        if before_NLC is None:
            return torch.zeros_like(self._clean_NLC)
        looks_back_N = (index > self._solved_from_N).to(self.device, non_blocking=True)
        gain_N = looks_back_N * dpm2_gain(*self.schedule[index - 1 : index + 2])
        return gain_N[:, None, None] * (self._clean_NLC - before_NLC)

    def _record_states(self, latents_NLC: Tensor) -> None:
        rows_B, offset_B = self._rows_in_window(self.window_size + 1)
        if len(rows_B):
            rows_B = rows_B.to(self.device, non_blocking=True)
            offset_B = offset_B.to(self.device, non_blocking=True)
            self._states_NSLC[rows_B, offset_B] = latents_NLC[rows_B]


def initial_noise(requests: Sequence[RolloutRequest], token_shape: tuple[int, int]) -> Tensor:
    """Draw the noise at sigma 1, [N, L, C] float32 on the host; arguments as BatchSampler's."""
    keys: list[str] = []
    for request in requests:
        of_samples = sample_keys(_group_key(request), request.sample_indices)
        keys += initial_keys(of_samples, same_noise=request.sampling.same_noise)
    distinct_keys, index_N = distinct(keys)
    return initial_latents_rows(token_shape, distinct_keys)[index_N]


def _group_key(request: RolloutRequest) -> str:
    return group_key(seed=request.seed, step=request.step, prompt_id=request.prompt.id)


def distinct(values: Sequence[T]) -> tuple[list[T], Tensor]:
    """Return (each value once, the index in it of every values[i] as int64)."""
    indices = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return list(indices), torch.tensor([indices[value] for value in values])


def split_groups(
    requests: Sequence[RolloutRequest],
    result: Mapping[str, Tensor],
    *,
    policy_version: int,
    replica: str,
) -> list[RolloutGroup]:
    """Cut what BatchSampler.result returned into groups, in the order of the requests."""
    sizes = [len(request.sample_indices) for request in requests]
    window_starts = result["window_starts"].tolist()
    columns = (result[name].split(sizes) for name in ("latents", "log_probs", "pixels"))
    return [
        RolloutGroup(
            prompt=request.prompt,
            sampling=request.sampling,
            sample_indices=request.sample_indices,
            window_start=window_starts[index],
            latents_GSLC=latents_GSLC,
            log_probs_GW=log_probs_GW,
            pixels_GFHWC=pixels_GFHWC,
            schedule=result["schedule"],
            conditioning=_conditioning_row(result, index),
            policy_version=policy_version,
            replica=replica,
            thought=_thought(result, index),
        )
        for index, (request, latents_GSLC, log_probs_GW, pixels_GFHWC) in enumerate(
            zip(requests, *columns, strict=True)
        )
    ]


def _thought(result: Mapping[str, Tensor], index: int) -> str:
    written = result.get(f"{THOUGHT_PREFIX}{index}")
    return "" if written is None else bytes(written.tolist()).decode()


def _conditioning_row(result: Mapping[str, Tensor], index: int) -> Tensors:
    """Return one group's conditioning, each tensor cut to the tokens of its mask if it has one.

    So a group's record does not depend on the prompts that it was batched with.
    """
    row = {
        name.removeprefix(CONDITIONING_PREFIX): tensor[index : index + 1]
        for name, tensor in result.items()
        if name.startswith(CONDITIONING_PREFIX)
    }
    widths = {name: int(mask.sum()) for name, mask in row.items() if name.endswith(MASK)}
    # None leaves a tensor whole
    return {name: tensor[:, : widths.get(mask_of(name))] for name, tensor in row.items()}
