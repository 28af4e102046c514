#!/usr/bin/env python3
"""Send malformed requests to a replica, half of them without its token, and count what came back.

No answer may hold the token, and none may take the proof of a request, which is never right.
A run beside them draws samples, which must keep their bits. Exit code 1: something was wrong.
    python tools/fuzz_replica.py --count 5000 --seed 1
    MEGADIFF_TOKEN=… python tools/fuzz_replica.py --url http://127.0.0.1:8000 --model MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import torch
from bench_replica import start_replica
from fuzz_requests import IMAGE, SAMPLE, bodies, body_of, named, raw_request
from safetensors.torch import load_file

from megadiff.rollout.client.processes import TOKEN_VARIABLE
from megadiff.rollout.wire import decode_groups, requests_to_json
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.model_files import weight_files

CALLS_AT_ONCE = 4
ROUND = 50  # requests between two looks at the samples of the run beside
MEMORY_MIB = 100
ANSWER_S = 60.0  # later than this is out of bounds
REST_S = 0.2  # without a byte of an answer that has begun; one to HEAD has no body
READ_BYTES = 2**20  # of an answer: a longer one holds samples
STALLED = 40  # connections that are left open in the middle of a request
REFUSALS = {400, 401, 404, 405, 408, 409, 413, 415, 422, 503}


class Tally:
    """What came back, and what should not have."""

    def __init__(self, token: str) -> None:
        self.token = token.encode()
        self.statuses = {"without": Counter(), "with": Counter()}
        self.num_draws = 0
        self.wrong: list[str] = []

    def add(
        self,
        what: str,
        status: int | str,
        seconds: float,
        *,
        answer: bytes,
        has_token: bool,
    ) -> None:
        self.statuses["with" if has_token else "without"][status] += 1
        is_open = has_token or "/health" in what
        # A right proof is not drawn by chance: a hello that is taken is wrong, token or not.
        is_taken = status == 200 and is_open and "/rl/hello" not in what
        if isinstance(status, int) and not (is_taken or status in REFUSALS) or seconds > ANSWER_S:
            self.wrong.append(f"{status} after {seconds:.1f} s: {what[:300]}")
        if self.token in answer:
            self.wrong.append(f"the token came back with {status}: {what[:300]}")


def send_raw(
    url: str,
    data: bytes,
    rng: random.Random,
    stalled: list[socket.socket],
    *,
    is_right: bool,
) -> tuple[int | str, bytes]:
    """Return (the status, the answer's bytes).

    The status is "cut" where the replica hung up, and "left" where this end did.
    """
    place = urlsplit(url)
    is_whole = rng.random() < 0.9
    connection = socket.create_connection((place.hostname, place.port), timeout=2 * ANSWER_S)
    try:
        connection.sendall(data if is_whole else data[: len(data) // 2])
        if not is_whole and len(stalled) < STALLED:
            stalled.append(connection)
            return "left open", b""
        if not (is_whole and is_right):
            connection.settimeout(0.1)
        answer = connection.recv(READ_BYTES)
        status: int | str = "cut"
        if answer:
            status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else "no HTTP"
        answer += read_rest(connection, answer)
    except TimeoutError:
        status, answer = "left", b""
    except ConnectionError:
        status, answer = "cut", b""
    connection.close()
    return status, answer


def read_rest(connection: socket.socket, begin: bytes) -> bytes:
    """Return what follows the first bytes of an answer, READ_BYTES in all at most."""
    rest = b""
    connection.settimeout(REST_S)
    try:
        while len(begin + rest) < READ_BYTES and not is_whole_answer(begin + rest):
            data = connection.recv(READ_BYTES)
            if not data:
                break
            rest += data
    except (TimeoutError, ConnectionError):
        pass  # what has come is looked at
    return rest


def is_whole_answer(answer: bytes) -> bool:
    """Tell whether an answer has as many bytes as its Content-Length says."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    return bool(end and length) and len(body) >= int(length[1])


def send_http(
    url: str, right: dict[str, Any], token: str, rng: random.Random
) -> tuple[str, int, bytes]:
    """Send a well-formed request with a spoiled body.

    Return (what it was, the status, the answer's bytes).
    """
    path = rng.choice(list(right))
    body = body_of(path, right, rng)
    headers = {"Content-Type": "application/json"} | named(token)
    answer = httpx.post(url + path, content=body, headers=headers, timeout=2 * ANSWER_S)
    received = b"\r\n".join(b": ".join(pair) for pair in answer.headers.raw) + answer.content
    return f"POST {path} {body[:200]!r}", answer.status_code, received


class Beside:
    """A run that pushes its weights, and draws the same samples again and again."""

    def __init__(self, url: str, model: Path, token: str) -> None:
        headers = named(token)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=ANSWER_S, trust_env=False)
        self.manifest = folder_manifest(model, ("transformer",), dtype="float32")
        tensors = [load_file(file) for file in weight_files(model / "transformer")]
        pairs = [(f"transformer.{name}", each[name].float()) for each in tensors for name in each]
        self.bucket = bytes(encode_bucket(pairs))
        self.push()
        self.expected = self.draw()

    def push(self) -> None:
        begin = {"version": 1, "manifest": self.manifest, "lora": None}
        self.http.post("/rl/weights/begin", json=begin).raise_for_status()
        self.http.post("/rl/weights/bucket", content=self.bucket).raise_for_status()
        self.http.post("/rl/weights/commit", json={"version": 1}).raise_for_status()

    def draw(self) -> list[torch.Tensor]:
        answer = self.http.post("/rl/generate", json=requests_to_json([SAMPLE]))
        (group,) = decode_groups(answer.raise_for_status().content)
        return list(group.latents_GSLC)

    def draws_the_same(self) -> bool:
        return all(map(torch.equal, self.draw(), self.expected))


def fuzz(url: str, beside: Beside, options: argparse.Namespace, token: str) -> Tally:
    """Send half of the requests without the token, half with it; compare samples each round."""
    tally = Tally(token)
    right = bodies(beside.manifest)
    stalled: list[socket.socket] = []

    def send(number: int) -> None:
        rng = random.Random(f"{options.seed}/{number}")
        has_token = number >= options.count // 2
        given = token if has_token else ""
        start_s = time.monotonic()
        if rng.random() < 0.3:
            what, status, answer = send_http(url, right, given, rng)
        else:
            data, is_right = raw_request(right, given, rng)
            what = repr(data[:300])
            status, answer = send_raw(url, data, rng, stalled, is_right=is_right)
        seconds = time.monotonic() - start_s
        tally.add(what, status, seconds, answer=answer, has_token=has_token)

    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        for first in range(0, options.count, ROUND):
            sending = pool.map(send, range(first, min(first + ROUND, options.count)))
            if first + ROUND <= options.count // 2:
                is_same = beside.draws_the_same()  # while they are sent
            list(sending)
            if first + ROUND > options.count // 2:
                beside.push()  # requests with the token may have put the replica to sleep
                is_same = beside.draws_the_same()
            tally.num_draws += 1
            if not is_same:
                tally.wrong.append(f"samples of the run beside changed near request {first}")
    for connection in stalled:
        connection.close()
    return tally


def reach_high_water(beside: Beside) -> None:
    """Draw the largest image that a spoiled request can ask for, as allocators keep its memory."""
    for _ in range(3):
        beside.http.post("/v1/images/generations", json=IMAGE).raise_for_status()


def memory_mib(process: psutil.Process | None) -> float:
    """Return the resident memory of the replica and its workers."""
    processes = [process, *process.children(recursive=True)] if process else []
    return sum(each.memory_info().rss for each in processes) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a replica that runs; its token is in MEGADIFF_TOKEN")
    parser.add_argument("--model", type=Path, default=Path("assets/shapes"))
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        process, url = None, options.url
        if not url:
            os.environ[TOKEN_VARIABLE] = token
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            how = {"dtype": "float32", "device": "auto"}
            server, client = start_replica(options.model, folder, stack, **how)
            process, url = psutil.Process(server.process.pid), client.url
        beside = Beside(url, options.model, token)
        warm_up = argparse.Namespace(count=2 * ROUND, seed=f"warm-up {options.seed}")
        fuzz(url, beside, warm_up, token)
        reach_high_water(beside)
        before_mib = memory_mib(process)
        tally = fuzz(url, beside, options, token)
        after_mib = memory_mib(process)
    report = {
        "count": options.count,
        "statuses": tally.statuses,
        "memory_mib": [round(before_mib), round(after_mib)],
        "same_bits": tally.num_draws,
        "out_of_bounds": tally.wrong,
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(bool(tally.wrong) or after_mib > before_mib + MEMORY_MIB)


if __name__ == "__main__":
    sys.exit(main())
