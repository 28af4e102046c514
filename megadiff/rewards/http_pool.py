"""Ask equal HTTP servers for JSON, with retries inside one deadline."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from json import dumps, loads
from typing import Any

from megadiff.process.bounded_http import Answer, AnswerTooLarge, BoundedHttp, NoAnswer
from megadiff.rewards.base import ScoreFailed

logger = logging.getLogger(__name__)

MAX_BYTES = 2**24  # of an answer: a thousand scores are some 20 KB
# uvicorn, vLLM's server, closes a connection that idles for 5 s. A request that is sent at that
# moment is lost.
KEEP_ALIVE_S = 3.0
EXCERPT_BYTES = 400  # of an answer, in an error
REST_S = 2.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
GONE = 410  # a judge that died is answered for so, and another server is asked
RETRIED = (408, 425, 429)  # beside 5xx: the server asks for patience
_PORT = r"(:(?!0)(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]))?"  # to 65535
# Without user:password, which would stand in every error message.
_URL = re.compile(rf"https?://([\w.-]+|\[[\da-f:]+\]){_PORT}(/[\w./~-]*)?", re.ASCII)
_TOKEN = re.compile("[!-~]*")  # visible ASCII


class HttpPool:
    """Send each call to the server with the fewest in flight. For any number of threads.

    urls: the base URLs of equal servers, one or several. timeout_s: of one attempt, from the
    connection to the last byte. deadline_s: of a call, with its retries and pauses. headers: sent
    with every call. retries: attempts that failed and were made again, since the last figures().

    A server that failed rests for 2 s. Then one call tries it, and the others come back once that
    one has its answer. A call that failed on one server goes to another. Environment variables that
    name a proxy are ignored.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        deadline_s: float = 240.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 < timeout_s <= deadline_s:
            raise ValueError(
                f"timeout_s={timeout_s:g} of an attempt and deadline_s={deadline_s:g} of a call, "
                "with its retries: need 0 < timeout_s <= deadline_s"
            )
        self.urls = check_urls(urls)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.retries = 0

        self._headers = dict(headers or {})
        self._servers = {url: BoundedHttp(url, keep_alive_s=KEEP_ALIVE_S) for url in self.urls}
        self._lock = threading.Lock()
        self._in_flight = dict.fromkeys(self.urls, 0)
        # The point of monotonic time until which a server rests; 0 for one that answers.
        self._rests_until = dict.fromkeys(self.urls, 0.0)
        self._closed = threading.Event()

    def get(self, path: str, *, url: str = "") -> Any:
        """Return the JSON that one of the servers answers, or the one at `url`.

        Raises ScoreFailed as post() does.
        """
        return self._ask("GET", path, {}, b"", [url] if url else self.urls)

    def post(self, path: str, *, json: object = None, content: bytes = b"") -> Any:
        """Send `json`, or `content` as it is, and return the JSON of the answer.

        NaN and infinity in the answer become floats: the caller refuses them.
        Raises ScoreFailed, with the server, the tries and the last cause: for an answer that a
        retry would not change, and when deadline_s is over.
        """
        headers = {}
        if json is not None:
            content = dumps(json, allow_nan=False).encode()
            headers = {"Content-Type": "application/json"}
        return self._ask("POST", path, headers, content, self.urls)

    def figures(self) -> dict[str, float]:
        """Return the retries since the last figures(), as a reward logs them."""
        with self._lock:
            retries = self.retries
            self.retries = 0
        return {"retries": float(retries)}

    def close(self) -> None:
        """End all calls: those that run raise ScoreFailed."""
        self._closed.set()
        for server in self._servers.values():
            server.close()

    def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes,
        urls: Sequence[str],
    ) -> Any:
        end = time.monotonic() + self.deadline_s
        tried: list[str] = []
        while True:
            url = self._take(urls, tried)
            tried.append(url)
            cause = ""
            try:
                answer = self._servers[url].request(
                    method,
                    path,
                    headers={**self._headers, **headers},
                    content=content,
                    timeout_s=min(self.timeout_s, end - time.monotonic()),
                    max_bytes=MAX_BYTES,
                )
                return _json_of(answer, f"{method} {url}{path}")
            except AnswerTooLarge as error:
                raise ScoreFailed(str(error)) from None
            except _ServerGone as error:
                if not self._leave(url, urls):
                    raise ScoreFailed(str(error)) from None
                continue
            except NoAnswer as error:
                cause = str(error)
            finally:
                self._give_back(url, cause)

            pause = min(FIRST_PAUSE_S * 2 ** (len(tried) - 1), LONGEST_PAUSE_S)
            pause *= random.uniform(0.5, 1.0)  # so that the callers do not come back all at once
            # A try in the last moments would run out of time, and hide the cause of those before.
            too_late = time.monotonic() + pause + self.timeout_s / 4 >= end
            if too_late or self._closed.wait(pause):
                limits = f"deadline_s={self.deadline_s:g}, timeout_s={self.timeout_s:g} for each"
                why = "closed" if self._closed.is_set() else limits
                count = "1 try" if len(tried) == 1 else f"{len(tried)} tries"
                raise ScoreFailed(f"gave up after {count} ({why}); the last: {cause}")
            with self._lock:
                self.retries += 1

    def _take(self, urls: Sequence[str], tried: Sequence[str]) -> str:
        """Choose one of the servers and count it as in use. tried: where this call has failed."""
        with self._lock:
            now = time.monotonic()

            def rank(url: str) -> tuple[float, bool, int, float]:
                # Another server first: a call would spend its deadline on one that hangs.
                resting = self._rests_until[url] > now
                tries = math.inf if self._rests_until[url] == math.inf else tried.count(url)
                return tries, resting, self._in_flight[url], random.random()

            url = min(urls, key=rank)
            if 0 < self._rests_until[url] < math.inf:
                self._rests_until[url] = now + self.timeout_s
            self._in_flight[url] += 1
            return url

    def _leave(self, url: str, urls: Sequence[str]) -> bool:
        """Ask this server only where no other is left. Return whether one is."""
        with self._lock:
            self._rests_until[url] = math.inf
            return any(self._rests_until[other] < math.inf for other in urls)

    def _give_back(self, url: str, cause: str) -> None:
        """Count it as free. cause: why the attempt failed, and the server rests; '' for a use."""
        with self._lock:
            self._in_flight[url] -= 1
            first_failure = cause and not self._rests_until[url]
            if self._rests_until[url] < math.inf:
                self._rests_until[url] = time.monotonic() + REST_S if cause else 0.0
        if first_failure and not self._closed.is_set():
            logger.warning("%s; it is asked again for up to %g s", cause, self.deadline_s)


class _ServerGone(Exception):
    """A server said that it is gone for good."""


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """Return the base URLs without a slash at the end, each once.

    Raises ValueError for none, and for what is no http or https URL.
    """
    rows = [urls] if isinstance(urls, str) else urls
    if not rows:
        raise ValueError("url has 0 servers, need at least 1, as http://host:port")
    for row in rows:
        if not isinstance(row, str) or not _URL.fullmatch(row):
            raise ValueError(
                f"url {row!r} is no base URL of a server; give http://host:port or https://host, "
                "without user, password, query and blanks"
            )
    return list(dict.fromkeys(row.rstrip("/") for row in rows))


def bearer_header(token_env: str, *, default: str = "") -> dict[str, str]:
    """Return the header with the token of an environment variable; none without a token.

    default: the variable that is read without token_env; it need not be set.
    Raises ValueError, without the token, for one that no header can hold or that is not set.
    """
    token = os.environ.get(token_env or default, "")
    if token_env and not token:
        raise ValueError(
            f"token_env={token_env}, but the environment has no such variable; set it to the "
            "token of the servers, for every rank"
        )
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            f"the token of {token_env or default} has characters that no header can hold; "
            "use visible ASCII, without blanks"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _json_of(answer: Answer, asked: str) -> Any:
    """Return an answer's JSON. Raises NoAnswer where to ask again, ScoreFailed for a refusal."""
    excerpt = " ".join(answer.body[:EXCERPT_BYTES].decode(errors="replace").split())
    said = f"{asked} answered {answer.status}: {excerpt}"
    # Before the JSON is read: a server may explain its refusal in any form.
    if answer.status in RETRIED or answer.status >= 500:
        raise NoAnswer(said)
    if answer.status == GONE:
        raise _ServerGone(said)
    if answer.status >= 400:
        raise ScoreFailed(said)
    if answer.status >= 300:
        raise ScoreFailed(
            f"{said}; redirects are not followed: give the server that it names, "
            f"{answer.location!r}"
        )
    try:
        return loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer(f"{asked} answered no JSON: {error}; {excerpt}") from None
