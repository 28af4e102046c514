"""Share what all rollout pipelines need: our requests take their way through vllm-omni.

A model's pipeline subclasses vllm-omni's, with RolloutPipelineMixin in front. Requests that carry
RolloutRequests are sampled here. All others, those of the OpenAI routes, take vllm-omni's own path.
The replica runs one request per engine step (max_num_seqs=1): the samples of its groups are the
batch, and depend on nothing else that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.models.adapter import Images, ModelAdapter
from megadiff.models.batch_sampler import BatchSampler, distinct, initial_noise
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.empty_weights import empty_parameters, skip_sources, withheld_parameters
from megadiff.models.pipeline_stop import Stopped, stop_path
from megadiff.models.registry import build_adapter
from megadiff.models.served_names import ServedNames
from megadiff.models.vae import encode_images, pixels_of
from megadiff.types import RolloutRequest, Tensors

REQUESTS_KEY = "megadiff_requests"  # in a request's extra_args
# with and without text masks, LoRA, guidance, dual attention, each for four sizes or for any
COMPILED_VARIANTS = 64
RESULT_KEY = "megadiff_batch"  # in an output's metadata
GPU_BYTES = "gpu_bytes"  # in a result: those that the allocator gave out, those that it keeps
WAS_PREPARED = "was_prepared"  # in a result: whether its inputs were there before its turn came
NO_LORA_REQUESTS = (
    "this replica serves the trainer's policy, its LoRA included; send the request without a LoRA "
    "of its own"
)


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """Hold what a call needs before its first step, of all its groups.

    conditioning: [P, …] by name, on the device. noise_NLC: float32, on the host.
    """

    conditioning: Tensors
    noise_NLC: Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerCall:
    """Call a served transformer as the adapter calls the trainer's. dtype: it computes in."""

    forward: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, **kwargs: Any) -> Any:
        return self.forward(**kwargs)


class RolloutPipelineMixin:
    """Stand in front of a vllm-omni pipeline class and draw our requests through it.

    A step's velocity is the trainer's: the adapter's own function, of vllm-omni's transformer. The
    stock pipeline loads the networks and answers plain requests. The model's subclass gives
    `served_names`, and transformer_call() where vllm-omni's takes other arguments.

    cast_networks: those that vllm-omni leaves in their files' dtype.
    maps_base: whether the policy's weights are a trainer's memory, and none are loaded.
    is_empty: whether they are still to be mapped.
    prepares_ahead: whether a text may be encoded while another call is drawn.
    next_call: the worker's NextCall (rollout/next_call.py).
    """

    adapter: ModelAdapter
    vae: Any  # the vllm-omni pipeline's
    od_config: Any
    weights_sources: list[Any]
    device: torch.device
    served_names: ServedNames
    cast_networks: tuple[str, ...] = ()
    stop_path: str | None = None  # of the request that runs: see pipeline_stop
    num_rows = 0  # samples of the rollout call that runs, 0 for any other
    maps_base = False
    is_empty = False
    prepares_ahead = True
    next_call: Any = None

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        # what comes next in the order of classes is vllm-omni's pipeline
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]  # its own
        arguments = od_config.custom_pipeline_args or {}
        self.adapter = build_adapter(Path(od_config.model), arguments.get("family", ""))
        self.policy_components = self.adapter.components  # whose weights the trainer pushes
        for name in self.cast_networks:
            # Parameters only: a text encoder's rotary frequencies are float32 buffers and stay so.
            for parameter in getattr(self, name).parameters():
                parameter.data = parameter.data.to(od_config.dtype)
        self.adapter.adapt_vae(self.vae)
        if not od_config.enforce_eager:
            # torch keeps 8 variants of a function, and runs a ninth uncompiled without a word
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, COMPILED_VARIANTS
            )
            self.adapter.compile_vae(self.vae)
        self.maps_base = bool(arguments.get("shared_base"))
        self.is_empty = self.maps_base
        if self.maps_base:
            skip_sources(self, self.policy_components)
            empty_parameters(self._policy_modules(), torch.device("cpu"))
        if hasattr(self, "set_progress_bar_config"):  # not all of vllm-omni's pipelines have a bar
            self.set_progress_bar_config(disable=True)

    def encode(self, texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
        """Encode as the adapter's prompt_encoder does, by the pipeline's own networks."""
        return self.adapter.encode(self, texts, images)

    def drop_prepared(self) -> None:
        """Forget the inputs of a call that waits, before weights change or go."""
        if self.next_call:
            self.next_call.drop()

    def policy_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters; those of the policy under their component's name."""
        return self.named_parameters()  # type: ignore[attr-defined]  # a torch module

    def think(self, requests: Sequence[RolloutRequest]) -> tuple[Tensors, list[str]]:
        """Let the model write about each prompt before it draws.

        Returns the conditioning in place of the prompts' own, [P, …] by name, and the texts.
        Raises ValueError where it cannot, which is so by default.
        """
        raise ValueError(
            f"think_tokens={requests[0].sampling.think_tokens}, but {self.adapter.title} writes no "
            "text before it draws; send think_tokens=0"
        )

    def transformer_call(self, component: str) -> TransformerCall:
        """Return the component's forward, with the arguments that the adapter gives it."""
        forward = self.get_submodule(component)  # type: ignore[attr-defined]  # a torch module
        return TransformerCall(forward=forward, dtype=self.od_config.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load weights as vllm-omni does. A mapped base has none to load and counts as loaded."""
        loaded = super().load_weights(weights)  # type: ignore[misc]  # vllm-omni's
        if not self.maps_base:
            return loaded
        for module in self._policy_modules():
            module.load_weights(())  # which also notes how LoRA finds packed layers
        # without any source vllm-omni expects to load all networks, which have loaded themselves
        every: Any = self  # a torch module
        named = self.policy_parameters() if self.weights_sources else every.named_parameters()
        return set(loaded or ()) | {name for name, _ in named}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the pipeline as torch does, but for a base that is not mapped yet."""
        if not self.is_empty:
            return super()._apply(fn, recurse)  # type: ignore[misc]  # a torch module's
        with withheld_parameters(self._policy_modules()):
            super()._apply(fn, recurse)  # type: ignore[misc]
        empty_parameters(self._policy_modules(), fn(torch.empty(0)).device)
        return self

    def _policy_modules(self) -> list[Any]:
        get_submodule = self.get_submodule  # type: ignore[attr-defined]  # a torch module
        return [get_submodule(component) for component in self.policy_components]

    def forward(self, req: Any) -> Any:
        if is_warm_up(req):
            return [_blank() for _ in req.sampling_params_list]
        requests = rollout_requests(req)
        if any(params.lora_request is not None for params in req.sampling_params_list):
            return [_refusal(NO_LORA_REQUESTS) for _ in req.sampling_params_list]
        self.stop_path = stop_path(req)
        # a ValueError is our request's fault, e.g. more tokens than the text encoder takes
        refused = ValueError if requests else Stopped
        try:
            if requests:
                return [self._draw_groups(requests)]
            return super().forward(req)  # type: ignore[misc]  # vllm-omni's
        except refused as error:
            return [_refusal(str(error))]
        finally:
            self.stop_path = None
            self.num_rows = 0

    def _draw_groups(self, requests: Sequence[RolloutRequest]) -> Any:
        from vllm_omni.diffusion.data import DiffusionOutput

        sampling = requests[0].sampling
        prepared = self.next_call.take(requests) if self.next_call else None
        inputs = prepared or self._inputs(requests)
        sampler = BatchSampler(
            requests,
            schedule=self.adapter.schedule(sampling),
            token_shape=self.adapter.latents_shape(sampling),
            device=self.device,
        )
        sampler.conditioning = inputs.conditioning
        if sampling.think_tokens:
            thought_conditioning, sampler.thoughts = self.think(requests)
            sampler.conditioning |= thought_conditioning
        conditioning = {
            name: sampler.per_row(value_P) for name, value_P in sampler.conditioning.items()
        }

        self.num_rows = len(sampler.sample_keys)
        latents_NLC = sampler.initial_latents(inputs.noise_NLC)
        latents_NLC = self._denoise(sampler, conditioning, latents_NLC)
        if self.next_call:
            # The GPU is behind by some steps, for which decode() would wait.
            self.next_call.prepare(requests, self._inputs)
        pixels_NFHWC = self.adapter.decode(self.vae, latents_NLC, sampling, conditioning)
        result = sampler.result(pixels_NFHWC)
        result[WAS_PREPARED] = torch.tensor(prepared is not None)
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            result[GPU_BYTES] = torch.tensor([allocated, reserved])
        # vllm-omni makes images or videos of a payload, so our tensors travel in the metadata
        envelope = {"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {RESULT_KEY: result}}
        return DiffusionOutput(output=envelope)

    def _inputs(self, requests: Sequence[RolloutRequest]) -> CallInputs:
        """Return what the call needs before its first step. Raises ValueError for a long text."""
        self._check_lengths(requests)
        token_shape = self.adapter.latents_shape(requests[0].sampling)
        with ThreadPoolExecutor(1, thread_name_prefix="noise") as thread:
            # 1.4 ms a sample of 512² on a core, while another starts the text encoder's kernels
            noise = thread.submit(initial_noise, requests, token_shape)
            conditioning = self._encode_texts(requests) | self._encode_images(requests)
        return CallInputs(conditioning=conditioning, noise_NLC=noise.result())

    def _encode_texts(self, requests: Sequence[RolloutRequest]) -> Tensors:
        """Encode each distinct text once. Returns the groups' conditioning, [P, …] by name.

        Equal texts beside other images are distinct: some text encoders see the images.
        """
        conditioning: Tensors = {}
        images_P = [request.images for request in requests]
        for side, side_texts in self.texts_of_sides(requests).items():
            pairs, index_P = distinct(list(zip(side_texts, images_P, strict=True)))
            texts = [text for text, _ in pairs]
            images = [pixels_of(images, requests[0].sampling.images) for _, images in pairs]
            for name, value in self.encode(texts, images).items():
                if value.is_floating_point():
                    value = value.to(self.od_config.dtype)
                if value.dtype == torch.bool:
                    value = value.cpu()  # a forward asks how many tokens count, without waiting
                conditioning[side + name] = value[index_P.to(value.device)]
        return conditioning

    def _encode_images(self, requests: Sequence[RolloutRequest]) -> Tensors:
        """Encode each distinct request's images once, as the groups' conditioning."""
        sampling = requests[0].sampling
        if not sampling.images:
            return {}
        distinct_images, index_P = distinct([request.images for request in requests])
        encode = partial(encode_images, self.vae)
        latents = [
            self.adapter.image_latents(encode, pixels_of(images, sampling.images), sampling)
            for images in distinct_images
        ]
        return {IMAGE_LATENTS: torch.cat(latents)[index_P.to(self.device)]}

    def _denoise(self, sampler: BatchSampler, conditioning: Tensors, latents_NLC: Tensor) -> Tensor:
        """Return latents [N, L, C] at sigma 0.

        conditioning: a row for each sample. latents_NLC: at sigma 1.
        """
        # on the host at once: to read a sigma later would wait for the GPU
        for sigma in sampler.schedule[:-1].tolist():
            component = self.adapter.component_of(sigma)
            rows_B, index_N = sampler.distinct_rows()
            of_rows = conditioning
            if len(rows_B) < len(index_N):  # a group's samples are still one
                of_rows = {
                    name: value_N[rows_B.to(value_N.device)]
                    for name, value_N in conditioning.items()
                }
            velocity_BLC = self.adapter.velocity(
                self.transformer_call(component),
                latents_NLC[rows_B],
                sampler.sigma_rows(len(rows_B)),
                of_rows,
                sampler.sampling,
                component=component,
            )
            latents_NLC = sampler.step(velocity_BLC[index_N], latents_NLC)
        return latents_NLC

    def texts_of_sides(self, requests: Sequence[RolloutRequest]) -> dict[str, list[str]]:
        """Return the groups' prompts under "", under guidance also "negative_" → negative ones."""
        sides = {"": [request.prompt.text for request in requests]}
        if self.adapter.is_guided(requests[0].sampling):
            sides["negative_"] = [request.prompt.negative_text for request in requests]
        return sides

    def _check_lengths(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise ValueError that names the request whose text the stock pipeline would cut off."""
        limit = self.adapter.max_prompt_tokens
        # vllm-omni names tokenizers as their folders; one in the model's root has no folder
        tokenizer = getattr(self, Path(self.adapter.tokenizer_folder).name or "tokenizer")
        for side, texts in self.texts_of_sides(requests).items():
            for index, text in enumerate(texts):
                count = self.adapter.num_prompt_tokens(text, tokenizer)
                if count > limit:
                    raise ValueError(
                        f"requests[{index}] (prompt {requests[index].prompt.id}): the "
                        f"{side.replace('_', ' ')}prompt is too long, {count} tokens, the model "
                        f"takes {limit}; shorten {text[:60]!r}…"
                    )


def is_warm_up(batch: Any) -> bool:
    """Tell vllm-omni's own first request from those of others.

    It draws one image without guidance. With compiled blocks that makes variants which no rollout
    uses: 84 s of SD3.5's start on an H100. A base that is to be mapped has no weights yet.
    """
    from vllm_omni.diffusion.request import DUMMY_DIFFUSION_REQUEST_ID

    return batch.request_id.startswith(DUMMY_DIFFUSION_REQUEST_ID)


def _blank() -> Any:
    """Return an image of one pixel, by which the warm-up passes."""
    from vllm_omni.diffusion.data import DiffusionOutput

    return DiffusionOutput(output={"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {}})


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
