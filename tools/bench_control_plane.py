"""Measure what a trainer rank spends on its replicas beside their work, with many fake ones.

    python tools/bench_control_plane.py --replicas 64 128 256 512 --json control_plane.json

All replicas are sockets of one other process, which answer at once and compute nothing. So seconds
are those of registry, health, routing and a push's bookkeeping in this process, a trainer's rank 0.
One announcement in 16 more is of no replica and has to be left out. A push has the tensors of
Qwen-Image by number and name length, and its bucket is told of as `nccl` does, without its bytes.

    join      registry → proven, healthy replicas; once a run
    alive     a sign of life to each; every 15 s, in a thread of its own
    route     two groups for each replica, asked for and taken back
    push      begin, one bucket, commit, and the comparison of all fingerprints
    rest      all fall asleep, as only colocated replicas do: a node's own

"of a step" is the sum of route and push over --step-s. MiB are what this process takes more.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from bench_machine import cpu_name, tool_parser, versions

from megadiff.process.lifeline import exit_with
from megadiff.rollout.client.client import Drawn, ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.proof import REPLICA, sign
from megadiff.sync.bucket import Bucket
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.base import HttpTransport
from megadiff.tensors.fingerprint import commit_digest, fingerprints
from megadiff.types import Prompt, RolloutRequest, Sampling

STEP_S = 73.0  # Qwen-Image on 4 H200s, docs/performance.md
NUM_TENSORS = 1933  # of Qwen-Image's transformer
NAME = "transformer.transformer_blocks.{}.attn.add_q_proj.weight"
TOKEN = "the-benchmarks-own-token"
FALSE_CLAIMS = 16  # one for so many replicas
COLUMNS = ("join", "alive", "route", "push", "rest")


class FakeReplicas:
    """Answer for many replicas from one process, each on a port of its own."""

    def __init__(self, registry: Path, digits: Mapping[str, str]) -> None:
        self.registry = registry
        self._worker = {"fingerprints": digits, "bound_modules": []}
        # made once: the replicas' own work is not measured
        self._digest = commit_digest(self._worker)
        self._names: dict[int, str] = {}

    async def run(self, count: int) -> None:
        """Announce the replicas and serve until the process is ended."""
        for index in range(count):
            name = f"replica_{index:04}"
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            self._names[port] = name
            self._announce(name, port)
            if index % FALSE_CLAIMS == 0:
                self._announce(f"a_false_{index:04}", port)
        await asyncio.Event().wait()

    def _announce(self, name: str, port: int) -> None:
        entry = {"name": name, "url": f"http://127.0.0.1:{port}"}
        (self.registry / f"{name}.json").write_text(json.dumps(entry))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = 0
                for line in head.split("\r\n")[1:]:
                    field, _, value = line.partition(":")
                    if field.lower() == "content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                answer = self._answer(head.split(" ")[1], body, port)
                fields = f"Content-Type: application/json\r\nContent-Length: {len(answer)}"
                writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: str, body: bytes, port: int) -> bytes:
        if path == "/rl/weights/commit":
            # as commit_answer() does
            value = json.loads(body)
            is_expected = value["digests"] == [self._digest]
            worker = {"digest": self._digest} if is_expected else self._worker
            return json.dumps({"version": value["version"], "workers": [worker]}).encode()
        if path == "/rl/hello":
            nonce = json.loads(body)["nonce"]
            url = f"http://127.0.0.1:{port}"
            proof = sign(TOKEN, role=REPLICA, nonce=nonce, url=url)
            return json.dumps({"nonce": nonce, "proof": proof}).encode()
        if path == "/health":
            return json.dumps({"name": self._names[port], "state": "ready"}).encode()
        return b"{}"


def serve_fakes(registry: Path, count: int, digits: Mapping[str, str], parent: int) -> None:
    exit_with(parent)
    asyncio.run(FakeReplicas(registry, digits).run(count))


class ToldTransport(HttpTransport):
    """Tell replicas of a bucket instead of sending it."""

    def send(self, bucket: Bucket) -> None:
        self.wait(self.start(lambda target: target.weights_bucket({"bytes": 0})))


class TinyWeights:
    """Give the sync as many tensors as a model has, of a few bytes."""

    lora = None
    changed = frozenset({"transformer"})

    def __init__(self, count: int) -> None:
        self.tensors = [(NAME.format(index), torch.full((4,), index)) for index in range(count)]

    def named_weights(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]:
        yield [(name, tensor.float()) for name, tensor in self.tensors]

    def mark_pushed(self) -> None:
        pass


class EchoClient:
    """A replica for routing alone: it answers requests with themselves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"http://{name}"

    def draw(self, requests: Sequence[RolloutRequest]) -> Drawn:
        return Drawn(groups=list(requests), engine_s=1.0, outstanding=0)

    def say_alive(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


def main(argv: list[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--tensors", type=int, default=NUM_TENSORS)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    was_initialized = dist.is_initialized()
    if not was_initialized:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cpu_group = dist.new_group([0], backend="gloo")
    rows = []
    print("replicas  " + "".join(f"{name + ' s':>9}" for name in COLUMNS) + "  of a step      MiB")
    for count in options.replicas:
        row = measure(count, options.tensors, cpu_group)
        row["of_step"] = (row["route"] + row["push"]) / options.step_s
        rows.append(row)
        seconds = "".join(f"{row[name]:9.3f}" for name in COLUMNS)
        print(f"{count:8}  {seconds}  {row['of_step']:9.2%}  {row['mib']:7.0f}", flush=True)

    if not was_initialized:
        dist.destroy_process_group()
    if options.json:
        figures = {"rows": rows, "cpu": cpu_name(), "versions": versions()}
        options.json.write_text(json.dumps(figures))
    return 0


def measure(count: int, num_tensors: int, cpu_group: dist.ProcessGroup) -> dict[str, float]:
    """Return the seconds of COLUMNS, and the MiB, for so many replicas."""
    weights = TinyWeights(num_tensors)
    (bucket,) = weights.named_weights(0, ())
    manifest = {name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in bucket}
    before = psutil.Process().memory_info().rss
    row: dict[str, float] = {"replicas": count}

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        digits = fingerprints(dict(bucket))
        fakes = multiprocessing.get_context("spawn").Process(
            target=serve_fakes, args=(Path(folder), count, digits, os.getpid())
        )
        fakes.start()
        stack.callback(fakes.join)
        stack.callback(fakes.kill)
        num_files = count + math.ceil(count / FALSE_CLAIMS)
        while len(list(Path(folder).glob("*.json"))) < num_files:  # it imports torch meanwhile
            assert fakes.is_alive()
            time.sleep(0.1)

        with timed(row, "join"):
            healthy = wait_until_announced(
                Path(folder), count=count, timeout_s=300, token=TOKEN, run="bench"
            )
        clients = [
            ReplicaClient(entry["url"], entry["name"], token=TOKEN, run="bench")
            for entry in healthy
        ]
        fleet = stack.enter_context(Fleet(clients, batch_size=32))
        with timed(row, "alive"), ThreadPoolExecutor(16) as pool:
            list(pool.map(ReplicaClient.say_alive, clients))

        sync = WeightSync(
            weights,
            ToldTransport(fleet.weight_targets()),
            manifest,
            boxes={client.name: [{}] for client in clients},
            bucket_bytes=2**30,
            cpu_group=cpu_group,
        )
        stack.enter_context(closing(sync))
        sync.push(1)  # connections are opened in it
        with timed(row, "push"):
            sync.push(2)
        with timed(row, "rest"):
            fleet.sleep()
        row["mib"] = (psutil.Process().memory_info().rss - before) / 2**20

    with Fleet([EchoClient(str(index)) for index in range(count)], batch_size=32) as fleet:
        requests = make_requests(2 * count)
        with timed(row, "route"):
            arrived = list(fleet.generate(requests))
        assert sorted(index for index, _ in arrived) == list(range(2 * count))
    return row


def make_requests(count: int) -> list[RolloutRequest]:
    sampling = Sampling(height=512, width=512, num_inference_steps=10)
    requests = []
    for index in range(count):
        prompt = Prompt(text="x" * (index % 97), id=f"{index:016x}")
        request = RolloutRequest(
            prompt=prompt, sampling=sampling, sample_indices=tuple(range(16)), seed=0, step=0
        )
        requests.append(request)
    return requests


@contextmanager
def timed(row: dict[str, float], name: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    row[name] = time.perf_counter() - start_s


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
