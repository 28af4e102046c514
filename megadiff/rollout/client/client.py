"""A replica seen from the trainer: a synchronous HTTP client, for any number of threads.

It imports neither vLLM nor vllm-omni.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from megadiff.rollout.client.bounded_http import (
    Answer,
    AnswerTooLarge,
    AnswerTooLate,
    BoundedHttp,
    Exchange,
    NoAnswer,
)
from megadiff.rollout.limits import RUN_HEADER
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
from megadiff.tensors.manifest import Manifest
from megadiff.types import LoraSpec, RolloutGroup, RolloutRequest

HEALTH_TIMEOUT_S = 2.0
HELLO_TIMEOUT_S = 30.0  # in the middle of a run, when the replica may be busy
RELEASE_TIMEOUT_S = 2.0
TIMED_OUT = 504  # the status of an answer that did not come: the replica may be alive, and busy
UNUSABLE = 502  # the status of an answer that is too large, or not what was asked for
SMALL_BYTES = 2**20  # of an answer from an address that has proved nothing yet
JSON_BYTES = 2**26  # the fingerprints of a large model's tensors, of several workers, are some MiB
CONDITIONING_BYTES = 2**28  # of a group's embeddings and masks
PATIENCE = (
    ", time in its queue included; raise rollout.request_timeout_s, or use a smaller "
    "rollout.batch_size or more replicas"
)


class ReplicaError(RuntimeError):
    """A replica refused a request (status: its HTTP status), or did not answer (status None)."""

    def __init__(self, name: str, status: int | None, message: str) -> None:
        answered = "" if status is None else f" answered {status}"
        super().__init__(f"{name}{answered}: {message}")
        self.name = name
        self.status = status
        self.message = message


class NotProven(ReplicaError):
    """Trainer and replica did not show each other that they have the same token, or both none."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, None, message)
        self.status = 401


class ReplicaClient:
    """Talk to one replica. The token goes to an address only after that has proved to know it.

    url: http://host:port, as the replica announced it. timeout_s: of one request, generation and
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

    def health(self) -> dict[str, Any]:
        """Return what /health says, to anybody.

        name, policy_version, state (ready | updating | asleep), in_flight, arithmetic (fp8,
        float32_streams), vllm_omni.
        """
        answer = self._send("GET", "/health", timeout_s=HEALTH_TIMEOUT_S, max_bytes=SMALL_BYTES)
        return self._json_object(answer, "GET /health")

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

        def exchange(path: str, body: bytes) -> Answer:
            fields = {"Content-Type": "application/json", **self._run_header}
            return self._request(
                self._open, "POST", path, body, fields, timeout_s=timeout_s, max_bytes=SMALL_BYTES
            )

        self._greet(exchange)

    def _greet(self, exchange: Exchange) -> None:
        """Exchange proofs with whatever is at the other end. Raises NotProven."""
        nonce = new_nonce()
        proof = sign(self._token, role=TRAINER, nonce=nonce, url=self.url) if self._token else ""
        answer = exchange("/rl/hello", json.dumps({"nonce": nonce, "proof": proof}).encode())
        if answer.status == 404:
            raise NotProven(
                self.name, "it has no /rl/hello; start it with this version of megadiff"
            )
        if answer.status >= 400:
            raise NotProven(self.name, f"it refused the trainer's proof: {_message(answer)!r:.300}")
        value = _json(answer)
        theirs = value.get("proof") if isinstance(value, dict) else None
        expected = {"role": REPLICA, "nonce": nonce, "url": self.url}
        if self._token and not is_valid(theirs, self._token, **expected):
            raise NotProven(
                self.name,
                f"what answers at {self.url} did not prove that it knows the trainer's token "
                "(MEGADIFF_TOKEN); it gets neither token nor weights",
            )

    def say_alive(self) -> None:
        """Let the replica know, through an update of any length, that this run works with it."""
        self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S, max_bytes=SMALL_BYTES)

    def release(self) -> None:
        """Tell the replica that this run is over, so that another may take it at once."""
        self._call("POST", "/rl/release", timeout_s=RELEASE_TIMEOUT_S)

    def generate(self, request: RolloutRequest) -> RolloutGroup:
        """Return the group of one request. A 409 tells of another policy version than asked."""
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Return the groups of requests of equal sampling, drawn as one batch, in order."""
        value = requests_to_json(requests)
        limit = groups_bytes(requests)
        return decode_groups(self._call("POST", "/rl/generate", value=value, max_bytes=limit).body)

    def weights_places(self) -> list[dict[str, Any]]:
        """Return each worker's host, device and boxes.

        boxes: the part [begin, end) per dimension that it has of a base tensor. A tensor that boxes
        does not name is there whole.
        """
        return self._workers("GET", "/rl/weights/places")

    def weights_begin(
        self,
        version: int,
        manifest: Manifest,
        *,
        lora: LoraSpec | None = None,
        transport: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a push; from here to the commit the replica does not generate.

        transport: how buckets come, if not as the bodies of requests.
        """
        value = {
            "version": version,
            "manifest": manifest,
            "lora": dataclasses.asdict(lora) if lora else None,
            "transport": transport or {"name": "http"},
        }
        self._call("POST", "/rl/weights/begin", value=value)

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        """Send a bucket chunk by chunk, without a copy of the whole, or tell where it lies."""
        body = {"content": bucket} if isinstance(bucket, BucketBody) else {"value": bucket}
        self._call("POST", "/rl/weights/bucket", **body)

    def weights_commit(self, version: int) -> list[dict[str, Any]]:
        """Close a push and return what each worker holds.

        fingerprints: name → digits, of all that it now uses. bound_modules: of the LoRA.
        """
        return self._workers("POST", "/rl/weights/commit", value={"version": version})

    def sleep(self) -> None:
        """Free the memory of all weights; a push of all of the policy's wakes it."""
        self._call("POST", "/rl/sleep")

    def trim(self) -> None:
        """Give memory back that the allocator keeps of earlier samples."""
        self._call("POST", "/rl/trim")

    def _workers(self, method: str, path: str, **arguments: Any) -> list[dict[str, Any]]:
        answer = self._json_object(self._call(method, path, **arguments), f"{method} {path}")
        if not isinstance(answer.get("workers"), list):
            message = f"{method} {path} names no workers; start it with this version of megadiff"
            raise ReplicaError(self.name, UNUSABLE, message)
        return answer["workers"]

    def _call(self, method: str, path: str, **arguments: Any) -> Answer:
        """Send a request that may carry the token, over a connection that began with a proof."""
        bearer = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return self._send(method, path, http=self._proven, headers=bearer, **arguments)

    def _send(
        self,
        method: str,
        path: str,
        *,
        http: BoundedHttp | None = None,
        value: object = None,
        content: BucketBody | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_bytes: int = JSON_BYTES,
    ) -> Answer:
        """Send value as JSON, or content as it is. Raises ReplicaError, also for a refusal."""
        body: bytes | BucketBody = b""
        fields = {**self._run_header, **(headers or {})}
        if content is not None:
            body = content
            fields["Content-Length"] = str(len(content))
        elif value is not None:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            body = text.encode()
            fields["Content-Type"] = "application/json"
        answer = self._request(
            http or self._open,
            method,
            path,
            body,
            fields,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
        )
        if answer.status >= 400:
            raise ReplicaError(self.name, answer.status, _message(answer))
        return answer

    def _request(
        self,
        http: BoundedHttp,
        method: str,
        path: str,
        body: bytes | BucketBody,
        fields: Mapping[str, str],
        *,
        timeout_s: float | None,
        max_bytes: int,
    ) -> Answer:
        """Return the answer, whatever its status. Raises ReplicaError where there is none."""
        try:
            return http.request(
                method,
                path,
                headers=fields,
                content=body,
                timeout_s=self.timeout_s if timeout_s is None else timeout_s,
                max_bytes=max_bytes,
            )
        except AnswerTooLate as error:
            way_out = PATIENCE if timeout_s is None else ""
            raise ReplicaError(self.name, TIMED_OUT, f"{error}{way_out}") from error
        except AnswerTooLarge as error:
            raise ReplicaError(self.name, UNUSABLE, str(error)) from error
        except NoAnswer as error:
            raise ReplicaError(self.name, None, str(error)) from error

    def _json_object(self, answer: Answer, asked: str) -> dict[str, Any]:
        value = _json(answer)
        if not isinstance(value, dict):
            message = f"{asked} answers no JSON object: {answer.body[:80]!r}"
            raise ReplicaError(self.name, UNUSABLE, message)
        return value


def groups_bytes(requests: Sequence[RolloutRequest]) -> int:
    """Return how many bytes an answer with the groups of these requests may have, generously.

    A sample has its pixels in uint8, and a latent state for each step that is recorded. 16 bytes a
    pixel and state are enough for a model that diffuses pixels in float32; latents have 1 to 4.
    """
    total = JSON_BYTES
    for request in requests:
        sampling = request.sampling
        pixels = sampling.height * sampling.width * sampling.num_frames
        states = sampling.num_inference_steps + 2
        total += CONDITIONING_BYTES + len(request.sample_indices) * pixels * (3 + 16 * states)
    return total


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
