"""Serve the HTTP routes of a replica: the RL routes and /health, behind the guard."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from megadiff.process.versions import sampling_code
from megadiff.rollout.limits import OUTSTANDING_HEADER, RUN_CHARS, RUN_HEADER
from megadiff.rollout.proof import REPLICA, TRAINER, is_valid, sign
from megadiff.rollout.server.body import read_json
from megadiff.rollout.server.guard import Guard, refusal
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.rollout.server.scrape import replica_registry
from megadiff.rollout.wire import requests_from_json
from megadiff.tensors.lora_names import lora_from_json

logger = logging.getLogger(__name__)
HELLO_BYTES = 2**12  # of a body that is read before its sender has proved anything
# A handler answers with a JSON value, or with a Response of its own.
Handler = Callable[[Request], Awaitable[Any]]


def replica_app(app: FastAPI, replica: Replica, *, token: str | None, url: str = "") -> Guard:
    """Return vllm-omni's app with the RL routes, /health and /metrics, behind the guard.

    url: as announced; proofs are tied to it.
    """
    _add_rollout(app, replica)
    _add_weights(app, replica)
    _add_hello(app, token=token, url=url)
    _add_scrape(app, replica)
    return Guard(app, replica=replica, token=token)


def _route(app: FastAPI, method: str, path: str) -> Callable[[Handler], None]:
    """Return a decorator that serves a handler; its failures become answers."""

    def register(handler: Handler) -> None:
        async def answered(request: Request) -> Response:
            return await _answer(handler, request)

        # Without a response model FastAPI sends what comes, and checks nothing of it.
        app.add_api_route(path, answered, methods=[method], response_model=None)

    return register


def _add_rollout(app: FastAPI, replica: Replica) -> None:
    @_route(app, "GET", "/health")
    async def health(request: Request) -> Any:
        spec = replica.spec
        return {
            "name": spec.name,
            "policy_version": replica.policy.version,
            "state": replica.policy.state,
            "run": replica.owner.run,
            "is_taken": replica.owner.is_taken(_run(request)),
            "engine_silent_s": replica.progress.silent_s(),
            "in_flight": replica.load.num_calls,
            "outstanding": replica.load.num_samples,
            # A trainer that computes otherwise would see a parity gap without a cause.
            "arithmetic": {
                "code": sampling_code(),
                "dtype": spec.dtype,
                "fp8": spec.fp8,
                "float32_streams": spec.float32_streams,
            },
            "vllm_omni": version("vllm-omni"),
        }

    @_route(app, "POST", "/rl/generate")
    async def generate(request: Request) -> Any:
        requests = requests_from_json(await _json(request, replica))
        body, engine_s, queue_s = await replica.generate(
            requests, request.receive, run=_run(request)
        )
        headers = {
            "Server-Timing": f"engine;dur={1e3 * engine_s:.2f}, queue;dur={1e3 * queue_s:.2f}",
            OUTSTANDING_HEADER: str(replica.load.num_samples),
        }
        return Response(body, media_type="application/octet-stream", headers=headers)

    @_route(app, "POST", "/rl/sleep")
    async def sleep(request: Request) -> Any:
        await replica.sleep(run=_run(request))
        return {"state": replica.policy.state}

    @_route(app, "POST", "/rl/trim")
    async def trim(request: Request) -> Any:
        await replica.ask_workers("trim", run=_run(request))
        return {"state": replica.policy.state}

    @_route(app, "POST", "/rl/trace/begin")
    async def trace_begin(request: Request) -> Any:
        await replica.ask_workers("begin_trace", run=_run(request))
        return {}

    @_route(app, "POST", "/rl/trace/end")
    async def trace_end(request: Request) -> Any:
        trace = await replica.end_trace(run=_run(request))
        return Response(trace, media_type="application/gzip")

    @_route(app, "POST", "/rl/release")
    async def release(request: Request) -> Any:
        return {"released": replica.owner.release(_run(request))}


def _add_weights(app: FastAPI, replica: Replica) -> None:
    """Add the routes of a push."""

    @_route(app, "GET", "/rl/weights/places")
    async def weights_places(_: Request) -> Any:
        return {"workers": replica.workers}

    @_route(app, "POST", "/rl/weights/begin")
    async def weights_begin(request: Request) -> Any:
        body = await _json(request, replica)
        version = _key(body, "version", int)
        manifest = _key(body, "manifest", dict)
        transport = _key(body, "transport", dict) if "transport" in body else {"name": "http"}
        lora = lora_from_json(body.get("lora"))
        await replica.weights_begin(version, manifest, lora, transport, run=_run(request))
        return {"version": version, "num_tensors": len(manifest)}

    @_route(app, "POST", "/rl/weights/bucket")
    async def weights_bucket(request: Request) -> Any:
        if request.headers.get("content-type", "").startswith("application/json"):
            source = await _json(request, replica)
            await replica.weights_bucket_at(source, run=_run(request))
        else:
            await replica.weights_bucket(request.receive, run=_run(request))
        return {"state": replica.policy.state}

    @_route(app, "POST", "/rl/weights/commit")
    async def weights_commit(request: Request) -> Any:
        body = await _json(request, replica)
        version = _key(body, "version", int)
        digests = _key(body, "digests", list) if "digests" in body else []
        workers = await replica.weights_commit(version, digests, run=_run(request))
        return {"version": version, "workers": workers}


def _add_hello(app: FastAPI, *, token: str | None, url: str) -> None:
    @_route(app, "POST", "/rl/hello")
    async def hello(request: Request) -> Any:
        body = await read_json(request.receive, HELLO_BYTES)
        nonce = _key(body, "nonce", str)
        proof = _key(body, "proof", str)

        problem = ""
        if token is None and proof:
            problem = "this replica has no token and the trainer has one"
        elif token is not None and not proof:
            problem = "this replica has a token and the trainer has none"
        elif token is not None and not is_valid(proof, token, role=TRAINER, nonce=nonce, url=url):
            # Without this check it would sign for anybody, and the signature could be passed on.
            problem = f"the trainer has another token, or does not call it {url}"

        if problem:
            raise Refused(401, f"{problem}; start both with the same MEGADIFF_TOKEN")

        # Where neither has a token there is nothing to prove.
        signature = sign(token, role=REPLICA, nonce=nonce, url=url) if token is not None else ""
        return {"nonce": nonce, "proof": signature}


def _add_scrape(app: FastAPI, replica: Replica) -> None:
    registry = replica_registry(replica)

    @_route(app, "GET", "/metrics")
    async def metrics(_: Request) -> Any:
        # In a thread: walking through /proc would hold up every other answer.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _answer(handler: Callable[..., Awaitable[Any]], *arguments: Request) -> Response:
    """Turn each kind of failure into a status and a text; the replica lives on."""
    try:
        answer = await handler(*arguments)
        return answer if isinstance(answer, Response) else JSONResponse(answer)
    except (Refused, ValueError, ConnectionError) as error:  # nobody reads that of the last
        return refusal(error)
    # RuntimeError: how vllm-omni reports a failed worker or engine
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            message = f"no space left for the weight bucket: {error}; send smaller buckets"
            return refusal(Refused(507, f"{message} (sync.bucket_mib)"))
        logger.exception("request failed")
        message = f"{type(error).__name__}: {error}; see the replica's log"
        return refusal(Refused(500, message))


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
    """Return a key's value. Raises ValueError where it is missing or of another type."""
    value = body.get(key) if isinstance(body, dict) else None
    # not isinstance(): true is an int to Python
    if type(value) is not kind:
        raise ValueError(f"the body needs {key!r} of type {kind.__name__}, got {value!r:.200}")
    return value
