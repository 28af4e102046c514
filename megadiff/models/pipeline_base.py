"""Share what all rollout pipelines need: our requests take their way through vllm-omni.

A model's pipeline subclasses vllm-omni's, with RolloutPipelineMixin in front. Requests that carry
RolloutRequests are sampled here. All others (the OpenAI routes, vllm-omni's warm-up) take the stock
path untouched. The replica runs one request per engine step (max_num_seqs=1): the samples of its
groups are the batch, and depend on nothing else that runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.models.batch_sampler import BatchSampler
from megadiff.models.pipeline_stop import Stopped, stop_path
from megadiff.models.registry import build_adapter
from megadiff.models.served_names import ServedNames
from megadiff.types import RolloutRequest

REQUESTS_KEY = "megadiff_requests"  # in a request's extra_args
RESULT_KEY = "megadiff_batch"  # in an output's metadata
NO_LORA_REQUESTS = (
    "this replica serves the trainer's policy, its LoRA included; send the request without a LoRA "
    "of its own"
)


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
        arguments = od_config.custom_pipeline_args or {}
        self.adapter = build_adapter(Path(od_config.model), arguments.get("family", ""))
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
        stock = super().predict_noise  # type: ignore[misc]  # vllm-omni's
        if self._sampler is None:
            return stock(*args, **kwargs)

        # the stock loop has all rows; the transformer computes those that differ
        rows_B, index_N = self._sampler.distinct_rows()
        kwargs = {name: _rows_of(value, rows_B) for name, value in kwargs.items()}
        dtype = next(self.transformer.parameters()).dtype
        # latents are float32 between steps; the model computes in its own dtype
        kwargs["hidden_states"] = kwargs["hidden_states"].to(dtype)
        kwargs["timestep"] = self._sampler.model_sigma(len(rows_B), dtype)
        return stock(*args, **kwargs)[index_N]

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


def _rows_of(value: Any, rows_B: Tensor) -> Any:
    """Return the rows of a transformer's argument; what has no rows comes back as it is."""
    if isinstance(value, Tensor):
        return value[rows_B]
    # image shapes and text lengths, which are equal for all rows of a batch
    return value[: len(rows_B)] if isinstance(value, list) else value


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
