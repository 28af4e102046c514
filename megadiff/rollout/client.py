"""A replica seen from the trainer: a synchronous HTTP client. Thread-safe; imports neither vLLM nor vllm-omni."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from megadiff.rollout.wire import decode_groups, requests_to_json
from megadiff.types import LoraSpec, RolloutGroup, RolloutRequest
from megadiff.weights.bucket import BucketBody
from megadiff.weights.manifest import Manifest

CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 2.0
TIMED_OUT = 504  # the status of an answer that did not come: the replica may be alive, and busy


class ReplicaError(RuntimeError):
    """A replica refused a request (status: its HTTP status), or did not answer (status None)."""

    def __init__(self, name: str, status: int | None, message: str) -> None:
        super().__init__(f"{name}: {message}" if status is None else f"{name} answered {status}: {message}")
        self.name, self.status, self.message = name, status, message


class ReplicaClient:
    """url: http://host:port. timeout_s: of one request, generation and weight loading included."""

    def __init__(self, url: str, name: str, *, token: str | None = None, timeout_s: float = 1800.0) -> None:
        self.url, self.name = url, name
        self._patience = (
            f"{timeout_s:.0f} s, time in its queue included; raise rollout.request_timeout_s, or use a smaller "
            "rollout.batch_size or more replicas"
        )
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # replicas are reached directly, whatever proxy the environment names
        )

    def close(self) -> None:
        self._http.close()

    def health(self) -> dict[str, Any]:
        """name, policy_version, state (ready | updating | asleep), in_flight, arithmetic (fp8, float32_streams), vllm_omni."""
        return self._call("GET", "/health", timeout=HEALTH_TIMEOUT_S).json()

    def health_if_up(self) -> dict[str, Any] | None:
        """health(), None where no replica of this name answers within HEALTH_TIMEOUT_S; one that still loads does not."""
        try:
            health = self.health()
            return health if health["name"] == self.name else None
        except (ReplicaError, ValueError, KeyError, TypeError):  # something else listens there
            return None

    def generate(self, request: RolloutRequest) -> RolloutGroup:
        """The group of one request. A 409 tells that the replica holds another policy version than asked."""
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """The groups of requests of equal sampling, drawn as one batch, in the order of the requests."""
        return decode_groups(self._call("POST", "/rl/generate", json=requests_to_json(requests)).content)

    def weights_places(self) -> list[dict[str, Any]]:
        """Of each worker: host, device, and boxes, the part [begin, end) per dimension that it has of a base tensor; a
        tensor that boxes does not name is there whole."""
        return self._call("GET", "/rl/weights/places").json()["workers"]

    def weights_begin(
        self,
        version: int,
        manifest: Manifest,
        *,
        lora: LoraSpec | None = None,
        transport: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens a push; from here to the commit the replica does not generate. transport: how buckets come, if not as the
        bodies of requests."""
        value = {"version": version, "manifest": manifest, "lora": dataclasses.asdict(lora) if lora else None}
        self._call("POST", "/rl/weights/begin", json=value | {"transport": transport or {"name": "http"}})

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        """A bucket, or where the replica finds it. A body goes chunk by chunk: of a large one httpx would copy all the rest
        for every piece that the socket takes."""
        if isinstance(bucket, BucketBody):
            body = {"content": bucket, "headers": {"Content-Length": str(len(bucket))}}
        else:
            body = {"json": bucket}
        self._call("POST", "/rl/weights/bucket", **body)

    def weights_commit(self, version: int) -> list[dict[str, Any]]:
        """Of each worker: fingerprints (name → digits, of all that it now uses) and bound_modules (of the LoRA)."""
        return self._call("POST", "/rl/weights/commit", json={"version": version}).json()["workers"]

    def sleep(self) -> None:
        """Free the memory of all weights; a push of all of the policy's wakes it."""
        self._call("POST", "/rl/sleep")

    def trim(self) -> None:
        """Give memory back that the allocator keeps of earlier samples."""
        self._call("POST", "/rl/trim")

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.ReadTimeout as error:
            raise ReplicaError(
                self.name, TIMED_OUT, f"{method} {path} had no answer in time: {self._patience}"
            ) from error
        except httpx.HTTPError as error:
            raise ReplicaError(self.name, None, f"{method} {self.url}{path} failed: {error!r}") from error
        if response.is_error:
            raise ReplicaError(self.name, response.status_code, _message(response))
        return response


def _message(response: httpx.Response) -> str:
    """The text of the replica's {"error": text}, else the beginning of the body."""
    if response.headers.get("content-type", "").startswith("application/json"):
        body = response.json()
        if isinstance(body, dict) and isinstance(body.get("error"), str):
            return body["error"]
    return response.text[:500]
