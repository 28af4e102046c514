"""Keep the OpenAI images API in bounds: what it may be asked for, and for how long."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from megadiff.models.pipeline_base import NO_LORA_REQUESTS
from megadiff.models.pipeline_stop import STOP_KEY
from megadiff.rollout.limits import Limits
from megadiff.rollout.server.body import read_json
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.rollout.server.requests import check_count, check_text
from megadiff.rollout.wire import read_record

logger = logging.getLogger(__name__)
IMAGES_PATH = "/v1/images/generations"
SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """Name all that may be asked for, with what bounds are checked against where it is left out.

    vllm-omni's other fields reach further than an image: files of the host, devices, code of other
    models. Its image models take this size by default.
    """

    prompt: str = ""
    negative_prompt: str = ""
    model: str = ""
    user: str = ""
    n: int = 1
    size: str = "1024x1024"
    num_inference_steps: int = 50
    seed: int = 0
    guidance_scale: float = 1.0
    true_cfg_scale: float = 1.0
    response_format: str = ""
    output_format: str = ""


def check_image_request(body: object, limits: Limits) -> dict[str, Any]:
    """Return the request without its null fields.

    Raises ValueError for the first rule that it breaks.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body is a {type(body).__name__}; it must be a JSON object")

    # OpenAI's clients send null for what they leave out.
    given = {name: value for name, value in body.items() if value is not None}
    if "lora" in given:
        raise ValueError(NO_LORA_REQUESTS)

    request = read_record(ImageRequest, given, "request")
    if not request.prompt:
        raise ValueError("the body needs 'prompt', a text that is not empty")
    check_text("prompt", request.prompt, limits.prompt_chars)
    check_text("negative prompt", request.negative_prompt, limits.prompt_chars)
    _check_work(request, limits)
    return given


def _check_work(request: ImageRequest, limits: Limits) -> None:
    size = SIZE.fullmatch(request.size)
    if size is None:
        raise ValueError(f"size={request.size!r:.40} must be WIDTHxHEIGHT in pixels, as 512x512")

    width, height = map(int, size.groups())
    check_count("width", width, limits.side)
    check_count("height", height, limits.side)
    check_count("n", request.n, limits.images)
    check_count("num_inference_steps", request.num_inference_steps, limits.image_steps)

    num_pixels = width * height * request.n
    if num_pixels > limits.image_pixels:
        raise ValueError(
            f"{request.n} images of {width}x{height} are {num_pixels} pixels, a request takes at "
            f"most {limits.image_pixels}; ask for fewer or smaller images"
        )

    work = num_pixels * request.num_inference_steps
    if work > limits.image_work:
        raise ValueError(
            f"{num_pixels} pixels times {request.num_inference_steps} steps are {work}, a request "
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

    num_images = request.get("n", 1)
    replica.num_image_calls += 1
    try:
        async with (
            replica.generating(num_images),
            replica.stoppable(receive, timeout_s=limits.image_answer_s) as stop,
        ):
            stoppable = request | {"extra_params": {STOP_KEY: str(stop.path)}}
            # A run's calls behind it wait: the engine may compile for this size.
            with replica.progress.drawing(_shape(request)) as note_samples:
                answer = await _vllm_omni_answer(app, scope, stoppable)
                if stop.reason:
                    raise Refused(503, f"the image was given up: {stop.reason}")
                if not answer:
                    raise Refused(500, "see the replica's log")
                if answer[0].get("status") == 200:  # otherwise it says why
                    note_samples()
                    replica.load.num_drawn += num_images
    finally:
        replica.num_image_calls -= 1

    for message in answer:
        await send(message)


def _shape(request: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides how long a request takes."""
    keys = ("size", "n", "num_inference_steps", "guidance_scale", "true_cfg_scale")
    return (IMAGES_PATH, *(str(request.get(key)) for key in keys))


async def _vllm_omni_answer(app: Any, scope: Any, request: dict[str, Any]) -> list[Any]:
    """Return the messages of vllm-omni's answer once the engine is done; none where it failed."""
    body = json.dumps(request).encode()
    # The body has grown by the path of the stop file.
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
    # whatever failed in vllm-omni: the client is told to see the log
    except Exception:
        logger.exception("an image request failed")
    return answer
