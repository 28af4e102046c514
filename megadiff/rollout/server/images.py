"""Keep the OpenAI images API in bounds: what it may be asked for, and for how long."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

from megadiff.models.pipeline_base import NO_LORA_REQUESTS
from megadiff.models.pipeline_stop import STOP_KEY
from megadiff.rollout.limits import Limits
from megadiff.rollout.server.body import read_json
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.rollout.server.requests import check_count, check_text

logger = logging.getLogger(__name__)
IMAGES_PATH = "/v1/images/generations"
SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")
DEFAULT_SIDE = 1024  # where a request names no size: what vllm-omni's image models take
DEFAULT_STEPS = 50
# All others reach further than an image: files of the host, devices, code of other models.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "prompt": str,
    "negative_prompt": str,
    "model": str,
    "user": str,
    "n": int,
    "size": str,
    "num_inference_steps": int,
    "seed": int,
    "guidance_scale": (int, float),
    "true_cfg_scale": (int, float),
    "response_format": str,
    "output_format": str,
}


def check_image_request(body: object, limits: Limits) -> dict[str, Any]:
    """Return the request without its null fields.

    Raises ValueError for the first rule that it breaks.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body is a {type(body).__name__}; it must be a JSON object")
    request = {name: value for name, value in body.items() if value is not None}
    if "lora" in request:
        raise ValueError(NO_LORA_REQUESTS)
    unknown = sorted(request.keys() - FIELDS.keys())
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)[:200]}; known: {', '.join(FIELDS)}")
    for name, value in request.items():
        if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            kind = type(value).__name__
            raise ValueError(f"{name}={value!r:.60} is a {kind}; see OpenAI's images API")
    if not request.get("prompt"):
        raise ValueError("the body needs 'prompt', a text that is not empty")
    for name in ("prompt", "negative_prompt"):
        check_text(name, request.get(name, ""), limits.prompt_chars)
    _check_work(request, limits)
    return request


def _check_work(request: dict[str, Any], limits: Limits) -> None:
    size = SIZE.fullmatch(request.get("size", f"{DEFAULT_SIDE}x{DEFAULT_SIDE}"))
    if size is None:
        raise ValueError(f"size={request['size']!r:.40} must be WIDTHxHEIGHT in pixels, as 512x512")
    width, height = map(int, size.groups())
    num_images = request.get("n", 1)
    num_steps = request.get("num_inference_steps", DEFAULT_STEPS)
    bounds = {
        "width": (width, limits.side),
        "height": (height, limits.side),
        "n": (num_images, limits.images),
        "num_inference_steps": (num_steps, limits.image_steps),
    }
    for name, (value, most) in bounds.items():
        check_count(name, value, most)
    num_pixels = width * height * num_images
    if num_pixels > limits.image_pixels:
        raise ValueError(
            f"{num_images} images of {width}x{height} are {num_pixels} pixels, a request takes at "
            f"most {limits.image_pixels}; ask for fewer or smaller images"
        )
    if num_pixels * num_steps > limits.image_work:
        raise ValueError(
            f"{num_pixels} pixels times {num_steps} steps are {num_pixels * num_steps}, a request "
            f"takes at most {limits.image_work}; ask for fewer steps or images"
        )


async def answer_images(app: Any, replica: Replica, scope: Any, receive: Any, send: Any) -> None:
    """Answer one POST to IMAGES_PATH through vllm-omni's own route.

    That route sees no client and no deadline. vllm-omni's way to end a request whose client left is
    to forget it: the engine goes on, and the next call waits. Here the engine is told to stop
    (Replica.stoppable), and the request counts as in flight until it has.
    Raises Refused and ValueError for what is not taken.
    """
    limits = replica.limits
    request = check_image_request(await read_json(receive, limits.image_json_bytes), limits)
    if replica.num_image_calls >= limits.image_calls:
        raise Refused(503, f"{limits.image_calls} image requests wait already; try again later")
    replica.num_image_calls += 1
    try:
        async with (
            replica.generating(),
            replica.stoppable(receive, timeout_s=limits.image_answer_s) as stop,
        ):
            stoppable = request | {"extra_params": {STOP_KEY: str(stop.path)}}
            answer = await _vllm_omni_answer(app, scope, stoppable)
    finally:
        replica.num_image_calls -= 1
    if stop.reason:
        raise Refused(503, f"the image was given up: {stop.reason}")
    if not answer:
        raise Refused(500, "see the replica's log")
    for message in answer:
        await send(message)


async def _vllm_omni_answer(app: Any, scope: Any, request: dict[str, Any]) -> list[Any]:
    """Return the messages of vllm-omni's answer once the engine is done; none where it failed."""
    body = json.dumps(request).encode()
    others = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    headers = [*others, (b"content-length", str(len(body)).encode())]
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    answer: list[Any] = []

    async def receive() -> Any:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # never a client that leaves

    async def keep(message: Any) -> None:
        answer.append(message)

    try:
        await app(scope | {"headers": headers}, receive, keep)
    except Exception:
        logger.exception("an image request failed")
    return answer
