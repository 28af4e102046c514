"""One replica: an engine, the state of its weights, and what the RL routes do with both."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megadiff.models.rollout_base import REQUESTS_KEY, RESULT_KEY, assemble_groups
from megadiff.rollout.limits import Limits
from megadiff.rollout.omni_app import call_worker
from megadiff.rollout.policy import PolicyState, Refused
from megadiff.rollout.requests import ModelRule, check_requests
from megadiff.rollout.wire import encode_groups
from megadiff.types import LoraSpec, RolloutRequest
from megadiff.weights.bucket import file_manifest
from megadiff.weights.manifest import Manifest
from megadiff.weights.transports.receive import resolve
from megadiff.weights.transports.shared_memory import bucket_file

logger = logging.getLogger(__name__)
TRANSPORTS = ("http", "shm", "cuda_ipc", "nccl", "disk")


class Replica:
    """Lives in the server's event loop. Generation and weight pushes exclude each other: `begin` closes the door first
    and then waits for the requests inside."""

    def __init__(
        self,
        engine: Any,
        *,
        name: str,
        expected: Manifest,
        places: Sequence[Mapping[str, Any]],
        limits: Limits,
        model_rule: ModelRule,
        arithmetic: Mapping[str, bool],
        weights_folder: Path | None = None,
    ) -> None:
        """expected: of the base weights. places: as the worker extension's policy_places() returns them. model_rule: raises
        ValueError for what the model cannot sample. arithmetic: what /health says of how it computes. weights_folder: the
        one from which buckets on disk are taken."""
        self.engine, self.name, self.limits = engine, name, limits
        self.model_rule, self.arithmetic = model_rule, dict(arithmetic)
        self.places, self.weights_folder = list(places), weights_folder
        self.policy = PolicyState(expected)
        self.in_flight = 0
        self._idle = asyncio.Condition()
        self._weights_lock = asyncio.Lock()  # one push or sleep at a time

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[int]:
        """Counts a request as in flight; yields the policy version, which cannot change meanwhile. Raises Refused."""
        self.policy.require_ready()
        self.in_flight += 1
        try:
            yield self.policy.version
        finally:
            async with self._idle:
                self.in_flight -= 1
                self._idle.notify_all()

    async def generate(self, requests: Sequence[RolloutRequest]) -> tuple[bytes, float]:
        """(encoded RolloutGroups, drawn as one batch; seconds inside the engine).

        Raises Refused, and ValueError for a bad request or for requests that do not go together.
        """
        check_requests(requests, self.limits, self.model_rule)
        for request in requests:
            self.policy.require_ready(request.policy_version)
        async with self.generating() as version:
            start = time.perf_counter()
            result = await self._sample(requests)
            engine_s = time.perf_counter() - start
        groups = assemble_groups(requests, result, policy_version=version, replica=self.name)
        return await asyncio.to_thread(encode_groups, groups), engine_s

    async def weights_begin(
        self, version: int, manifest: Manifest, lora: LoraSpec | None, transport: Mapping[str, Any]
    ) -> None:
        """Refuse new generation, wait until the requests in flight are done, and make ready for how buckets come."""
        if transport.get("name") not in TRANSPORTS:
            raise ValueError(f"transport.name={transport.get('name')!r:.40} is none of {', '.join(TRANSPORTS)}")
        async with self._weights_lock:
            self.policy.begin(version, manifest, lora)
            await self._drained()
            await call_worker(self.engine, "begin_push", dict(transport))

    async def weights_bucket(self, chunks: AsyncIterator[bytes]) -> list[str]:
        """Loads the tensors of a safetensors body; returns their names. Raises Refused or ValueError."""
        async with self._weights_lock:
            self.policy.check_bucket({})  # refuse before the body is read
            with bucket_file() as path:
                await _receive(chunks, path, self.limits.bucket_bytes)
                return await self._load(file_manifest(path), {"transport": "file", "path": str(path)})

    async def weights_bucket_at(self, source: object) -> list[str]:
        """Loads the tensors of a bucket that lies elsewhere; returns their names. Raises Refused or ValueError."""
        async with self._weights_lock:
            self.policy.check_bucket({})
            manifest, source = resolve(source, weights_folder=self.weights_folder)
            return await self._load(manifest, source)

    async def _load(self, bucket: Manifest, source: Mapping[str, Any]) -> list[str]:
        self.policy.check_bucket(bucket)
        await call_worker(self.engine, "load_bucket", dict(source))
        self.policy.loaded(bucket)
        return sorted(bucket)

    async def weights_commit(self, version: int) -> list[dict[str, Any]]:
        """Of each worker: fingerprints (name → digits) of what it now uses, or makes FP8 copies of; bound_modules of the LoRA.
        Raises Refused."""
        async with self._weights_lock:
            self.policy.check_commit(version)
            lora = self.policy.lora
            await call_worker(self.engine, "bind_lora", dataclasses.asdict(lora) if lora else None)
            workers = (await call_worker(self.engine, "fingerprints"))["workers"]
            self.policy.commit(keeps_base=await self._quantized())
            logger.info("%s holds policy version %d, %d tensors", self.name, version, len(workers[0]["fingerprints"]))
            return workers

    async def _quantized(self) -> bool:
        """Makes FP8 copies, where products are in FP8; returns whether the weights were kept as they came."""
        if not self.arithmetic.get("fp8"):
            return True
        self.policy.lose_received()  # else a commit could be tried again, if the next line failed
        return (await call_worker(self.engine, "quantize"))["keeps_weights"]

    async def sleep(self) -> None:
        """Gives the memory of all weights back, until a push brings all of the policy's. Raises Refused when not ready."""
        async with self._weights_lock:
            self.policy.fall_asleep()
            await self._drained()
            await call_worker(self.engine, "free_weights")

    async def trim(self) -> None:
        """Gives memory back that no sample or weight needs at the moment."""
        await call_worker(self.engine, "trim")

    async def _drained(self) -> None:
        async with self._idle:
            await self._idle.wait_for(lambda: self.in_flight == 0)

    async def _sample(self, requests: Sequence[RolloutRequest]) -> dict[str, Tensor]:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        sampling = requests[0].sampling
        parameters = OmniDiffusionSamplingParams(
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            true_cfg_scale=max(1.0, sampling.true_cfg_scale),  # vllm-omni takes 0 for "not given" and then uses 4
            num_outputs_per_prompt=sum(len(request.sample_indices) for request in requests),
            extra_args={REQUESTS_KEY: tuple(map(_without_fields, requests))},
        )
        outputs = self.engine.generate(
            prompt={"prompt": requests[0].prompt.text},
            request_id=f"rl-{uuid.uuid4().hex}",
            sampling_params_list=[parameters],
        )
        last = [output async for output in outputs][-1]
        return last.multimodal_output["metadata"][RESULT_KEY]


def _without_fields(request: RolloutRequest) -> RolloutRequest:
    """What the worker needs of a request: a prompt's other columns are for rewards."""
    return dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, fields={}))


async def _receive(chunks: AsyncIterator[bytes], path: Path, max_bytes: int) -> None:
    size = 0
    with path.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise Refused(413, f"the bucket exceeds {max_bytes} bytes; send smaller buckets (sync.bucket_mib)")
            file.write(chunk)
