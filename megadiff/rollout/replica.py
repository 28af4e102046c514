"""One replica: an engine, the state of its weights, and what the RL routes do with both."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megadiff.models.rollout_base import REQUESTS_KEY, RESULT_KEY, assemble_groups
from megadiff.rollout.limits import Limits
from megadiff.rollout.omni_app import call_worker, set_asleep
from megadiff.rollout.policy import PolicyState, Refused
from megadiff.rollout.requests import check_requests
from megadiff.rollout.wire import bucket_manifest, encode_groups
from megadiff.types import RolloutRequest
from megadiff.weights.manifest import Manifest

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")


class Replica:
    """Lives in the server's event loop. Generation and weight pushes exclude each other: `begin` closes the door first
    and then waits for the requests inside."""

    def __init__(self, engine: Any, *, name: str, expected: Manifest, limits: Limits, sleep_mode: bool) -> None:
        self.engine, self.name, self.limits, self.sleep_mode = engine, name, limits, sleep_mode
        self.policy = PolicyState(expected)
        self.in_flight = 0
        self._idle = asyncio.Condition()
        self._weights_lock = asyncio.Lock()  # one push, sleep or wake at a time

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
        check_requests(requests, self.limits)
        for request in requests:
            self.policy.require_ready(request.policy_version)
        async with self.generating() as version:
            start = time.perf_counter()
            result = await self._sample(requests)
            engine_s = time.perf_counter() - start
        groups = assemble_groups(requests, result, policy_version=version, replica=self.name)
        return await asyncio.to_thread(encode_groups, groups), engine_s

    async def weights_begin(self, version: int, manifest: Manifest) -> None:
        """Refuse new generation, and wait until the requests in flight are done."""
        async with self._weights_lock:
            self.policy.begin(version, manifest)
            await self._drained()

    async def weights_bucket(self, chunks: AsyncIterator[bytes]) -> list[str]:
        """Loads the tensors of a safetensors body; returns their names. Raises Refused or ValueError."""
        async with self._weights_lock:
            self.policy.check_bucket({})  # refuse before the body is read
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            with tempfile.NamedTemporaryFile(dir=folder, prefix="megadiff-bucket-") as file:
                await _receive(chunks, file, self.limits.bucket_bytes)
                bucket = bucket_manifest(Path(file.name))
                self.policy.check_bucket(bucket)
                await call_worker(self.engine, "load_bucket", file.name)
            self.policy.loaded(bucket)
            return sorted(bucket)

    async def weights_commit(self, version: int) -> dict[str, str]:
        """name → fingerprint of what the pipeline now holds. Raises Refused."""
        async with self._weights_lock:
            self.policy.check_commit(version)
            held = await call_worker(self.engine, "fingerprints")
            self.policy.commit()
            logger.info("%s holds policy version %d, %d tensors", self.name, version, len(held))
            return held

    async def sleep(self) -> None:
        """Move the weights off the device. Raises Refused when the replica was not started for it, or is not ready."""
        if not self.sleep_mode:
            raise Refused(409, "started without --sleep-mode; start the replica with it to let it sleep")
        async with self._weights_lock:
            self.policy.fall_asleep()
            await self._drained()
            await set_asleep(self.engine, True)

    async def wake(self) -> None:
        async with self._weights_lock:
            if self.policy.state == "asleep":
                await set_asleep(self.engine, False)
            self.policy.wake()

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
            extra_args={REQUESTS_KEY: tuple(replace(one, prompt=replace(one.prompt, fields={})) for one in requests)},
        )
        outputs = self.engine.generate(
            prompt={"prompt": requests[0].prompt.text},
            request_id=f"rl-{uuid.uuid4().hex}",
            sampling_params_list=[parameters],
        )
        last = [output async for output in outputs][-1]
        return last.multimodal_output["metadata"][RESULT_KEY]


async def _receive(chunks: AsyncIterator[bytes], file: Any, max_bytes: int) -> None:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise Refused(413, f"the bucket exceeds {max_bytes} bytes; send smaller buckets (sync.bucket_mib)")
        file.write(chunk)
    file.flush()
