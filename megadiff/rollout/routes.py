"""The HTTP surface of a replica: RL routes, /health, and the guard in front of every route."""

from __future__ import annotations

import errno
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from megadiff.rollout.policy import Refused
from megadiff.rollout.proof import REPLICA, TRAINER, is_valid, sign
from megadiff.rollout.replica import Replica
from megadiff.rollout.wire import requests_from_json
from megadiff.weights.lora_names import lora_from_json

logger = logging.getLogger(__name__)
OPEN_PATHS = ("/health", "/rl/hello")  # no token needed
HELLO_BYTES = 2**12  # of a body that is read before its sender has proved anything
RL_PREFIX = "/rl/"  # these check the state themselves; any other POST may run the policy


def replica_app(app: FastAPI, replica: Replica, *, token: str | None, url: str = "") -> Guard:
    """vllm-omni's app with the RL routes and /health, behind the guard.

    url: as announced; proofs are tied to it.
    """
    app.include_router(_router(replica))
    app.include_router(_hello_router(replica, token=token, url=url))
    return Guard(app, replica=replica, token=token)


def _router(replica: Replica) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(
            {
                "name": replica.name,
                "policy_version": replica.policy.version,
                "state": replica.policy.state,
                "in_flight": replica.in_flight,
                "arithmetic": replica.arithmetic,
                "vllm_omni": version("vllm-omni"),
            }
        )

    @router.post("/rl/generate")
    async def generate(request: Request) -> Response:
        async def answer() -> Response:
            body, engine_s = await replica.generate(requests_from_json(await _json(request, replica)))
            timing = {"Server-Timing": f"engine;dur={1000 * engine_s:.2f}"}
            return Response(body, media_type="application/octet-stream", headers=timing)

        return await _answer(answer)

    @router.get("/rl/weights/places")
    async def weights_places() -> JSONResponse:
        return JSONResponse({"workers": replica.places})

    @router.post("/rl/weights/begin")
    async def weights_begin(request: Request) -> Response:
        async def answer() -> Response:
            body = await _json(request, replica)
            version, manifest = _key(body, "version", int), _key(body, "manifest", dict)
            transport = _key(body, "transport", dict) if "transport" in body else {"name": "http"}
            await replica.weights_begin(version, manifest, lora_from_json(body.get("lora")), transport)
            return JSONResponse({"version": version, "num_tensors": len(manifest)})

        return await _answer(answer)

    @router.post("/rl/weights/bucket")
    async def weights_bucket(request: Request) -> Response:
        async def answer() -> Response:
            if request.headers.get("content-type", "").startswith("application/json"):
                names = await replica.weights_bucket_at(await _json(request, replica))
            else:
                names = await replica.weights_bucket(request.stream())
            return JSONResponse({"names": names})

        return await _answer(answer)

    @router.post("/rl/weights/commit")
    async def weights_commit(request: Request) -> Response:
        async def answer() -> Response:
            version = _key(await _json(request, replica), "version", int)
            return JSONResponse({"version": version, "workers": await replica.weights_commit(version)})

        return await _answer(answer)

    @router.post("/rl/sleep")
    async def sleep() -> Response:
        async def answer() -> Response:
            await replica.sleep()
            return JSONResponse({"state": replica.policy.state})

        return await _answer(answer)

    @router.post("/rl/trim")
    async def trim() -> Response:
        async def answer() -> Response:
            await replica.trim()
            return JSONResponse({"state": replica.policy.state})

        return await _answer(answer)

    return router


def _hello_router(replica: Replica, *, token: str | None, url: str) -> APIRouter:
    router = APIRouter()

    @router.post("/rl/hello")
    async def hello(request: Request) -> Response:
        async def answer() -> Response:
            body = await _json(request, replica, max_bytes=HELLO_BYTES)
            nonce, proof = _key(body, "nonce", str), _key(body, "proof", str)
            own = _own_proof(nonce, proof, token=token, url=url)
            return JSONResponse({"nonce": nonce, "proof": own})

        return await _answer(answer)

    return router


def _own_proof(nonce: str, proof: str, *, token: str | None, url: str) -> str:
    """Sign this replica's url for a trainer that has proved itself; '' where neither has a token.

    Raises Refused(401).
    """
    way_out = "start both with the same MEGADIFF_TOKEN"
    if token is None:
        if proof:
            raise Refused(401, f"this replica has no token and the trainer has one; {way_out}")
        return ""
    if not proof:
        raise Refused(401, f"this replica has a token and the trainer has none; {way_out}")
    if not is_valid(proof, token, role=TRAINER, nonce=nonce, url=url):
        # Without this check it would sign for anybody, and the signature could be passed on.
        raise Refused(401, f"the trainer has another token, or does not call it {url}; {way_out}")
    return sign(token, role=REPLICA, nonce=nonce, url=url)


async def _answer(handler: Callable[[], Awaitable[Response]]) -> Response:
    """Turns each kind of failure into a status and a text; the replica lives on."""
    try:
        return await handler()
    except Refused as error:
        return _error(error.status, str(error))
    except ValueError as error:
        return _error(400, str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _error(507, f"no space left for the weight bucket: {error}; send smaller buckets (sync.bucket_mib)")
    except RuntimeError as error:  # how vllm-omni reports a failed worker or engine
        logger.exception("request failed")
        return _error(500, f"{type(error).__name__}: {error}; see the replica's log")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


async def _json(request: Request, replica: Replica, *, max_bytes: int | None = None) -> Any:
    """The body's JSON value. Raises Refused(413) past the limit and ValueError when it is not JSON."""
    max_bytes = max_bytes or replica.limits.json_bytes
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            message = f"the JSON body exceeds {max_bytes} bytes; send fewer requests at once"
            raise Refused(413, message)
    try:
        return json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def _key(body: object, key: str, kind: type) -> Any:
    value = body.get(key) if isinstance(body, dict) else None
    if type(value) is not kind:
        raise ValueError(f"the body needs {key!r} of type {kind.__name__}, got {value!r:.200}")
    return value


class Guard:
    """ASGI wrapper in front of all routes, vllm-omni's too: the bearer token, and no generation while weights move."""

    def __init__(self, app: Any, *, replica: Replica, token: str | None) -> None:
        self.app, self.replica, self.token = app, replica, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        refusal = self._unauthorized(scope)
        if refusal is None and not _generates(scope):
            return await self.app(scope, receive, send)
        if refusal is None:
            try:
                async with self.replica.generating():
                    return await self.app(scope, receive, send)
            except Refused as error:
                refusal = _error(error.status, str(error))
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        return await refusal(scope, receive, send)

    def _unauthorized(self, scope: Any) -> JSONResponse | None:
        if self.token is None or scope["path"] in OPEN_PATHS:
            return None
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return None
        return _error(401, "this replica needs the header `Authorization: Bearer <token>`, as given to serve --token")


def _generates(scope: Any) -> bool:
    is_call = scope["type"] == "websocket" or scope["method"] == "POST"
    return is_call and not scope["path"].startswith(RL_PREFIX)
