"""Do the work behind the RL routes: an engine, the state of its weights, and who owns them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from megadiff.models.batch_sampler import split_groups
from megadiff.models.pipeline_base import GPU_BYTES, REQUESTS_KEY, RESULT_KEY, WAS_PREPARED
from megadiff.models.pipeline_stop import STOP_KEY
from megadiff.models.registry import family_of
from megadiff.rollout.limits import GROUP_BROKE, Limits
from megadiff.rollout.next_call import WaitingCalls
from megadiff.rollout.server.body import chunks
from megadiff.rollout.server.load import Load
from megadiff.rollout.server.omni_app import call_worker
from megadiff.rollout.server.owner import Owner
from megadiff.rollout.server.policy import PolicyState, Refused
from megadiff.rollout.server.progress import EngineProgress
from megadiff.rollout.server.requests import ModelRule, check_requests
from megadiff.rollout.spec import ReplicaSpec
from megadiff.rollout.wire import encode_groups
from megadiff.sync.bucket import file_manifest
from megadiff.sync.transports.group import BROKE
from megadiff.sync.transports.receive import resolve
from megadiff.sync.transports.shared_memory import bucket_file
from megadiff.sync.transports.table import TRANSPORTS
from megadiff.tensors.fingerprint import commit_answer
from megadiff.tensors.manifest import Manifest
from megadiff.types import JsonObject, LoraSpec, RolloutRequest

logger = logging.getLogger(__name__)


@dataclass
class Stop:
    """Tell whether a request was given up: then its file is there, and reason says why."""

    path: Path
    reason: str = ""


@dataclass(kw_only=True, eq=False)
class Replica:
    """Generate samples and take weights, within the server's event loop.

    The two exclude each other: `weights_begin` first refuses new requests, then waits for those in
    the engine.

    engine: with the base weights loaded, of which `expected` is the manifest.
    workers: as the worker extension's describe() returns them.
    model_rule: raises ValueError for what the model cannot sample.
    private_folder: only this replica and its workers use it.
    """

    engine: Any
    spec: ReplicaSpec
    expected: Manifest
    workers: list[JsonObject]
    model_rule: ModelRule
    private_folder: Path
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        self.policy = PolicyState(self.expected, has_weights=not self.spec.shared_base)
        self.owner = Owner(time.monotonic)
        self.load = Load(time.monotonic)
        self.gpu_bytes: tuple[int, int] | None = None  # worker 0's allocated and reserved ones
        self.num_image_calls = 0  # waiting ones included
        self.progress = EngineProgress(self.private_folder)
        self._waiting_calls = WaitingCalls(self.private_folder)
        self._idle = asyncio.Condition()
        self._weights_lock = asyncio.Lock()  # one push or sleep at a time

    @asynccontextmanager
    async def generating(self, num_samples: int) -> AsyncIterator[int]:
        """Count a request as in flight; yield the policy version, which cannot change meanwhile.

        Raises Refused.
        """
        self.policy.require_ready()

        try:
            with self.load.drawing(num_samples):
                yield self.policy.version
        finally:
            async with self._idle:
                self._idle.notify_all()

    @asynccontextmanager
    async def stoppable(
        self, receive: Any, *, timeout_s: float | None = None
    ) -> AsyncIterator[Stop]:
        """Yield what ends a request in the engine when its client leaves, or after timeout_s.

        receive: ASGI's, after the whole body. The engine sees it before its next forward pass.
        """
        stop = Stop(self.private_folder / f"stop-{uuid.uuid4().hex}")

        async def watch() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    while (await receive())["type"] != "http.disconnect":
                        pass
                stop.reason = "its client left"
            except TimeoutError:
                stop.reason = (
                    f"it took longer than {timeout_s:.0f} s; ask for fewer steps or pixels"
                )
            stop.path.touch()

        watcher = asyncio.create_task(watch())
        try:
            yield stop
        finally:
            watcher.cancel()
            stop.path.unlink(missing_ok=True)

    async def generate(
        self, requests: Sequence[RolloutRequest], receive: Any, *, run: str | None = None
    ) -> tuple[bytes, float, float]:
        """Return encoded RolloutGroups, sampled as one batch, and seconds: engine, of these queue.

        receive: ASGI's, after the body: when the client leaves, the engine stops.
        Raises Refused, and ValueError for a bad request or for requests that do not go together.
        """
        check_requests(requests, self.limits, self.model_rule)

        for request in requests:
            self.owner.check_generate(run, request.policy_version)
            self.policy.require_ready(request.policy_version)

        with self.owner.calling(run):
            num_samples = sum(len(request.sample_indices) for request in requests)
            async with self.generating(num_samples) as version, self.stoppable(receive) as stop:
                start_s = time.monotonic()
                shape = (requests[0].sampling, num_samples)
                with self.progress.drawing(shape) as note_samples:
                    result = await self._sample(requests, stop)
                    note_samples()
                engine_s = time.monotonic() - start_s
                queue_s = self.load.waited_s(start_s)
            self.load.num_drawn += num_samples
            self.load.num_prepared += int(result[WAS_PREPARED])
            if GPU_BYTES in result:
                allocated, reserved = result[GPU_BYTES].tolist()
                self.gpu_bytes = (allocated, reserved)
            groups = split_groups(requests, result, policy_version=version, replica=self.spec.name)
            return await asyncio.to_thread(encode_groups, groups), engine_s, queue_s

    async def weights_begin(
        self,
        version: int,
        manifest: Manifest,
        lora: LoraSpec | None,
        transport: Mapping[str, Any],
        *,
        run: str | None = None,
    ) -> None:
        """Refuse new generation, wait for the requests in flight, and prepare the transport.

        Raises Refused, and ValueError for an unknown transport.
        """
        # A name from outside may have no hash.
        if transport.get("name") not in tuple(TRANSPORTS):
            raise ValueError(
                f"transport.name={transport.get('name')!r:.40} is none of {', '.join(TRANSPORTS)}"
            )

        self.owner.check_begin(run)
        async with self._weights_lock:
            self.owner.check_begin(run)  # again: another run may have waited before this one
            self.policy.begin(version, manifest, lora)
            self.owner.take(run)

            with self.owner.calling(run):
                await self._drained()
                with _blames_the_group():
                    await call_worker(self.engine, "begin_push", dict(transport))

    async def weights_bucket(self, receive: Any, *, run: str | None = None) -> None:
        """Load the tensors of a safetensors body.

        The body is read before the lock is taken: who stalls in it holds up nobody.
        Raises Refused or ValueError.
        """
        self.owner.check(run)
        self.policy.check_bucket({})  # refuse before the body is read
        push = self.policy.num_pushes

        with self.owner.calling(run), bucket_file() as path:
            await self._receive(receive, path, run)
            async with self._weights_lock:
                self.policy.check_push(push)
                source = {"transport": "file", "path": str(path)}
                await self._load(file_manifest(path), source)

    async def weights_bucket_at(self, source: object, *, run: str | None = None) -> None:
        """Load the tensors of a bucket that lies elsewhere.

        source: the JSON that says where. Raises Refused or ValueError.
        """
        async with self._turn(run):
            self.policy.check_bucket({})  # refuse before the bucket is opened
            await self._load(*resolve(source, weights_folder=self.spec.weights))

    @asynccontextmanager
    async def _turn(self, run: str | None) -> AsyncIterator[None]:
        """Hold the lock for the run that owns the replica.

        Raises Refused for another run, and when a new push began while this one waited.
        """
        self.owner.check(run)
        push = self.policy.num_pushes
        with self.owner.calling(run):
            async with self._weights_lock:
                self.policy.check_push(push)
                yield

    async def _receive(self, receive: Any, path: Path, run: str | None) -> None:
        """Write the body to the file. Each chunk is a sign of life of the run."""
        size = 0

        with path.open("wb") as file:
            async for chunk in chunks(receive):
                size += len(chunk)
                if size > self.limits.bucket_bytes:
                    raise Refused(
                        413,
                        f"the bucket exceeds {self.limits.bucket_bytes} bytes; send smaller "
                        "buckets (sync.bucket_mib)",
                    )
                file.write(chunk)
                self.owner.hear(run)

    async def _load(self, bucket: Manifest, source: JsonObject) -> None:
        self.policy.check_bucket(bucket)
        # a file of a shared folder may take its time
        watched = nullcontext() if source["transport"] == "file" else self.progress.loading()
        with watched, _blames_the_group():
            await call_worker(self.engine, "load_bucket", source)
        self.policy.loaded(bucket)

    async def weights_commit(
        self, version: int, digests: Sequence[str] = (), *, run: str | None = None
    ) -> list[JsonObject]:
        """Put the pushed weights to use; return what each worker then uses.

        A worker's answer has fingerprints (name → digits; with FP8, of the weights that the copies
        are made from) and bound_modules, those of the LoRA. It is its digest alone where that is
        the worker's of `digests`. Where digests are given and any is another, the push is not
        whole: only a new one makes the replica generate again. Raises Refused.
        """
        async with self._turn(run):
            self.policy.check_commit(version)
            lora = self.policy.lora
            # bound first: fingerprints are of what layers, or their FP8 copies, then take
            await self._handle_weights("bind_lora", dataclasses.asdict(lora) if lora else None)
            workers = (await self._handle_weights("fingerprints"))["workers"]

            answer = commit_answer(workers, digests)
            if digests and [row.get("digest") for row in answer] != list(digests):
                self.policy.lose_received()
                logger.warning(
                    "%s holds other weights than version %d has; it does not generate until a "
                    "push arrives whole",
                    self.spec.name,
                    version,
                )
                return answer

            keeps_base = True
            if self.spec.fp8:
                # If quantize fails, weights may be gone: a second commit must not succeed.
                self.policy.lose_received()
                keeps_base = (await self._handle_weights("quantize"))["keeps_weights"]
            self.policy.commit(keeps_base=keeps_base)

        num_tensors = len(workers[0]["fingerprints"])
        logger.info("%s holds policy version %d, %d tensors", self.spec.name, version, num_tensors)
        return answer

    async def sleep(self, *, run: str | None = None) -> None:
        """Give the memory of all weights back, until a push brings all of the policy's.

        Raises Refused when not ready.
        """
        async with self._turn(run):
            # a base that a trainer holds is not the replica's to free
            self.policy.fall_asleep(keeps_base=self.spec.shared_base)
            await self._drained()
            await call_worker(self.engine, "free_weights")

    async def ask_workers(self, method: str, *arguments: str, run: str | None) -> None:
        """Call a method that may run at any time, as it changes no weights. Raises Refused."""
        self.owner.check(run)
        with self.owner.calling(run):
            await call_worker(self.engine, method, *arguments)

    async def end_trace(self, *, run: str | None) -> bytes:
        """Return the first worker's trace, a Chrome trace in gzip. Raises Refused."""
        self.owner.check(run)  # before the file of the owner's trace is removed
        path = self.private_folder / "trace.json.gz"
        try:
            await self.ask_workers("end_trace", str(path), run=run)
            return await asyncio.to_thread(path.read_bytes)
        finally:
            path.unlink(missing_ok=True)

    async def _handle_weights(self, method: str, *arguments: object) -> Any:
        with self.progress.loading():
            return await call_worker(self.engine, method, *arguments)

    async def _drained(self) -> None:
        async with self._idle:
            await self._idle.wait_for(lambda: self.load.num_calls == 0)

    async def _sample(self, requests: Sequence[RolloutRequest], stop: Stop) -> dict[str, Tensor]:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        sampling = requests[0].sampling
        # A prompt's other columns are for rewards; the worker needs none of them.
        plain_requests = tuple(
            dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, fields={}))
            for request in requests
        )

        parameters = OmniDiffusionSamplingParams(
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            # vllm-omni takes 0 for "not given" and then uses 4
            true_cfg_scale=max(1.0, sampling.true_cfg_scale),
            num_outputs_per_prompt=sum(len(request.sample_indices) for request in requests),
            extra_args={REQUESTS_KEY: plain_requests, STOP_KEY: str(stop.path)},
        )

        with self._waiting_calls.waiting(plain_requests):
            outputs = self.engine.generate(
                prompt=_plain_prompt(requests[0], self.spec),
                request_id=f"rl-{uuid.uuid4().hex}",
                sampling_params_list=[parameters],
            )
            last = [output async for output in outputs][-1]
        return last.multimodal_output["metadata"][RESULT_KEY]


@contextmanager
def _blames_the_group() -> Iterator[None]:
    """Refuse with GROUP_BROKE where all workers that failed have waited in vain for others."""
    try:
        yield
    except RuntimeError as error:
        # vllm-omni puts the workers' errors into one text: "rank 0: …; rank 1: …", then tracebacks
        text = str(error).partition(" traceback:\n")[0]
        _, *of_ranks = re.split(r"\brank \d+: ", text)
        if not all(BROKE in failure for failure in of_ranks or [text]):
            raise
        logger.warning("%s", text)
        raise Refused(GROUP_BROKE, text) from error


def _plain_prompt(request: RolloutRequest, spec: ReplicaSpec) -> dict[str, object]:
    """Return what vllm-omni checks of a request before the worker gets it."""
    prompt: dict[str, object] = {"prompt": request.prompt.text}
    if family_of(Path(spec.model), spec.family).needs_plain_image:
        # vllm-omni refuses a request without one; ours are in its extra_args.
        prompt["multi_modal_data"] = {"image": Image.new("RGB", (16, 16))}
    return prompt
