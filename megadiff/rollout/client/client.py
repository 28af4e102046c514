"""A replica seen from the trainer: a synchronous HTTP client, for any number of threads.

It imports neither vLLM nor vllm-omni.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from megadiff.process.bounded_http import (
    TIMED_OUT,
    UNUSABLE,
    Answer,
    BoundedHttp,
    Exchange,
    NoAnswer,
)
from megadiff.rollout.client.answers import JSON_BYTES, check_groups, groups_bytes
from megadiff.rollout.limits import OUTSTANDING_HEADER, RUN_HEADER
from megadiff.rollout.proof import (
    REPLICA,
    TRAINER,
    check_token,
    is_loopback,
    is_valid,
    new_nonce,
    sign,
)
from megadiff.rollout.wire import decode_groups, requests_to_json
from megadiff.sync.bucket import BucketBody
from megadiff.tensors.manifest import Manifest, manifest_json
from megadiff.types import JsonObject, LoraSpec, RolloutGroup, RolloutRequest

# /health waits for nothing, neither a lock nor the engine
HEALTH_TIMEOUT_S = 2.0
HELLO_TIMEOUT_S = 30.0  # in the middle of a run, when the replica may be busy
# a replica that does not hear it is free after OWNER_SILENT_S all the same
RELEASE_TIMEOUT_S = 2.0
SMALL_BYTES = 2**20  # of an answer from an address that has proved nothing yet
# what the replica tells of a call: milliseconds inside the engine, and of these in its queue
_ENGINE_MS = re.compile(r"\bengine;dur=([0-9]+(?:\.[0-9]+)?)")
_QUEUE_MS = re.compile(r"\bqueue;dur=([0-9]+(?:\.[0-9]+)?)")
TRACE_TIMEOUT_S = 120.0
TRACE_BYTES = 2**30  # of a step; a million operators are some 50 MiB
PATIENCE = (
    ", time in its queue included; raise rollout.request_timeout_s, or use a smaller "
    "rollout.batch_size or more replicas"
)


class ReplicaError(RuntimeError):
    """A replica refused a request (status: its HTTP status), or did not answer (status None)."""

    def __init__(self, name: str, status: int | None, message: str) -> None:
        answered = "" if status is None else f" answered {status}"
        super().__init__(f"{name}{answered}: {message}")
        self.status = status
        self.message = message
        self.is_timeout = status == TIMED_OUT


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Hold what a call drew.

    engine_s: seconds inside the engine. queue_s: of these, behind calls that had come before.
    outstanding: samples that the replica still had to draw when it answered, for any rank.
    """

    groups: list[RolloutGroup]
    engine_s: float
    outstanding: int
    queue_s: float = 0.0


class NotProven(ReplicaError):
    """Trainer and replica did not show each other that they have the same token, or both none."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, None, message)
        self.status = 401


class ReplicaClient:
    """Talk to one replica. The token goes to an address only after that has proved to know it.

    url: http[s]://host:port, as the replica announced it. timeout_s: of one request, generation and
    weight loading included. run: the id of the run that asks, '' for tools.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        token: str | None = None,
        timeout_s: float = 1800.0,
        run: str = "",
    ) -> None:
        self.url = url
        self.name = name
        self.timeout_s = timeout_s
        self._token = check_token(token) if token else None
        self._run_header = {RUN_HEADER: run} if run else {}
        self._open = BoundedHttp(url)  # for what carries no token
        # Another process may have the address when a connection is opened again. So each begins
        # with a proof, and only proven ones carry the token.
        self._proven = BoundedHttp(url, greet=self._greet) if token else self._open

    def close(self) -> None:
        self._open.close()
        self._proven.close()

    def health(self) -> JsonObject:
        """Return what /health says, to anybody.

        name, policy_version, state (ready | updating | asleep), in_flight (calls), outstanding
        (their samples), run, arithmetic (code, dtype, fp8, float32_streams), vllm_omni.
        """
        return self._object(
            "GET", "/health", http=self._open, timeout_s=HEALTH_TIMEOUT_S, max_bytes=SMALL_BYTES
        )

    def prove(self, *, timeout_s: float = HELLO_TIMEOUT_S) -> None:
        """Show each other that both know the token, before any request carries it.

        Without a token on both sides there is nothing to prove, and only a replica on loopback is
        taken. Raises NotProven, and ReplicaError where no answer comes.
        """
        if not self._token and not is_loopback(urlsplit(self.url).hostname or ""):
            raise NotProven(
                self.name,
                f"{self.url} is not on loopback and the trainer has no token; set MEGADIFF_TOKEN "
                "for the trainer as for its replicas",
            )

        self._greet(
            partial(self._send, self._open, "POST", timeout_s=timeout_s, max_bytes=SMALL_BYTES)
        )

    def _greet(self, exchange: Exchange) -> None:
        """Exchange proofs with whatever is at the other end. Raises NotProven."""
        nonce = new_nonce()
        proof = sign(self._token, role=TRAINER, nonce=nonce, url=self.url) if self._token else ""
        answer = exchange("/rl/hello", json.dumps({"nonce": nonce, "proof": proof}).encode())

        # A 404 is no refusal of the proof: this replica has never heard of one.
        if answer.status == 404:
            raise NotProven(
                self.name, "it has no /rl/hello; start it with this version of megadiff"
            )
        if answer.status >= 400:
            raise NotProven(self.name, f"it refused the trainer's proof: {_message(answer)!r:.300}")

        value = _json(answer)
        theirs = value.get("proof") if isinstance(value, dict) else None
        # the address is part of what is signed: a proof is of no use at another one
        expected = {"role": REPLICA, "nonce": nonce, "url": self.url}
        if self._token and not is_valid(theirs, self._token, **expected):
            raise NotProven(
                self.name,
                f"what answers at {self.url} did not prove that it knows the trainer's token "
                "(MEGADIFF_TOKEN); it gets neither token nor weights",
            )

    def say_alive(self) -> JsonObject:
        """Let the replica know that this run works with it. Returns what /health says."""
        return self._object("GET", "/health", timeout_s=HEALTH_TIMEOUT_S, max_bytes=SMALL_BYTES)

    def release(self) -> None:
        """Tell the replica that this run is over, so that another may take it at once."""
        self._call("POST", "/rl/release", timeout_s=RELEASE_TIMEOUT_S)

    def generate(self, request: RolloutRequest) -> RolloutGroup:
        """Return the group of one request. A 409 tells of another policy version than asked."""
        return self.draw([request]).groups[0]

    def draw(self, requests: Sequence[RolloutRequest]) -> Drawn:
        """Draw requests of equal sampling as one batch; groups come in their order.

        An answer that is none counts as a connection that broke.
        """
        start_s = time.monotonic()
        answer = self._call(
            "POST",
            "/rl/generate",
            requests_to_json(requests),
            max_bytes=groups_bytes(requests),
        )
        try:
            groups = decode_groups(answer.body)
            check_groups(groups, requests)
        # JSON that is nested too deeply ends in a RecursionError
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            text = f"POST /rl/generate has an unusable answer: {error!r:.300}"
            raise ReplicaError(self.name, None, text) from error
        timings = answer.headers.get("server-timing", "")
        timing = _ENGINE_MS.search(timings)
        queue = _QUEUE_MS.search(timings)
        outstanding = answer.headers.get(OUTSTANDING_HEADER, "")
        return Drawn(
            groups=groups,
            engine_s=float(timing[1]) / 1000 if timing else time.monotonic() - start_s,
            outstanding=int(outstanding) if outstanding.isdecimal() else 0,
            queue_s=float(queue[1]) / 1000 if queue else 0.0,
        )

    def weights_places(self) -> list[JsonObject]:
        """Return each worker's host, device and boxes.

        boxes: the part [begin, end) per dimension that it has of a base tensor. A tensor that boxes
        does not name is there whole.
        """
        path = "/rl/weights/places"
        return self._workers_of(self._object("GET", path), f"GET {path}")

    def weights_begin(
        self,
        version: int,
        manifest: Manifest | bytes,
        *,
        lora: LoraSpec | None = None,
        transport: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a push; from here to the commit the replica does not generate.

        manifest: bytes are its JSON, which who has many replicas makes once. transport: how
        buckets come, if not as the bodies of requests.
        """
        text = manifest if isinstance(manifest, bytes) else manifest_json(manifest)
        rest = _json_bytes(
            {
                "version": version,
                "lora": dataclasses.asdict(lora) if lora else None,
                "transport": transport or {"name": "http"},
            }
        )
        self._call("POST", "/rl/weights/begin", b'{"manifest":%b,%b' % (text, rest[1:]))

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        """Send a bucket chunk by chunk, without a copy of the whole, or tell where it lies."""
        self._call("POST", "/rl/weights/bucket", bucket)

    def weights_commit(self, version: int, digests: Sequence[str] = ()) -> list[JsonObject]:
        """Close a push and return what each worker holds.

        fingerprints: name → digits, of all that it now uses. bound_modules: of the LoRA. digests:
        what commit_digest() of each worker should be; one that has it answers `digest` alone.
        """
        value = {"version": version, "digests": digests}
        answer = self._object("POST", "/rl/weights/commit", value)
        if answer.get("version") != version:
            raise ReplicaError(
                self.name,
                UNUSABLE,
                f"it committed version {answer.get('version')!r:.40}, but {version} was pushed; "
                "push again",
            )
        return self._workers_of(answer, "POST /rl/weights/commit")

    def sleep(self) -> None:
        """Free the memory of all weights; a push of all of the policy's wakes it."""
        self._call("POST", "/rl/sleep")

    def trim(self) -> None:
        """Give memory back that the allocator keeps of earlier samples."""
        self._call("POST", "/rl/trim")

    def trace_begin(self) -> None:
        """Let the replica trace its work from now on."""
        self._call("POST", "/rl/trace/begin", timeout_s=TRACE_TIMEOUT_S)

    def trace_end(self) -> bytes:
        """Return the trace, a Chrome trace in gzip."""
        answer = self._call(
            "POST", "/rl/trace/end", timeout_s=TRACE_TIMEOUT_S, max_bytes=TRACE_BYTES
        )
        return answer.body

    def _workers_of(self, answer: JsonObject, asked: str) -> list[JsonObject]:
        workers = answer.get("workers")
        if not isinstance(workers, list):
            raise ReplicaError(
                self.name,
                UNUSABLE,
                f"{asked} names no workers; start it with this version of megadiff",
            )
        return workers

    def _object(self, method: str, path: str, value: object = None, **arguments: Any) -> JsonObject:
        answer = self._call(method, path, value, **arguments)
        body = _json(answer)
        if not isinstance(body, dict):
            raise ReplicaError(
                self.name,
                UNUSABLE,
                f"{method} {path} answers no JSON object: {answer.body[:80]!r}",
            )
        return body

    def _call(
        self,
        method: str,
        path: str,
        value: object = None,
        *,
        http: BoundedHttp | None = None,
        timeout_s: float | None = None,
        max_bytes: int = JSON_BYTES,
    ) -> Answer:
        """Send a bucket or bytes as they are, any other value as JSON.

        Raises ReplicaError, also for a refusal.

        http: by default over connections that began with a proof.
        """
        body: bytes | BucketBody = b""
        if isinstance(value, (BucketBody, bytes)):
            body = value
        elif value is not None:
            body = _json_bytes(value)

        answer = self._send(
            http or self._proven, method, path, body, timeout_s=timeout_s, max_bytes=max_bytes
        )

        if answer.status >= 400:
            raise ReplicaError(self.name, answer.status, _message(answer))
        return answer

    def _send(
        self,
        http: BoundedHttp,
        method: str,
        path: str,
        body: bytes | BucketBody,
        *,
        timeout_s: float | None,
        max_bytes: int,
    ) -> Answer:
        """Return the answer, whatever its status. Raises ReplicaError where there is none."""
        fields = dict(self._run_header)
        if isinstance(body, BucketBody):
            fields["Content-Length"] = str(len(body))
        elif body:
            fields["Content-Type"] = "application/json"

        if self._token and http is self._proven:
            fields["Authorization"] = f"Bearer {self._token}"

        try:
            return http.request(
                method,
                path,
                headers=fields,
                content=body,
                timeout_s=self.timeout_s if timeout_s is None else timeout_s,
                max_bytes=max_bytes,
            )
        except NoAnswer as error:
            # Only the time of long requests is the user's to choose.
            is_patience_over = timeout_s is None and error.status == TIMED_OUT
            way_out = PATIENCE if is_patience_over else ""
            raise ReplicaError(self.name, error.status, f"{error}{way_out}") from error


def _json_bytes(value: object) -> bytes:
    # Unescaped: a prompt in another script would be three times as long.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _json(answer: Answer) -> object:
    """Return the body's JSON value, None where it is none."""
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _message(answer: Answer) -> str:
    """Return the text of the replica's {"error": text}, else the beginning of the body."""
    body = _json(answer) if answer.content_type.startswith("application/json") else None
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return body["error"]
    return answer.body[:500].decode("utf-8", errors="replace")
