"""The image requests of the rollout benchmark: within the bounds, with the token, refusals told."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import bench_rollout
import pytest

from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.limits import Limits
from megadiff.rollout.server.images import check_image_request

TOKEN = "0123456789abcdef" * 2
OPTIONS = Namespace(size=64, steps=2, true_cfg_scale=1.0)


class Door(BaseHTTPRequestHandler):
    """Answer as many images as were asked for, or 401 without the token."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        answer = {"data": [{}] * request["n"]} if is_known else {"error": "needs the token"}
        body = json.dumps(answer).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # all requests at once


@pytest.fixture
def client() -> Iterator[ReplicaClient]:
    with Server(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ReplicaClient(f"http://127.0.0.1:{server.server_port}", "replica")
        server.shutdown()


def test_image_requests_carry_the_token(client, monkeypatch):
    monkeypatch.setenv("MEGADIFF_TOKEN", TOKEN)
    bench_rollout._images(client, [1] * 80, OPTIONS)


def test_a_refusal_is_told_with_its_reason(client, monkeypatch):
    monkeypatch.delenv("MEGADIFF_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="replica answered 401 .*needs the token"):
        bench_rollout._images(client, [3], OPTIONS)


@pytest.mark.parametrize("size", [64, 512, 1024, 1328, 2048, 4096])
@pytest.mark.parametrize("steps", [1, 50, 128])
def test_requests_are_as_large_as_a_replica_takes(size, steps):
    most = bench_rollout.images_a_request(size, steps)
    request = {"prompt": "x", "size": f"{size}x{size}", "num_inference_steps": steps}

    def is_taken(num_images: int) -> bool:
        try:
            check_image_request(request | {"n": num_images}, Limits())
        except ValueError:
            return False
        return True

    assert is_taken(most) and not is_taken(most + 1)


@pytest.mark.parametrize(
    "options", [("--size", "4097"), ("--steps", "201"), ("--size", "4096", "--steps", "129")]
)
def test_what_no_replica_takes_is_refused_before_one_starts(options, capsys):
    with pytest.raises(SystemExit):
        bench_rollout.main(list(options))
    assert "--ways" in capsys.readouterr().err
