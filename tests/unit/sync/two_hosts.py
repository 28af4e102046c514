"""A trainer and a replica worker as on two hosts: two network namespaces, joined by a cable.

Started as `unshare -rn python two_hosts.py`. The namespaces go with their processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch

from megadiff.sync.transports.group import GroupTransport, Member

TRAINER = "10.77.0.1"
WORKER = "10.77.0.2"
CPU = torch.device("cpu")
BUCKET = [("transformer.a", torch.arange(6.0).view(2, 3))]
MANIFEST = {"transformer.a": {"dtype": "float32", "shape": [2, 3]}}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def plug_in(device: str, address: str) -> None:
    ip("link", "set", "lo", "up")  # a host reaches its own address by it
    ip("address", "add", f"{address}/24", "dev", device)
    ip("link", "set", device, "up")


class Worker:
    """The other process as a target: an order is a line, and so is its answer."""

    name = "replica_0"
    url = f"http://{WORKER}:1"

    def __init__(self) -> None:
        command = ["unshare", "-n", sys.executable, __file__, "worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()  # it is in its namespace
        ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        ip("link", "set", "cable1", "netns", str(self._process.pid))
        plug_in("cable0", TRAINER)
        self.order("plug_in")

    def order(self, name: str, value: object = None) -> Any:
        self._process.stdin.write(json.dumps([name, value]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def weights_begin(self, version: int, manifest: Any, *, lora: Any, transport: Any) -> None:
        self.order("join", transport)

    def weights_bucket(self, bucket: object) -> None:
        self.received = self.order("receive", bucket)

    def weights_commit(self, version: int, digests: object) -> list[Any]:
        return []

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)

    def _answer(self) -> Any:
        return json.loads(self._process.stdout.readline())


def trainer() -> None:
    worker = Worker()
    transport = GroupTransport([worker], device=CPU, num_workers=[1], heartbeat_s=60.0)
    transport.begin(1, MANIFEST, None)
    transport.send(BUCKET)
    transport.close()
    worker.end()
    assert worker.received[:24] == list(BUCKET[0][1].numpy().tobytes()), worker.received


def worker() -> None:
    """Follow the orders that come by line, until there are no more."""
    member = Member(CPU, worker=0)
    orders = SimpleNamespace(
        plug_in=lambda _: plug_in("cable1", WORKER),
        join=member.join,
        receive=lambda bucket: member.receive(bucket, bucket["tensors"]).tolist(),
    )
    sys.stdout.write("null\n")
    sys.stdout.flush()
    for line in sys.stdin:
        name, value = json.loads(line)
        sys.stdout.write(json.dumps(getattr(orders, name)(value)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    {"trainer": trainer, "worker": worker}[sys.argv[1]]()
