"""The doors of a replica over a real socket: owners, deadlines, the token."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from megadiff.models.pipeline_stop import STOP_KEY
from megadiff.rollout.limits import Limits
from megadiff.rollout.server import body as body_module
from megadiff.rollout.server import punctual
from megadiff.rollout.server import replica as replica_module
from megadiff.rollout.server.images import IMAGES_PATH
from megadiff.rollout.server.replica import Replica
from megadiff.sync.bucket import bucket_manifest, encode_bucket
from megadiff.sync.transports import shared_memory
from tests.unit.rollout.served import serving
from tests.waiting import wait_for

BUCKET = [("transformer.a", torch.randn(3000))]
BEGIN = {"version": 7, "manifest": bucket_manifest(BUCKET), "lora": None}
IMAGE = {"prompt": "a red star", "size": "64x64"}
REQUEST = {
    "prompt": {"text": "x", "id": "x"},
    "sampling": {"height": 64, "width": 64, "num_inference_steps": 4, "sde_type": "ode"},
    "sample_indices": [0],
    "seed": 0,
    "step": 0,
    "policy_version": 7,
}


class Engine:
    """Stands in for vllm-omni: an image takes until it is stopped, worker calls return at once."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.num_steps = 0
        self.is_running = False

    def put(self, replica: Replica, app: FastAPI) -> None:
        self.replica = replica

        @app.post(IMAGES_PATH)
        async def images(request: Request) -> JSONResponse:
            path = (await request.json())["extra_params"][STOP_KEY]
            self.is_running = True
            while not os.path.exists(path):
                self.num_steps += 1
                await asyncio.sleep(0.01)
            self.is_running = False
            return JSONResponse({"error": "stopped"}, 400)

    async def call(self, engine: object, method: str, *arguments: object) -> dict:
        return {"workers": [{"fingerprints": {}, "bound_modules": []}]}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    engine = Engine()
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(replica_module, "call_worker", engine.call)
    return engine


@pytest.fixture
def url(engine: Engine, tmp_path: Path) -> Iterator[str]:
    limits = Limits(image_answer_s=3.0)
    with serving(bucket_manifest(BUCKET), tmp_path, limits=limits, change=engine.put) as url:
        yield url


def post(url: str, path: str, run: str = "", **arguments: object) -> httpx.Response:
    headers = {"X-Megadiff-Run": run} if run else {}
    return httpx.post(f"{url}{path}", headers=headers, timeout=20, **arguments)


def open_request(url: str, data: bytes) -> socket.socket:
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port), timeout=20)
    connection.sendall(data)
    return connection


def half_bucket(url: str, run: str) -> socket.socket:
    head = f"POST /rl/weights/bucket HTTP/1.1\r\nHost: x\r\nX-Megadiff-Run: {run}\r\n"
    return open_request(url, head.encode() + b"Content-Length: 99999\r\n\r\n" + bytes(1000))


def test_two_runs_see_each_other_by_name(url: str) -> None:
    """The second run is refused; asking for the same version it never gets the first's samples."""
    assert post(url, "/rl/weights/begin", "a", json=BEGIN).status_code == 200
    refused = post(url, "/rl/weights/begin", "b", json=BEGIN)
    assert refused.status_code == 423 and "run b" in refused.text and "run a" in refused.text
    assert post(url, "/rl/weights/bucket", "a", content=bytes(encode_bucket(BUCKET))).is_success
    for path, body in (("commit", {"version": 7}), ("bucket", {"transport": "shm"})):
        assert post(url, f"/rl/weights/{path}", "b", json=body).status_code == 409
    assert post(url, "/rl/weights/commit", "a", json={"version": 7}).status_code == 200
    assert httpx.get(f"{url}/health").json()["run"] == "a"
    for path, body in (("generate", [REQUEST]), ("sleep", None), ("trim", None)):
        refused = post(url, f"/rl/{path}", "b", json=body)
        assert refused.status_code == 409 and "works for run a" in refused.text
    assert post(url, "/rl/release", "b").json() == {"released": False}
    assert post(url, "/rl/release", "a").json() == {"released": True}
    refused = post(url, "/rl/generate", "b", json=[REQUEST])  # the weights are still run a's
    assert refused.status_code == 409 and "has to push its own weights first" in refused.text
    assert post(url, "/rl/weights/begin", "b", json=BEGIN).status_code == 200
    refused = post(url, "/rl/generate", "a", json=[REQUEST])
    assert refused.status_code == 409 and "took it from run a" in refused.text


def test_health_is_a_sign_of_life_of_whom_it_names(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is at its update keeps its replica; a monitor keeps nobody's."""
    monkeypatch.setattr("megadiff.rollout.server.owner.OWNER_SILENT_S", 0.5)
    for run, is_kept in (("a", True), ("", False)):
        wait_for(lambda run=run: post(url, "/rl/weights/begin", run, json=BEGIN).is_success)
        start = time.monotonic()
        headers = {"X-Megadiff-Run": run} if run else {}
        while time.monotonic() < start + 0.8:
            httpx.get(f"{url}/health", headers=headers)
        assert post(url, "/rl/weights/begin", "b", json=BEGIN).is_success != is_kept


def test_a_push_that_stalls_in_a_bucket_holds_up_nobody(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert post(url, "/rl/weights/begin", "a", json=BEGIN).status_code == 200
    with half_bucket(url, "a"):
        wait_for(lambda: any(tmp_path.iterdir()))
        refused = post(url, "/rl/weights/begin", "b", json=BEGIN)
        assert refused.status_code == 423 and "1 calls in flight" in refused.text
        assert post(url, "/rl/weights/begin", "a", json=BEGIN).status_code == 200  # a restart
        assert post(url, "/rl/weights/bucket", "a", content=bytes(encode_bucket(BUCKET))).is_success
        assert post(url, "/rl/weights/commit", "a", json={"version": 7}).is_success


def test_a_silent_body_ends_and_its_run_loses_the_replica(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_SILENT_S", 0.3)
    monkeypatch.setattr("megadiff.rollout.server.owner.OWNER_SILENT_S", 0.6)
    post(url, "/rl/weights/begin", "a", json=BEGIN)
    with half_bucket(url, "a") as connection:
        start = time.monotonic()
        assert b"HTTP/1.1 408" in connection.recv(9999)
        wait_for(lambda: post(url, "/rl/weights/begin", "b", json=BEGIN).is_success)
        assert time.monotonic() - start < 10
    assert httpx.get(f"{url}/health").json()["state"] == "updating"


def test_a_bucket_of_a_push_that_was_begun_again_is_refused(url: str, tmp_path: Path) -> None:
    post(url, "/rl/weights/begin", "a", json=BEGIN)
    body = bytes(encode_bucket(BUCKET))
    head = "POST /rl/weights/bucket HTTP/1.1\r\nHost: x\r\nX-Megadiff-Run: a\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with open_request(url, head.encode() + body[:100]) as connection:
        wait_for(lambda: any(tmp_path.iterdir()))
        post(url, "/rl/weights/begin", "a", json=BEGIN)
        connection.sendall(body[100:])
        answer = connection.recv(9999)
    assert b"HTTP/1.1 409" in answer and b"another push began" in answer


def test_a_body_that_drips_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SILENT_S", 0.5)
    post(url, "/rl/weights/begin", "a", json=BEGIN)
    with half_bucket(url, "a") as connection:
        connection.settimeout(0.1)
        start = time.monotonic()
        answer = b""
        while not answer and time.monotonic() < start + 10:
            connection.sendall(b"x")
            try:
                answer = connection.recv(9999)
            except TimeoutError:
                continue
    assert b"HTTP/1.1 408" in answer and time.monotonic() - start < 9


def test_half_sent_headers_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where bytes drip in, and where the connection had a whole request before."""
    monkeypatch.setattr(punctual, "HEADERS_S", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for first in (b"", b"GET /he", whole + b"GET /he"):
        with open_request(url, first) as connection:
            connection.settimeout(0.1)
            start = time.monotonic()
            received = b"?"
            while received and time.monotonic() < start + 10:
                try:
                    if first:
                        connection.sendall(b"a")
                    received = connection.recv(9999)
                except TimeoutError:
                    continue
                except OSError:
                    break
            assert time.monotonic() - start < 9


def test_headers_without_end_are_cut_off(url: str) -> None:
    with open_request(url, b"GET /health HTTP/1.1\r\n") as connection, pytest.raises(OSError):
        for _ in range(200):
            connection.sendall(b"X-A: " + b"y" * 10_000 + b"\r\n")
            time.sleep(0.002)


def test_strangers_beyond_a_number_push_the_oldest_out(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(punctual, "MAX_STRANGERS", 8)
    strangers = [open_request(url, b"GET /he") for _ in range(30)]
    assert httpx.get(f"{url}/health").status_code == 200
    strangers[0].settimeout(5)
    try:
        assert strangers[0].recv(1) == b""
    except ConnectionError:
        pass  # how an end looks when bytes of ours were unread
    for stranger in strangers:
        stranger.close()
    wait_for(lambda: not punctual.PunctualProtocol.strangers)


def test_an_image_is_in_flight_until_the_engine_has_stopped(url: str, engine: Engine) -> None:
    body = json.dumps(IMAGE).encode()
    head = f"POST {IMAGES_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with open_request(url, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body):
        wait_for(lambda: engine.is_running)
        assert httpx.get(f"{url}/health").json()["in_flight"] == 1
    wait_for(lambda: not engine.is_running, timeout_s=2.5)  # before the deadline of three seconds
    wait_for(lambda: engine.replica.load.num_calls == 0)
    assert post(url, "/rl/weights/begin", "a", json=BEGIN).is_success


def test_an_image_has_a_deadline(url: str, engine: Engine) -> None:
    start = time.monotonic()
    answer = post(url, IMAGES_PATH, json=IMAGE)
    assert answer.status_code == 503 and "took longer than 3 s" in answer.text
    assert time.monotonic() - start < 10 and not engine.is_running


def test_only_so_many_images_wait(engine: Engine, tmp_path: Path) -> None:
    limits = Limits(image_calls=0)
    with serving({}, tmp_path, limits=limits, change=engine.put) as url:
        assert post(url, IMAGES_PATH, json=IMAGE).status_code == 503
        assert post(url, IMAGES_PATH, json=IMAGE | {"n": 10**9}).status_code == 400
        assert post(url, IMAGES_PATH, content=b" " * 70_000).status_code == 413


def test_the_token_opens_every_door_but_health(engine: Engine, tmp_path: Path) -> None:
    with serving({}, tmp_path, token="secret", change=engine.put) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/rl/trim", "/rl/release", IMAGES_PATH, "/nowhere"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                assert httpx.post(f"{url}{path}", headers=given).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{url}/rl/trim", headers=right).status_code == 200
        assert httpx.post(f"{url}/nowhere", headers=right).status_code == 404


def test_no_script_of_a_web_site_gets_in(url: str) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{url}/rl/sleep", headers=headers)
    assert preflight.status_code == 405
    for answer in (preflight, httpx.get(f"{url}/health", headers=headers)):
        assert not any(name.startswith("access-control") for name in answer.headers)
