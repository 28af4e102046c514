"""A replica's side of a push, in this process."""

from __future__ import annotations

from pathlib import Path

import torch

from megadiff.sync.transports.receive import Receiver, resolve
from megadiff.types import LoraSpec

CPU = torch.device("cpu")
BUCKETS = [[("transformer.a", torch.arange(6.0).view(2, 3))], [("transformer.b", torch.ones(4))]]
MANIFEST = {
    "transformer.a": {"dtype": "float32", "shape": [2, 3]},
    "transformer.b": {"dtype": "float32", "shape": [4]},
}
LORA = LoraSpec(rank=1, alpha=1.0, modules=("m",))
LORA_BUCKET = [
    ("transformer.m.lora_A.weight", torch.ones(1, 2)),
    ("transformer.m.lora_B.weight", torch.zeros(2, 1)),
]
LORA_MANIFEST = {
    name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in LORA_BUCKET
}


class Target:
    """A replica that reads each bucket as a worker does, in this process; fault(bucket number) may
    raise instead.
    """

    url = "http://127.0.0.1:1"

    def __init__(self, *, folder: Path | None = None, fault=lambda number: None) -> None:
        self.name, self.folder, self.fault = "replica_0", folder, fault
        self.receiver, self.held, self.number = Receiver(CPU, worker=0), {}, 0
        self.has_served = True
        self.reasons = []  # for which it was lost

    def weights_begin(self, version, manifest, *, lora, transport):
        self.held = {}
        self.receiver.begin(transport)

    def weights_bucket(self, bucket):
        self.fault(self.number)
        self.number += 1
        manifest, source = resolve(bucket, weights_folder=self.folder)
        with self.receiver.tensors(source) as pairs:
            held = {name: tensor.clone() for name, tensor in pairs}
        assert held.keys() == manifest.keys()
        self.held |= held

    def weights_commit(self, version, digests):
        return []

    def lose(self, reason):
        self.reasons.append(reason)


def push(transport, version=1, buckets=BUCKETS, manifest=MANIFEST, lora=None) -> None:
    error = None
    try:
        transport.begin(version, manifest, lora)
        for bucket in buckets:
            transport.send(bucket)
        transport.commit(
            version, {target.name: [] for target in transport.targets}, lambda *answer: None
        )
    except Exception as failure:
        error = failure
        raise
    finally:
        transport.end(error)


def assert_held(target: Target) -> None:
    assert target.held.keys() == MANIFEST.keys()
    for bucket in BUCKETS:
        for name, tensor in bucket:
            assert torch.equal(target.held[name], tensor)
