"""Stand in front of every route of a replica: the token, deadlines of bodies, bounds of images."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse

from megadiff.rollout.limits import RUN_HEADER
from megadiff.rollout.server.body import PromptBody
from megadiff.rollout.server.images import IMAGES_PATH, answer_images
from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica

OPEN_PATHS = ("/health", "/rl/hello")  # no token needed
NO_TOKEN = Refused(
    401,
    "this replica needs the header `Authorization: Bearer <token>`, with the token of its "
    "MEGADIFF_TOKEN or --token-file",
)


def refusal(error: Exception) -> JSONResponse:
    """Return the answer of a request that is not served: the status of a Refused, else 400."""
    status = error.status if isinstance(error, Refused) else 400
    # After 408 the connection is of no use, and after 401 it is a stranger's.
    headers = {"connection": "close"} if status in (401, 408) else None
    return JSONResponse({"error": str(error)}, status_code=status, headers=headers)


def _closing(send: Any, *, keeps_ok: bool) -> Any:
    """Let a connection end with its answer: idle ones of strangers would use up all descriptors.

    keeps_ok: not after status 200.
    """

    async def send_and_close(message: Any) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start and not (keeps_ok and message["status"] == 200):
            headers = [*message.get("headers", []), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_close


class Guard:
    """Wrap the ASGI app, in front of all routes."""

    def __init__(self, app: Any, *, replica: Replica, token: str | None) -> None:
        self.app = app
        self.replica = replica
        self.token = token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return  # uvicorn is told to make no websockets, and there is no lifespan
        headers = dict(scope["headers"])
        path = scope["path"]

        if self._is_authorized(headers):
            run = headers.get(RUN_HEADER.encode(), b"").decode("latin-1")
            if run:  # a monitor or a person without a name must not keep the unnamed run alive
                self.replica.owner.hear(run)
        elif path not in OPEN_PATHS:
            # before a byte of the body is read
            return await refusal(NO_TOKEN)(scope, receive, send)
        else:
            # /rl/hello is followed by calls, unless it was refused
            send = _closing(send, keeps_ok=path == "/rl/hello")

        body = PromptBody(receive)
        if path != IMAGES_PATH or scope["method"] != "POST":
            return await self.app(scope, body, send)

        try:
            await answer_images(self.app, self.replica, scope, body, send)
        except (Refused, ValueError) as error:
            await refusal(error)(scope, receive, send)
        except ConnectionError:
            pass  # nobody is there to read an answer

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self.token is None:
            return True
        given = headers.get(b"authorization", b"")
        # in constant time, so that the answer's time does not tell how much of it is right
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())
