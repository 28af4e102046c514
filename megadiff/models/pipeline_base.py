"""What every model's rollout pipeline shares: drawing prompt groups with a recorded stochastic window.

A model's pipeline subclasses vllm-omni's, with RolloutPipelineMixin in front. Requests that carry RolloutRequests are
sampled here; all others (the OpenAI routes, vllm-omni's warm-up) take the stock path untouched. The replica runs one
request per engine step (max_num_seqs=1): the samples of its groups are the batch, and depend on nothing else that runs.

Rules that the trainer's adapter follows too:
- latents live in `sampling.latents_dtype` (float32) between steps; all step arithmetic is float32;
- the transformer's input is `latents` cast to the model's dtype;
- the transformer's timestep is made of `sigma`, from the float32 schedule: Qwen-Image's is sigma cast once to the model's
  dtype, Wan's is 1000·sigma and stays float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megadiff.diffusion.noise import initial_latents_rows, sde_noise_rows, window_start
from megadiff.diffusion.sde import ode_step, sde_step
from megadiff.models.pipeline_stop import Stopped, stop_path
from megadiff.types import DTYPES, RolloutGroup, RolloutRequest, Trajectory

T = TypeVar("T", str, bytes)

REQUESTS_KEY = "megadiff_requests"  # in a request's extra_args
RESULT_KEY = "megadiff_batch"  # in an output's metadata
CONDITIONING_PREFIX = "conditioning."
NO_LORA_REQUESTS = "this replica serves the trainer's policy, its LoRA included; send the request without a LoRA of its own"


class BatchSampler:
    """Draws the groups of one or more requests together, step by step, and keeps each row's window.

    requests: of equal sampling; their seed, step, prompt and number of samples may differ. schedule: [T+1] float32.
    token_shape: (L, C) of one sample's packed latents. A row of the batch is one sample, groups follow one another. Noise
    comes from a row's identity and is the same in any batch, order or replica. Each group has a window of its own, so that
    a step is stochastic for some rows and ODE for the others. Without a window (size 0, or sde_type "ode") only the final,
    clean latents are kept: window_start is then T, sigmas is [0] and log_probs is [N, 0].

    conditioning: name → [P, tokens, …], one row per group, padded; the pipeline sets it.
    """

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        *,
        schedule: Tensor,
        token_shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.requests, self.token_shape, self.device = requests, token_shape, device
        self.sampling = sampling = requests[0].sampling
        self.schedule = schedule.to(device)
        self.num_steps = len(schedule) - 1
        self.storage_dtype = DTYPES[sampling.latents_dtype]
        self.window_size = 0 if sampling.sde_type == "ode" else sampling.sde_window_size
        self.window_starts = [self._window_start(request) for request in requests]
        self.identities = [
            {
                "seed": request.seed,
                "step": request.step,
                "prompt_id": request.prompt.id,
                "sample_index": sample_index,
            }
            for request in requests
            for sample_index in request.sample_indices
        ]
        self.step_index = 0
        self.conditioning: dict[str, Tensor] = {}
        sizes_P = torch.tensor([len(request.sample_indices) for request in requests])
        self._group_N = torch.arange(len(requests)).repeat_interleave(sizes_P)
        self._starts_N = self.per_row(torch.tensor(self.window_starts))
        num_rows, shape = len(self.identities), token_shape
        self._states_NSLC = torch.empty(
            num_rows, self.window_size + 1, *shape, dtype=self.storage_dtype, device=device
        )
        self._log_probs_NW = torch.empty(
            num_rows, self.window_size, dtype=torch.float64, device=device
        )

    @property
    def timesteps(self) -> Tensor:
        """[T] float32, 1000·sigma."""
        return 1000 * self.schedule[:-1]

    def per_row(self, value_P: Tensor) -> Tensor:
        """[P, …], one row per group → [N, …], one per sample."""
        return value_P[self._group_N.to(value_P.device)]

    def initial_latents(self) -> Tensor:
        """[N, L, C] in the storage dtype, at sigma 1."""
        return initial_latents_rows(self.token_shape, self.identities).to(
            self.device, self.storage_dtype
        )

    def model_sigma(self, latents_NLC: Tensor, dtype: torch.dtype) -> Tensor:
        """[N] the current sigma as the transformer gets it: float32, cast once to its dtype."""
        return self.schedule[self.step_index].to(dtype).expand(latents_NLC.shape[0])

    def step(self, velocity_NLC: Tensor, latents_NLC: Tensor) -> Tensor:
        """The next, less noisy latents in the storage dtype. Stochastic and recorded for the rows whose window the step is
        in, ODE for the others."""
        self._keep_window_start(latents_NLC)
        sigma, sigma_next = self.schedule[self.step_index], self.schedule[self.step_index + 1]
        next_NLC = ode_step(latents_NLC, velocity_NLC, sigma, sigma_next).to(self.storage_dtype)
        offset_N = self.step_index - self._starts_N
        rows_B = ((offset_N >= 0) & (offset_N < self.window_size)).nonzero().squeeze(1)
        if len(rows_B):
            self._stochastic_step(rows_B, offset_N[rows_B], velocity_NLC, latents_NLC, next_NLC)
        self.step_index += 1
        if self.step_index == self.num_steps:
            self._keep_window_start(next_NLC)  # of rows without a window
        return next_NLC

    def result(self, pixels_NFHWC: Tensor) -> dict[str, Tensor]:
        """The batch's tensors on the CPU, in the layout that `assemble_groups` reads. pixels_NFHWC: uint8."""
        tensors = {
            "latents": self._states_NSLC,
            "log_probs": self._log_probs_NW,
            "schedule": self.schedule,
            "window_starts": torch.tensor(self.window_starts),
            "pixels": pixels_NFHWC,
            **{CONDITIONING_PREFIX + name: tensor for name, tensor in self.conditioning.items()},
        }
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _keep_window_start(self, latents_NLC: Tensor) -> None:
        rows_B = (
            (self._starts_N == self.step_index)
            .nonzero()
            .squeeze(1)
            .to(self.device, non_blocking=True)
        )
        if len(rows_B):
            self._states_NSLC[rows_B, 0] = latents_NLC[rows_B]

    def _stochastic_step(
        self,
        rows_B: Tensor,
        offset_B: Tensor,
        velocity_NLC: Tensor,
        latents_NLC: Tensor,
        next_NLC: Tensor,
    ) -> None:
        """Overwrites rows_B of next_NLC and records them; offset_B: steps since each row's window began."""
        index, num_rows = self.step_index, len(rows_B)
        identities = [self.identities[row] for row in rows_B.tolist()]
        noise_BLC = sde_noise_rows(self.token_shape, identities, step_index=index).to(
            self.device, non_blocking=True
        )
        rows_B, offset_B = (
            value.to(self.device, non_blocking=True) for value in (rows_B, offset_B)
        )
        prev_sample_BLC, log_prob_B, _ = sde_step(
            self.sampling.sde_type,
            latents_NLC[rows_B],
            velocity_NLC[rows_B],
            noise_BLC,
            self.schedule[index].expand(num_rows),
            self.schedule[index + 1].expand(num_rows),
            schedule=self.schedule,
            eta=self.sampling.eta,
            storage_dtype=self.storage_dtype,
        )
        next_NLC[rows_B] = prev_sample_BLC
        self._states_NSLC[rows_B, offset_B + 1] = prev_sample_BLC
        self._log_probs_NW[rows_B, offset_B] = log_prob_B

    def _window_start(self, request: RolloutRequest) -> int:
        if not self.window_size:
            return self.num_steps
        return window_start(
            seed=request.seed,
            step=request.step,
            prompt_id=request.prompt.id,
            window_size=self.window_size,
            window_range=self.sampling.sde_window_range,
        )


class RolloutPipelineMixin:
    """In front of a vllm-omni pipeline class. The model's subclass implements `new_sampler` and `to_pixels`, and hands
    the sampler's latents, timesteps and conditioning to the stock denoising loop."""

    policy_components = ("transformer",)  # whose weights the trainer pushes
    _sampler: BatchSampler | None = None
    stop_path: str | None = None  # of the request that runs: see pipeline_stop

    def new_sampler(self, requests: Sequence[RolloutRequest]) -> BatchSampler:
        """The sampler of requests of equal sampling, with this model's schedule and latent shape."""
        raise NotImplementedError

    def to_pixels(self, images: Tensor) -> Tensor:
        """Decoder output → [N, F, H, W, 3] uint8."""
        raise NotImplementedError

    def draw(self, req: Any) -> Any:
        """vllm-omni's output of our requests, with what to_pixels takes as its `output`. By the stock forward, unless the
        model's subclass draws by itself."""
        (output,) = super().forward(req)
        return output

    def forward(self, req: Any) -> Any:
        requests = rollout_requests(req)
        if any(params.lora_request is not None for params in req.sampling_params_list):
            return [_refusal(ValueError(NO_LORA_REQUESTS)) for _ in req.sampling_params_list]
        self.stop_path = stop_path(req)
        try:
            return self._draw_groups(req, requests) if requests else super().forward(req)
        except Stopped as error:
            return [_refusal(error)]
        finally:
            self.stop_path = None

    def _draw_groups(self, req: Any, requests: Sequence[RolloutRequest]) -> list[Any]:
        try:
            self._sampler = self.new_sampler(requests)
            output = self.draw(req)
            result = self._sampler.result(self.to_pixels(output.output))
        except (
            ValueError
        ) as error:  # the request's fault, e.g. more tokens than the text encoder takes
            return [_refusal(error)]
        finally:
            self._sampler = None
        # the pixels travel in the metadata: a payload is made into images or videos
        envelope = {"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {RESULT_KEY: result}}
        return [dataclasses.replace(output, output=envelope)]

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        if self._sampler is not None:
            latents_NLC = kwargs["hidden_states"]
            dtype = next(self.transformer.parameters()).dtype
            kwargs["hidden_states"] = latents_NLC.to(dtype)
            kwargs["timestep"] = self._sampler.model_sigma(latents_NLC, dtype)
        return super().predict_noise(*args, **kwargs)

    def scheduler_step(
        self, noise_pred: Any, t: Any, latents: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._sampler is not None:
            return self._sampler.step(noise_pred, latents)
        return super().scheduler_step(noise_pred, t, latents, *args, **kwargs)


def distinct(values: Sequence[T]) -> tuple[list[T], Tensor]:
    """(each value once, place of values[i] in it as int64)."""
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return list(places), torch.tensor([places[value] for value in values])


def _refusal(error: ValueError) -> Any:
    """An output that vllm-omni's front end turns into a client error: a 4xx, and the replica lives on."""
    from vllm_omni.diffusion.data import DiffusionOutput

    return DiffusionOutput(error=str(error), error_status_code=400, error_type="BadRequestError")


def rollout_requests(batch: Any) -> tuple[RolloutRequest, ...]:
    """The RolloutRequests that a vllm-omni request batch carries, none for a plain request.

    Only the replica's own code can put the records there: OpenAI clients send JSON, which never makes a RolloutRequest.
    """
    found = [params.extra_args.get(REQUESTS_KEY) for params in batch.sampling_params_list]
    ours = [
        requests
        for requests in found
        if isinstance(requests, tuple) and isinstance(requests[0], RolloutRequest)
    ]
    if ours and len(found) > 1:
        raise ValueError(
            f"{len(found)} requests in one engine step; a replica runs with max_num_seqs=1"
        )
    return ours[0] if ours else ()


def assemble_groups(
    requests: Sequence[RolloutRequest],
    result: Mapping[str, Tensor],
    *,
    policy_version: int,
    replica: str,
) -> list[RolloutGroup]:
    """The group records out of what BatchSampler.result returned, in the order of the requests."""
    schedule, groups, first = result["schedule"], [], 0
    for place, request in enumerate(requests):
        start, num_states = int(result["window_starts"][place]), result["latents"].shape[1]
        sigmas = schedule[start : start + num_states]
        timesteps = 1000 * sigmas[:-1]
        rows = slice(first, first + len(request.sample_indices))
        columns = (result[name][rows].unbind() for name in ("latents", "log_probs", "pixels"))
        trajectories = tuple(
            Trajectory(
                latents_SLC=latents_SLC,
                sigmas=sigmas,
                timesteps=timesteps,
                log_probs=log_probs,
                window_start=start,
                pixels=pixels,
                prompt_id=request.prompt.id,
                sample_index=sample_index,
                policy_version=policy_version,
            )
            for sample_index, latents_SLC, log_probs, pixels in zip(
                request.sample_indices, *columns, strict=True
            )
        )
        group = RolloutGroup(
            prompt=request.prompt,
            sampling=request.sampling,
            schedule=schedule,
            conditioning=_conditioning_row(result, place),
            trajectories=trajectories,
            policy_version=policy_version,
            replica=replica,
        )
        groups.append(group)
        first = rows.stop
    return groups


def _conditioning_row(result: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    """One group's conditioning, cut to its own tokens where there is a mask of them: what it is does not depend on the
    prompts it was batched with."""
    row = {
        name.removeprefix(CONDITIONING_PREFIX): tensor[place : place + 1]
        for name, tensor in result.items()
        if name.startswith(CONDITIONING_PREFIX)
    }
    widths = {
        name.removesuffix("_mask"): int(row[name].sum()) for name in row if name.endswith("_mask")
    }
    return {
        name: tensor[:, : widths.get(name.rpartition("_")[0])] for name, tensor in row.items()
    }  # None: whole
