"""The fuzzer of a replica's doors: what it sends, and what it counts as wrong."""

from __future__ import annotations

import random
import socket
import threading

import fuzz_replica
import fuzz_requests
import pytest

from megadiff.rollout.proof import TRAINER, is_valid

TOKEN = "0123456789abcdef" * 2


def test_hello_is_among_the_requests():
    right = fuzz_requests.bodies({})
    sent = [fuzz_requests.raw_request(right, "", random.Random(seed))[0] for seed in range(200)]
    assert any(data.startswith(b"POST /rl/hello HTTP") for data in sent)
    hello = right["/rl/hello"]
    url = "http://127.0.0.1:8000"
    assert not is_valid(hello["proof"], TOKEN, role=TRAINER, nonce=hello["nonce"], url=url)


@pytest.mark.parametrize(
    ("what", "status", "answer", "has_token", "is_wrong"),
    [
        ("POST /rl/hello {}", 401, b"refused", False, False),
        ("POST /rl/hello {}", 200, b"proof", False, True),
        ("POST /rl/hello {}", 200, b"proof", True, True),
        ("GET /health", 200, b"ready", False, False),
        ("POST /rl/generate", 200, b"samples", False, True),
        ("POST /rl/generate", 400, f"no {TOKEN} here".encode(), True, True),
        ("garbage", "cut", TOKEN.encode(), True, True),
    ],
)
def test_what_is_wrong(what, status, answer, has_token, is_wrong):
    tally = fuzz_replica.Tally(TOKEN)
    tally.add(what, status, 0.1, answer=answer, has_token=has_token)
    assert bool(tally.wrong) == is_wrong


def test_an_answer_is_read_to_its_end():
    """Its body may come later than its headers, and may hold what should not be there."""
    body = f"x{TOKEN}".encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(b"HTTP/1.1 400 Bad\r\nContent-Length: 33\r\n\r\n")
                threading.Event().wait(0.05)
                connection.sendall(body)
                connection.recv(1)  # until the other end hangs up

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        data = b"GET / HTTP/1.1\r\n\r\n"
        received = fuzz_replica.send_raw(url, data, random.Random(0), [], is_right=True)
        thread.join()
    assert received[0] == 400
    assert received[1].endswith(body)
