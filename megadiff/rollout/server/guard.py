"""Stand in front of every route of a replica: the token, deadlines of bodies, bounds of images."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse

from megadiff.rollout.server.body import PromptBody
from megadiff.rollout.server.images import IMAGES_PATH, ImageDoor
from megadiff.rollout.server.owner import RUN_HEADER
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica

OPEN_PATHS = ("/health", "/rl/hello")  # no token needed


def refusal(status: int, message: str) -> JSONResponse:
    """Return the answer of a request that is not served.

    After 408 the connection is of no use, and after 401 it is a stranger's.
    """
    headers = {"connection": "close"} if status in (401, 408) else None
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _closing(send: Any) -> Any:
    """Let a connection end with its answer: idle ones of strangers would use up all descriptors."""

    async def send_and_close(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_close


class Guard:
    """ASGI wrapper in front of all routes."""

    def __init__(self, app: Any, *, replica: Replica, token: str | None) -> None:
        self.app = app
        self.replica = replica
        self.token = token
        self._images = ImageDoor(app, replica)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return None  # uvicorn is told to make no websockets, and there is no lifespan
        headers = dict(scope["headers"])
        if self._is_authorized(headers):
            run = headers.get(RUN_HEADER.encode(), b"").decode("latin-1")
            if run:  # a monitor or a person without a name must not keep the unnamed run alive
                self.replica.owner.hear(run)
        elif scope["path"] not in OPEN_PATHS:
            # before a byte of the body is read
            answer = refusal(
                401,
                "this replica needs the header `Authorization: Bearer <token>`, with the token of "
                "its MEGADIFF_TOKEN or --token-file",
            )
            return await answer(scope, receive, send)
        elif scope["path"] == "/health":
            send = _closing(send)
        body = PromptBody(receive)
        if scope["path"] != IMAGES_PATH or scope["method"] != "POST":
            return await self.app(scope, body, send)
        try:
            return await self._images(scope, body, send)
        except Refused as error:
            answer = refusal(error.status, str(error))
        except ValueError as error:
            answer = refusal(400, str(error))
        except ConnectionError:
            return None  # nobody is there to read an answer
        return await answer(scope, receive, send)

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self.token is None:
            return True
        given = headers.get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())
