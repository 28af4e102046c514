"""The HTTP surface of a replica: the RL routes and /health, behind the guard."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from megadiff.rollout.proof import REPLICA, TRAINER, is_valid, sign
from megadiff.rollout.server.body import read_json
from megadiff.rollout.server.guard import Guard, refusal
from megadiff.rollout.server.owner import RUN_CHARS, RUN_HEADER
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.rollout.wire import requests_from_json
from megadiff.tensors.lora_names import lora_from_json

logger = logging.getLogger(__name__)
HELLO_BYTES = 2**12  # of a body that is read before its sender has proved anything


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
                "run": replica.owner.run,
                "in_flight": replica.in_flight,
                "arithmetic": replica.arithmetic,
                "vllm_omni": version("vllm-omni"),
            }
        )

    @router.post("/rl/generate")
    async def generate(request: Request) -> Response:
        async def answer() -> Response:
            requests = requests_from_json(await _json(request, replica))
            body, engine_s = await replica.generate(requests, request.receive, run=_run(request))
            timing = {"Server-Timing": f"engine;dur={1000 * engine_s:.2f}"}
            return Response(body, media_type="application/octet-stream", headers=timing)

        return await _answer(answer)

    @router.post("/rl/sleep")
    async def sleep(request: Request) -> Response:
        async def answer() -> Response:
            await replica.sleep(run=_run(request))
            return JSONResponse({"state": replica.policy.state})

        return await _answer(answer)

    @router.post("/rl/trim")
    async def trim(request: Request) -> Response:
        async def answer() -> Response:
            await replica.trim(run=_run(request))
            return JSONResponse({"state": replica.policy.state})

        return await _answer(answer)

    @router.post("/rl/release")
    async def release(request: Request) -> Response:
        async def answer() -> Response:
            return JSONResponse({"released": replica.owner.release(_run(request))})

        return await _answer(answer)

    _add_weights(router, replica)
    return router


def _add_weights(router: APIRouter, replica: Replica) -> None:
    """Add the routes of a push."""

    @router.get("/rl/weights/places")
    async def weights_places() -> JSONResponse:
        return JSONResponse({"workers": replica.places})

    @router.post("/rl/weights/begin")
    async def weights_begin(request: Request) -> Response:
        async def answer() -> Response:
            body = await _json(request, replica)
            version, manifest = _key(body, "version", int), _key(body, "manifest", dict)
            transport = _key(body, "transport", dict) if "transport" in body else {"name": "http"}
            lora = lora_from_json(body.get("lora"))
            await replica.weights_begin(version, manifest, lora, transport, run=_run(request))
            return JSONResponse({"version": version, "num_tensors": len(manifest)})

        return await _answer(answer)

    @router.post("/rl/weights/bucket")
    async def weights_bucket(request: Request) -> Response:
        async def answer() -> Response:
            if request.headers.get("content-type", "").startswith("application/json"):
                source = await _json(request, replica)
                names = await replica.weights_bucket_at(source, run=_run(request))
            else:
                names = await replica.weights_bucket(request.receive, run=_run(request))
            return JSONResponse({"names": names})

        return await _answer(answer)

    @router.post("/rl/weights/commit")
    async def weights_commit(request: Request) -> Response:
        async def answer() -> Response:
            version = _key(await _json(request, replica), "version", int)
            workers = await replica.weights_commit(version, run=_run(request))
            return JSONResponse({"version": version, "workers": workers})

        return await _answer(answer)


def _hello_router(replica: Replica, *, token: str | None, url: str) -> APIRouter:
    router = APIRouter()

    @router.post("/rl/hello")
    async def hello(request: Request) -> Response:
        async def answer() -> Response:
            body = await read_json(request.receive, HELLO_BYTES)
            nonce = _key(body, "nonce", str)
            proof = _key(body, "proof", str)
            answer_proof = _own_proof(nonce, proof, token=token, url=url)
            return JSONResponse({"nonce": nonce, "proof": answer_proof})

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
        return refusal(error.status, str(error))
    except ValueError as error:
        return refusal(400, str(error))
    except ConnectionError as error:
        return refusal(400, str(error))  # read by nobody
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return refusal(
            507,
            f"no space left for the weight bucket: {error}; send smaller buckets (sync.bucket_mib)",
        )
    except RuntimeError as error:  # how vllm-omni reports a failed worker or engine
        logger.exception("request failed")
        return refusal(500, f"{type(error).__name__}: {error}; see the replica's log")


async def _json(request: Request, replica: Replica) -> Any:
    return await read_json(request.receive, replica.limits.json_bytes)


def _run(request: Request) -> str:
    """Return the run that asks, "" where it has no name. Raises ValueError for what is no name."""
    run = request.headers.get(RUN_HEADER, "")
    if len(run) > RUN_CHARS or not run.isprintable():
        raise ValueError(
            f"{RUN_HEADER}={run!r:.60} must be at most {RUN_CHARS} printable characters"
        )
    return run


def _key(body: object, key: str, kind: type) -> Any:
    value = body.get(key) if isinstance(body, dict) else None
    if type(value) is not kind:
        raise ValueError(f"the body needs {key!r} of type {kind.__name__}, got {value!r:.200}")
    return value
