"""Serve one reward to `remote` rewards elsewhere, see remote.py for the protocol."""

from __future__ import annotations

import hmac
import io
import json
import logging
import math
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.process.network import address_family, check_port
from megadiff.process.workers import share_of_cores
from megadiff.rewards.answers import WrongAnswer, score_checked
from megadiff.rewards.base import Reward, RewardError, RewardSample, ScoreFailed
from megadiff.rewards.remote import TOKEN_VARIABLE
from megadiff.types import JsonObject, Prompt

logger = logging.getLogger(__name__)

MAX_BYTES = 2**31  # of a request: 8 videos of 81 frames, 480 x 832, are 0.8 GB
MAX_CALLS = 16  # at once, of a reward that does not say how many workers it wants
MAX_CONNECTIONS = 512  # each has a thread, which mostly waits
SILENCE_S = 30.0  # between two parts of a request
BODY_S = 300.0
QUEUE_S = 300.0  # a request waits for its turn; its client has given up by then
REFUSED_S = 10.0  # for a body that is not kept
CHUNK_BYTES = 2**20
CLOSE_WAIT_S = 5.0  # for calls that still run


class ScoreServer(ThreadingHTTPServer):
    """Answer requests with the scores of one reward.

    As many calls run at once as the reward has workers. The address is taken at once; connections
    are refused until server_activate(). token: every request must bring it; '' for none.
    Raises OSError for an address that cannot be taken, ValueError for a port that is none.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, reward: Reward, *, host: str, port: int, token: str) -> None:
        check_port(port)
        self.token = token
        self._reward = reward
        self._num_calls = reward.workers or share_of_cores(MAX_CALLS)
        self._calls = threading.Semaphore(self._num_calls)
        self._passed: set[str] = set()  # prompts that the reward does not refuse
        # Requests in memory: those that run, and as many that arrive meanwhile.
        self.bodies = threading.Semaphore(2 * self._num_calls)
        self._connections = threading.Semaphore(MAX_CONNECTIONS)

        self.address_family = address_family(host)
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        # The client asks again after a pause.
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        # A client that hangs up is nothing to trace; anything else is a bug of ours.
        trace = None if isinstance(error, OSError) else error
        logger.warning("%s: %r", client_address[0], error, exc_info=trace)

    def server_close(self) -> None:
        """Take no more requests, and wait 5 s for calls that run."""
        super().server_close()
        deadline = time.monotonic() + CLOSE_WAIT_S
        for _ in range(self._num_calls):
            self._calls.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def score(
        self, samples: Sequence[RewardSample], connection: socket.socket
    ) -> list[float | None] | None:
        """Return the reward's scores, in calls of its samples_per_call, None where it failed.

        Returns None as a whole where the client has left before its turn: it asks again elsewhere.
        Raises TimeoutError where it gets no turn, and ValueError for a prompt that the reward
        refuses: who asks has another reward in its place, which refuses nothing.
        """
        if not self._calls.acquire(timeout=QUEUE_S):
            raise TimeoutError(f"no turn within {QUEUE_S:g} s: the reward may hang")
        try:
            if _has_left(connection):
                return None
            self._validate([sample.prompt for sample in samples])
            chunk = self._reward.samples_per_call or len(samples)
            scores: list[float | None] = []
            for first in range(0, len(samples), chunk):
                scores += self._call(samples[first : first + chunk])
            return scores
        finally:
            self._calls.release()

    def _validate(self, prompts: Sequence[Prompt]) -> None:
        """Let the reward look at those that have not passed before; some read files for it."""
        rows = {f"{prompt.id} {prompt.fields!r}": prompt for prompt in prompts}
        new = {row: prompt for row, prompt in rows.items() if row not in self._passed}
        if new:
            self._reward.validate(list(new.values()))
            self._passed |= new.keys()

    def _call(self, samples: Sequence[RewardSample]) -> list[float | None]:
        # checked here: a chunk that is short by one would shift the scores of the next
        try:
            values = score_checked(self._reward, samples)
        except WrongAnswer as error:
            raise ValueError(str(error)) from None
        except RewardError as error:
            assert error.__cause__, "it has what the reward raised"
            if not isinstance(error.__cause__, ScoreFailed):
                raise error.__cause__ from None
            logger.warning("prompt %.200r: %s", samples[0].prompt.text, error.__cause__)
            return [None] * len(samples)
        return [None if math.isnan(value) else value for value in values]


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0: a connection for each request. So none idles, and none is closed just when it is
    # used again.
    server: ScoreServer
    timeout = SILENCE_S

    def do_GET(self) -> None:  # noqa: N802  # its name in http.server
        self._answer(*(self._refusal("/", size=0) or (200, {"ready": True})))

    def do_POST(self) -> None:  # noqa: N802  # its name in http.server
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._answer(411, {"error": "the request has no Content-Length; send one"})
            return

        size = int(length)
        refusal = self._refusal("/score", size=size)
        if refusal:
            # Not kept, but read: who is still sending does not look for an answer.
            for _ in self._chunks(size, limit_s=REFUSED_S):
                pass
            self._answer(*refusal)
            return

        if not self.server.bodies.acquire(timeout=QUEUE_S):
            self._answer(503, {"error": f"no turn within {QUEUE_S:g} s: the reward may hang"})
            return
        try:
            self._score(b"".join(self._chunks(size, limit_s=BODY_S)))
        finally:
            self.server.bodies.release()

    def _refusal(self, path: str, *, size: int) -> tuple[int, JsonObject] | None:
        """Return the status and the reason for which a request is refused before it is read."""
        token = self.server.token
        given = self.headers.get("Authorization", "").encode()
        # In constant time: how long it takes must not tell how much of the token is right.
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            wrong = "another token than this server's" if given else "no token"
            return 401, {"error": f"the request brings {wrong}; set {TOKEN_VARIABLE} on both sides"}
        if self.path != path:
            asked = f"{self.command} {self.path:.200}"
            return 404, {"error": f"{asked} is not there; GET / and POST /score are"}
        if size > MAX_BYTES:
            return 413, {
                "error": f"the body has {size} bytes, at most {MAX_BYTES} are taken; send fewer "
                "samples at once (reward.<name>.args.samples_per_call)"
            }
        return None

    def _score(self, body: bytes) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="megadiff-score-") as folder:
                samples = samples_from_npz(body, Path(folder))
                scores = self.server.score(samples, self.connection)
        except ValueError as error:  # of the request, or the reward says that it cannot score it
            self._answer(422, {"error": str(error)})
        except Exception as error:  # whatever a reward raises; it may pass, as a full GPU does
            logger.exception("the reward failed")
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            if scores is not None:
                self._answer(200, {"scores": scores})

    def _chunks(self, size: int, *, limit_s: float) -> Iterator[bytes]:
        """Yield the body. Raises ConnectionError where it does not come whole in time."""
        deadline = time.monotonic() + limit_s
        left = size
        while left:
            # read1 returns what has come; read would wait for all of it, past the deadline.
            chunk = self.rfile.read1(min(left, CHUNK_BYTES))
            if not chunk or time.monotonic() > deadline:
                raise ConnectionError(f"{left} of {size} bytes did not come within {limit_s:g} s")
            left -= len(chunk)
            yield chunk

    def _answer(self, status: int, answer: JsonObject) -> None:
        if status >= 400:
            logger.warning("%s: %d %s", self.client_address[0], status, answer["error"])
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests that succeed."""


def samples_from_npz(body: bytes, folder: Path) -> list[RewardSample]:
    """Return the samples of a request; the files of their prompts' images are written to folder.

    Raises ValueError with what is wrong with them.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            # Checked before anything is unpacked: a zip may hold a thousand times its own size.
            size = sum(info.file_size for info in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"it unpacks to {size} bytes, at most {MAX_BYTES}")
        # Without pickle: an object array of a stranger is a program of his.
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            pixels = arrays["pixels"]
            rows = json.loads(arrays["samples"].tobytes())
            files: list[Path] = []
            while (name := f"image_{len(files)}") in arrays:
                files.append(folder / name)
                files[-1].write_bytes(arrays[name].tobytes())
    except Exception as error:  # zipfile, zlib, numpy and json raise a dozen kinds for bad bytes
        raise ValueError(
            "the body is no npz with the arrays pixels and samples (the bytes of a JSON list): "
            f"{type(error).__name__}: {error}"
        ) from None

    if pixels.dtype != np.uint8 or pixels.ndim != 5 or pixels.shape[-1] != 3 or not pixels.size:
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}, must be uint8 [N, F, H, W, 3] "
            "of at least 1 pixel"
        )
    if not isinstance(rows, list) or len(rows) != len(pixels):
        count = len(rows) if isinstance(rows, list) else f"a {type(rows).__name__}"
        raise ValueError(f"samples has {count} for pixels of {len(pixels)}; need a row for each")
    return [_sample(row, image, files) for row, image in zip(rows, pixels, strict=True)]


def _sample(row: object, pixels: np.ndarray, files: Sequence[Path]) -> RewardSample:
    kinds = {
        "prompt": str,
        "negative_prompt": str,
        "id": str,
        "images": list,
        "fields": dict,
        "index": int,
    }
    if not isinstance(row, dict) or any(
        not isinstance(row.get(key), kind) for key, kind in kinds.items()
    ):
        raise ValueError(
            f"a row of samples is {row!r:.200}, must be an object with prompt, negative_prompt and "
            "id (strings), images (a list), fields (an object) and index (an integer)"
        )

    numbers = row["images"]
    if any(type(number) is not int or not 0 <= number < len(files) for number in numbers):
        raise ValueError(
            f"images of a row are {numbers!r:.200}, must be numbers k of arrays image_k, of which "
            f"the body has {len(files)}"
        )
    prompt = Prompt(
        text=row["prompt"],
        id=row["id"],
        negative_text=row["negative_prompt"],
        images=tuple(str(files[number]) for number in numbers),
        fields=row["fields"],
    )
    return RewardSample(pixels=pixels, prompt=prompt, sample_index=row["index"])


def _has_left(connection: socket.socket) -> bool:
    """Tell whether the client has closed its end; it says nothing more after its request."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(SILENCE_S)
