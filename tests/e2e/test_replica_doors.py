"""What a real replica lets in: its routes, its sockets, and clients that leave."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import torch

from megadiff.rollout.wire import requests_to_json
from tests.e2e.replica import REQUEST, SAMPLING, Server, image, start
from tests.e2e.servers import ENVIRONMENT, ROOT

IMAGES = "/v1/images/generations"
LONG_IMAGE = {"prompt": "a red cat", "size": "512x512", "num_inference_steps": 200, "n": 2}
GONE = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/images/edits"),
    ("POST", "/v1/videos"),
    ("POST", "/v1/videos/sync"),
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/omni/sleep"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/load"),
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tiny_model, tmp_path_factory.mktemp("replica"))
    yield server
    server.end()


def test_only_routes_with_bounds_are_there(server: Server) -> None:
    for method, path in GONE:
        answer = httpx.request(method, server.client.url + path, json={})
        assert answer.status_code == 404, path
    assert image(server.client)[:4] == b"\x89PNG"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_sockets_are_on_loopback(
    server: Server, tiny_model: Path, tmp_path: Path, num_workers: int
) -> None:
    """Those of the worker processes, too; two workers sample what one does."""
    options = ("--tp", "2", "--run", "my_run")
    other = server if num_workers == 1 else start(tiny_model, tmp_path, *options)
    try:
        process = psutil.Process(other.process.pid)
        processes = [process, *process.children(recursive=True)]
        connections = [each for process in processes for each in process.net_connections("inet")]
        addresses = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}
        check_titles(processes, num_workers)
        expected = server.client.generate(REQUEST)
        sampled = other.client.generate(REQUEST)
        assert (sampled.latents_GSLC - expected.latents_GSLC).abs().max() <= 1e-5
        assert _stop_s(other, IMAGES, LONG_IMAGE) < 10  # both workers stop before the same pass
    finally:
        if other is not server:
            other.end()


def check_titles(processes: list[psutil.Process], num_workers: int) -> None:
    """Server and workers are named, as `ps` shows them; vllm-omni calls all of them one name."""
    commands = [Path(f"/proc/{process.pid}/cmdline").read_text() for process in processes]
    titles = [command.rstrip("\0") for command in commands]
    assert not any("vLLM" in title for title in titles)
    if num_workers == 1:
        assert titles[0] == "megadiff replica-7: server"
        return
    assert titles[0] == "megadiff replica-7 of my_run: server"
    workers = {title for title in titles[1:] if title.startswith("megadiff")}
    assert workers == {f"megadiff replica-7 of my_run: worker {rank}" for rank in range(2)}


def test_metrics_tell_what_was_drawn(server: Server) -> None:
    """By our route: vLLM's own is not there, and its metrics neither."""
    before = server.client.health()["outstanding"], drawn(server)
    server.client.generate(REQUEST)
    image(server.client, n=2)
    assert before[0] == server.client.health()["outstanding"] == 0
    assert drawn(server) == before[1] + len(REQUEST.sample_indices) + 2


def drawn(server: Server) -> float:
    answer = httpx.get(f"{server.client.url}/metrics")
    assert answer.status_code == 200 and "vllm:" not in answer.text
    return float(answer.text.split("\nmegadiff_samples_drawn_total ")[1].split()[0])


def test_a_client_that_left_holds_nobody_up(server: Server) -> None:
    """Neither an image nor samples of a run go on; the next samples have the same bits."""
    before = server.client.generate(REQUEST)
    sampling = replace(SAMPLING, height=512, width=512, num_inference_steps=500)
    samples = requests_to_json([replace(REQUEST, sampling=sampling)])
    for path, body in ((IMAGES, LONG_IMAGE), ("/rl/generate", samples)):
        assert _stop_s(server, path, body) < 10, path
        after = server.client.generate(REQUEST)
        assert torch.equal(before.latents_GSLC, after.latents_GSLC)


def _stop_s(server: Server, path: str, body: object) -> float:
    """Leave a request alone once it runs; return the seconds until the replica is free."""
    place = urlsplit(server.client.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(1.5)  # so that the engine is at it
        assert server.client.health()["in_flight"] == 1
    start_s = time.monotonic()
    server.client.generate(REQUEST)
    assert server.client.health()["in_flight"] == 0
    return time.monotonic() - start_s


def test_malformed_requests_change_nothing() -> None:
    """The short form of the tool: bits, memory and bounds hold."""
    command = [sys.executable, "tools/fuzz_replica.py", "--count", "200", "--seed", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["statuses"]["without"]["401"] > 20
    assert report["statuses"]["with"]["400"] > 20
