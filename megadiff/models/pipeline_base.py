"""Share what all rollout pipelines need: draw prompt groups and record a stochastic window.

A model's pipeline subclasses vllm-omni's, with RolloutPipelineMixin in front. Requests that carry
RolloutRequests are sampled here. All others (the OpenAI routes, vllm-omni's warm-up) take the stock
path untouched. The replica runs one request per engine step (max_num_seqs=1): the samples of its
groups are the batch, and depend on nothing else that runs.

Rules that the trainer's adapter follows too:
- latents live in `sampling.latents_dtype` (float32) between steps; step arithmetic is float32;
- the transformer's input is `latents` cast to the model's dtype;
- the transformer's timestep is made of `sigma`, from the float32 schedule: Qwen-Image's is sigma
  cast once to the model's dtype, Wan's is 1000·sigma and stays float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megadiff.diffusion.noise import (
    group_key,
    initial_latents_rows,
    sample_keys,
    sde_noise_rows,
    window_start,
)
from megadiff.diffusion.sde import SdeStep, ode_step, sde_step
from megadiff.models.pipeline_stop import Stopped, stop_path
from megadiff.models.registry import build_adapter
from megadiff.models.served_names import ServedNames
from megadiff.types import DTYPES, RolloutGroup, RolloutRequest, Tensors

T = TypeVar("T", str, bytes)

REQUESTS_KEY = "megadiff_requests"  # in a request's extra_args
RESULT_KEY = "megadiff_batch"  # in an output's metadata
CONDITIONING_PREFIX = "conditioning."
NO_LORA_REQUESTS = (
    "this replica serves the trainer's policy, its LoRA included; send the request without a LoRA "
    "of its own"
)


class BatchSampler:
    """Draw the groups of one or more requests together, step by step, and record each row's window.

    A row of the batch is one sample; groups follow one another. Noise comes from a row's identity
    and is the same in any batch, order or replica. Each group has a window of its own, so that a
    step is stochastic for some rows and ODE for the others.
    Without a window (size 0, or sde_type "ode") only the clean latents are recorded, window_start
    is T and log_probs is [N, 0].

    requests: of equal sampling; their seed, step, prompt and number of samples may differ.
    schedule: [T+1] float32. token_shape: (L, C) of one sample's packed latents.
    conditioning: name → [P, tokens, …], padded, a row for each group; the pipeline sets it.
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

        groups = [
            group_key(seed=request.seed, step=request.step, prompt_id=request.prompt.id)
            for request in requests
        ]
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

        sizes_P = torch.tensor([len(request.sample_indices) for request in requests])
        self._group_N = torch.arange(len(requests)).repeat_interleave(sizes_P)
        self._starts_N = self.per_row(self.window_starts_P)
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

    def initial_latents(self) -> Tensor:
        """Return the noise at sigma 1, [N, L, C] in the storage dtype."""
        latents_NLC = initial_latents_rows(self.token_shape, self.sample_keys)
        return latents_NLC.to(self.device, self.storage_dtype)

    def model_sigma(self, latents_NLC: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the current sigma as the transformer takes it, [N] in its dtype."""
        return self.schedule[self.step_index].to(dtype).expand(latents_NLC.shape[0])

    def step(self, velocity_NLC: Tensor, latents_NLC: Tensor) -> Tensor:
        """Return the next, less noisy latents in the storage dtype.

        The step is stochastic and recorded for rows whose window it is in, ODE for the others.
        """
        self._record_states(latents_NLC)
        index = self.step_index
        sigma = self.schedule[index]
        sigma_next = self.schedule[index + 1]

        # every row takes the ODE step; stochastic rows are overwritten
        next_NLC = ode_step(latents_NLC, velocity_NLC, sigma, sigma_next).to(self.storage_dtype)

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
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _rows_in_window(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the rows that are less than `length` steps into their window, and how many."""
        offset_N = self.step_index - self._starts_N
        rows_B = ((offset_N >= 0) & (offset_N < length)).nonzero().squeeze(1)
        return rows_B, offset_N[rows_B]

    def _record_states(self, latents_NLC: Tensor) -> None:
        rows_B, offset_B = self._rows_in_window(self.window_size + 1)
        if len(rows_B):
            rows_B = rows_B.to(self.device, non_blocking=True)
            offset_B = offset_B.to(self.device, non_blocking=True)
            self._states_NSLC[rows_B, offset_B] = latents_NLC[rows_B]


class RolloutPipelineMixin:
    """Stand in front of a vllm-omni pipeline class and draw our requests through it.

    The model's subclass implements `to_pixels`, and hands the sampler's latents, timesteps and
    conditioning to the stock denoising loop. The adapter is the trainer's: one schedule, one latent
    shape, one limit of tokens for both sides.
    """

    transformer: Any  # this and the tokenizer are the vllm-omni pipeline's
    tokenizer: Any
    device: torch.device
    served_names: ServedNames
    _sampler: BatchSampler | None = None
    stop_path: str | None = None  # of the request that runs: see pipeline_stop

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        # what comes next in the order of classes is vllm-omni's pipeline
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]  # its own
        self.adapter = build_adapter(Path(od_config.model))
        self.policy_components = self.adapter.components  # whose weights the trainer pushes
        self.set_progress_bar_config(disable=True)  # type: ignore[attr-defined]  # likewise

    def to_pixels(self, images: Tensor) -> Tensor:
        """Turn the decoder's output into [N, F, H, W, 3] uint8."""
        raise NotImplementedError

    def draw(self, req: Any) -> Any:
        """Return vllm-omni's output for our requests, whose `output` to_pixels takes.

        It is the stock forward's, unless the model's subclass draws by itself.
        """
        (output,) = super().forward(req)  # type: ignore[misc]  # vllm-omni's
        return output

    def forward(self, req: Any) -> Any:
        requests = rollout_requests(req)
        if any(params.lora_request is not None for params in req.sampling_params_list):
            return [_refusal(NO_LORA_REQUESTS) for _ in req.sampling_params_list]
        self.stop_path = stop_path(req)
        # a ValueError is our request's fault, e.g. more tokens than the text encoder takes
        refused = ValueError if requests else Stopped
        try:
            if requests:
                return [self._draw_groups(req, requests)]
            return super().forward(req)  # type: ignore[misc]  # vllm-omni's
        except refused as error:
            return [_refusal(str(error))]
        finally:
            self.stop_path = None
            self._sampler = None

    def _draw_groups(self, req: Any, requests: Sequence[RolloutRequest]) -> Any:
        self._check_lengths(requests)
        self._sampler = BatchSampler(
            requests,
            schedule=self.adapter.schedule(requests[0].sampling),
            token_shape=self.adapter.latents_shape(requests[0].sampling),
            device=self.device,
        )

        output = self.draw(req)
        result = self._sampler.result(self.to_pixels(output.output))
        # vllm-omni makes images or videos of a payload, so our tensors travel in the metadata
        envelope = {"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {RESULT_KEY: result}}
        return dataclasses.replace(output, output=envelope)

    def texts_of_sides(self, requests: Sequence[RolloutRequest]) -> dict[str, list[str]]:
        """Return the groups' prompts under "", under guidance also "negative_" → negative ones."""
        sides = {"": [request.prompt.text for request in requests]}
        if self.adapter.is_guided(requests[0].sampling):
            sides["negative_"] = [request.prompt.negative_text for request in requests]
        return sides

    def _check_lengths(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise ValueError that names the request whose text the stock pipeline would cut off."""
        limit = self.adapter.max_prompt_tokens
        for side, texts in self.texts_of_sides(requests).items():
            for index, text in enumerate(texts):
                count = self.adapter.num_prompt_tokens(text, self.tokenizer)
                if count > limit:
                    raise ValueError(
                        f"requests[{index}] (prompt {requests[index].prompt.id}): the "
                        f"{side.replace('_', ' ')}prompt is too long, {count} tokens, the model "
                        f"takes {limit}; shorten {text[:60]!r}…"
                    )

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        if self._sampler is not None:
            latents_NLC = kwargs["hidden_states"]
            dtype = next(self.transformer.parameters()).dtype
            # latents are float32 between steps; the model computes in its own dtype
            kwargs["hidden_states"] = latents_NLC.to(dtype)
            kwargs["timestep"] = self._sampler.model_sigma(latents_NLC, dtype)
        return super().predict_noise(*args, **kwargs)  # type: ignore[misc]  # vllm-omni's

    def scheduler_step(
        self, noise_pred: Any, t: Any, latents: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._sampler is not None:
            return self._sampler.step(noise_pred, latents)
        stock = super().scheduler_step  # type: ignore[misc]  # vllm-omni's
        return stock(noise_pred, t, latents, *args, **kwargs)


def to_uint8(values: Tensor) -> Tensor:
    """Turn a decoder's values in [-1, 1] into uint8, rounded as the stock images are."""
    scaled = (values.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8)


def distinct(values: Sequence[T]) -> tuple[list[T], Tensor]:
    """Return (each value once, the index in it of every values[i] as int64)."""
    indices = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return list(indices), torch.tensor([indices[value] for value in values])


def _refusal(message: str) -> Any:
    """Return an output that vllm-omni answers as a client error, so that the replica lives on."""
    from vllm_omni.diffusion.data import DiffusionOutput

    return DiffusionOutput(error=message, error_status_code=400, error_type="BadRequestError")


def rollout_requests(batch: Any) -> tuple[RolloutRequest, ...]:
    """Return the RolloutRequests of a vllm-omni request batch, none for a plain request."""
    values = [params.extra_args.get(REQUESTS_KEY) for params in batch.sampling_params_list]
    # OpenAI clients can set the key too, but never to a RolloutRequest: they send JSON
    ours = [
        requests
        for requests in values
        if isinstance(requests, tuple) and isinstance(requests[0], RolloutRequest)
    ]

    if ours and len(values) > 1:
        raise ValueError(
            f"{len(values)} requests in one engine step; a replica runs with max_num_seqs=1"
        )
    return ours[0] if ours else ()


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
        )
        for index, (request, latents_GSLC, log_probs_GW, pixels_GFHWC) in enumerate(
            zip(requests, *columns, strict=True)
        )
    ]


def _conditioning_row(result: Mapping[str, Tensor], index: int) -> Tensors:
    """Return one group's conditioning, each tensor cut to the tokens of its mask if it has one.

    So a group's record does not depend on the prompts that it was batched with.
    """
    row = {
        name.removeprefix(CONDITIONING_PREFIX): tensor[index : index + 1]
        for name, tensor in result.items()
        if name.startswith(CONDITIONING_PREFIX)
    }
    widths = {
        name.removesuffix("_mask"): int(row[name].sum()) for name in row if name.endswith("_mask")
    }
    # `prompt_embeds` and `prompt_mask` are as wide as `prompt`; None leaves a tensor whole
    return {name: tensor[:, : widths.get(name.rpartition("_")[0])] for name, tensor in row.items()}
