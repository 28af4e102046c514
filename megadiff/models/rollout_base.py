"""What every model's rollout pipeline shares: drawing one prompt group with a recorded stochastic window.

A model's pipeline subclasses vllm-omni's, with RolloutPipelineMixin in front. Requests that carry a RolloutRequest are
sampled here; all others (the OpenAI routes, vllm-omni's warm-up) take the stock path untouched. The replica runs one
request per engine step (max_num_seqs=1): the samples of a group are the batch, and depend on no other group.

Rules that the trainer's adapter follows too:
- latents live in `sampling.latents_dtype` (float32) between steps; all step arithmetic is float32;
- the transformer's input is `latents` cast to the model's dtype;
- the transformer's timestep is `sigma`, from the float32 schedule, cast once to the model's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megadiff.diffusion.noise import initial_latents, sde_noise, window_start
from megadiff.diffusion.sde import ode_step, sde_step
from megadiff.types import DTYPES, RolloutGroup, RolloutRequest, Trajectory

REQUEST_KEY = "megadiff_request"  # in a request's extra_args
RESULT_KEY = "megadiff_group"  # in an output's metadata
CONDITIONING_PREFIX = "conditioning."


class GroupSampler:
    """Draws the group of one request, step by step, and keeps the window.

    schedule: [T+1] float32. token_shape: (L, C) of one sample's packed latents. Noise comes from the request's identity
    and is the same in any batch, order or replica. Without a window (size 0, or sde_type "ode") only the final, clean
    latents are kept: window_start is then T, sigmas is [0] and log_probs is [N, 0].
    """

    def __init__(
        self, request: RolloutRequest, *, schedule: Tensor, token_shape: tuple[int, int], device: torch.device
    ) -> None:
        sampling = request.sampling
        self.request, self.token_shape, self.device = request, token_shape, device
        self.schedule = schedule.to(device)
        self.num_steps = len(schedule) - 1
        self.storage_dtype = DTYPES[sampling.latents_dtype]
        self.window_size = 0 if sampling.sde_type == "ode" else sampling.sde_window_size
        self.window_start = self.num_steps
        if self.window_size:
            self.window_start = window_start(
                seed=request.seed,
                step=request.step,
                prompt_id=request.prompt.id,
                window_size=self.window_size,
                window_range=sampling.sde_window_range,
            )
        self.step_index = 0
        self.conditioning: dict[str, Tensor] = {}
        self._window_latents: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    @property
    def timesteps(self) -> Tensor:
        """[T] float32, 1000·sigma."""
        return 1000 * self.schedule[:-1]

    def initial_latents(self) -> Tensor:
        """[N, L, C] in the storage dtype, at sigma 1."""
        return torch.stack(
            [initial_latents(self.token_shape, **self._identity(index)) for index in self.request.sample_indices]
        ).to(self.device, self.storage_dtype)

    def model_sigma(self, latents_NLC: Tensor, dtype: torch.dtype) -> Tensor:
        """[N] the current sigma as the transformer gets it: float32, cast once to its dtype."""
        return self.schedule[self.step_index].to(dtype).expand(latents_NLC.shape[0])

    def step(self, velocity_NLC: Tensor, latents_NLC: Tensor) -> Tensor:
        """The next, less noisy latents in the storage dtype. Stochastic and recorded within the window, ODE outside."""
        index = self.step_index
        if index == self.window_start:
            self._window_latents.append(latents_NLC)
        if self.window_start <= index < self.window_start + self.window_size:
            latents_NLC = self._stochastic_step(velocity_NLC, latents_NLC)
        else:
            sigma, sigma_next = self.schedule[index], self.schedule[index + 1]
            latents_NLC = ode_step(latents_NLC, velocity_NLC, sigma, sigma_next).to(self.storage_dtype)
        self.step_index += 1
        if self.step_index == self.num_steps == self.window_start:
            self._window_latents.append(latents_NLC)
        return latents_NLC

    def result(self, pixels_NFHWC: Tensor) -> dict[str, Any]:
        """The group's tensors on the CPU, in the layout that `assemble_group` reads. pixels_NFHWC: uint8."""
        num_samples = len(self.request.sample_indices)
        log_probs_NW = torch.stack(self._log_probs, dim=1) if self._log_probs else torch.zeros(num_samples, 0).double()
        tensors = {
            "latents": torch.stack(self._window_latents, dim=1),
            "log_probs": log_probs_NW,
            "schedule": self.schedule,
            "pixels": pixels_NFHWC,
            **{CONDITIONING_PREFIX + name: tensor for name, tensor in self.conditioning.items()},
        }
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return {**host, "window_start": self.window_start}

    def _stochastic_step(self, velocity_NLC: Tensor, latents_NLC: Tensor) -> Tensor:
        sampling, index, num_samples = self.request.sampling, self.step_index, latents_NLC.shape[0]
        noise_NLC = torch.stack(
            [
                sde_noise(self.token_shape, step_index=index, **self._identity(sample_index))
                for sample_index in self.request.sample_indices
            ]
        )
        prev_sample_NLC, log_prob_N, _ = sde_step(
            sampling.sde_type,
            latents_NLC,
            velocity_NLC,
            noise_NLC.to(self.device),
            self.schedule[index].expand(num_samples),
            self.schedule[index + 1].expand(num_samples),
            schedule=self.schedule,
            eta=sampling.eta,
            storage_dtype=self.storage_dtype,
        )
        self._window_latents.append(prev_sample_NLC)
        self._log_probs.append(log_prob_N)
        return prev_sample_NLC

    def _identity(self, sample_index: int) -> dict[str, Any]:
        request = self.request
        return {
            "seed": request.seed,
            "step": request.step,
            "prompt_id": request.prompt.id,
            "sample_index": sample_index,
        }


class RolloutPipelineMixin:
    """In front of a vllm-omni pipeline class. The model's subclass implements `new_sampler` and `to_pixels`, and hands
    the sampler's latents, timesteps and conditioning to the stock denoising loop."""

    policy_components = ("transformer",)  # whose weights the trainer pushes
    _sampler: GroupSampler | None = None

    def new_sampler(self, request: RolloutRequest) -> GroupSampler:
        """The sampler of one request, with this model's schedule and latent shape."""
        raise NotImplementedError

    def to_pixels(self, images: Tensor) -> Tensor:
        """Decoder output → [N, F, H, W, 3] uint8."""
        raise NotImplementedError

    def forward(self, req: Any) -> Any:
        request = rollout_request(req)
        if request is None:
            return super().forward(req)
        try:
            self._sampler = self.new_sampler(request)
            (output,) = super().forward(req)
            result = self._sampler.result(self.to_pixels(output.output))
        except ValueError as error:  # the request's fault, e.g. more tokens than the text encoder takes
            return [_refusal(error)]
        finally:
            self._sampler = None
        # vllm-omni turns the payload into PIL images, which would only cost time: the pixels travel in the metadata
        envelope = {"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {RESULT_KEY: result}}
        return [dataclasses.replace(output, output=envelope)]

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        if self._sampler is not None:
            latents_NLC = kwargs["hidden_states"]
            dtype = next(self.transformer.parameters()).dtype
            kwargs["hidden_states"] = latents_NLC.to(dtype)
            kwargs["timestep"] = self._sampler.model_sigma(latents_NLC, dtype)
        return super().predict_noise(*args, **kwargs)

    def scheduler_step(self, noise_pred: Any, t: Any, latents: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sampler is not None:
            return self._sampler.step(noise_pred, latents)
        return super().scheduler_step(noise_pred, t, latents, *args, **kwargs)


def _refusal(error: ValueError) -> Any:
    """An output that vllm-omni's front end turns into a client error: a 4xx, and the replica lives on."""
    from vllm_omni.diffusion.data import DiffusionOutput

    return DiffusionOutput(error=str(error), error_status_code=400, error_type="BadRequestError")


def rollout_request(batch: Any) -> RolloutRequest | None:
    """The RolloutRequest that a vllm-omni request batch carries, None for a plain request.

    Only the replica's own code can put the record there: OpenAI clients send JSON, which never makes a RolloutRequest.
    """
    found = [params.extra_args.get(REQUEST_KEY) for params in batch.sampling_params_list]
    if len(found) > 1 and any(isinstance(request, RolloutRequest) for request in found):
        raise ValueError(f"{len(found)} requests in one engine step; a replica runs with max_num_seqs=1")
    return found[0] if isinstance(found[0], RolloutRequest) else None


def assemble_group(
    request: RolloutRequest, result: Mapping[str, Any], *, policy_version: int, replica: str
) -> RolloutGroup:
    """The group record out of what GroupSampler.result returned."""
    schedule, start = result["schedule"], int(result["window_start"])
    num_states = result["latents"].shape[1]
    sigmas = schedule[start : start + num_states]
    trajectories = tuple(
        Trajectory(
            latents_SLC=result["latents"][row],
            sigmas=sigmas,
            timesteps=1000 * sigmas[: num_states - 1],
            log_probs=result["log_probs"][row],
            window_start=start,
            pixels=result["pixels"][row],
            prompt_id=request.prompt.id,
            sample_index=sample_index,
            policy_version=policy_version,
        )
        for row, sample_index in enumerate(request.sample_indices)
    )
    return RolloutGroup(
        prompt=request.prompt,
        sampling=request.sampling,
        schedule=schedule,
        conditioning={
            name.removeprefix(CONDITIONING_PREFIX): tensor
            for name, tensor in result.items()
            if name.startswith(CONDITIONING_PREFIX)
        },
        trajectories=trajectories,
        policy_version=policy_version,
        replica=replica,
    )
