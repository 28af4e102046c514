"""The sync against a target that misbehaves. (What a real replica does is in tests/e2e.)"""

import pytest
import torch

from megadiff.config.schema import ParallelConfig
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.weights.fingerprint import fingerprint
from megadiff.weights.sync import HttpSync

WEIGHTS = {
    f"transformer.layer{i}.weight": torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)
}
MANIFEST = {name: {"dtype": "float32", "shape": [4, 8]} for name in WEIGHTS}


class Source:
    """Gives the weights in buckets of two."""

    def __init__(self, weights):
        self.weights, self.finished = weights, False

    def named_weights(self, bucket_bytes):
        items = list(self.weights.items())
        for start in range(0, len(items), 2):
            yield items[start : start + 2]
        self.finished = True


class Target:
    """Holds what it was sent, after `fault` had its way with each bucket."""

    def __init__(self, name="replica_0", fault=lambda bucket: bucket):
        self.name, self.fault, self.held, self.version = name, fault, {}, None

    def weights_begin(self, version, manifest):
        self.manifest = manifest

    def weights_bucket(self, tensors):
        self.held |= {name: tensor.clone() for name, tensor in self.fault(list(tensors))}

    def weights_commit(self, version):
        self.version = version
        return {name: fingerprint(tensor) for name, tensor in self.held.items()}


@pytest.fixture(scope="module")
def cpu_group():
    parallel = ParallelConfig()
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=parallel.dp_replicate, world_size=1)
    return init_mesh(layout, "cpu").cpu_group


def _push(cpu_group, *targets, weights=WEIGHTS):
    source = Source(weights)
    sync = HttpSync(source, targets, MANIFEST, bucket_bytes=1, cpu_group=cpu_group)
    try:
        return sync.push(7)
    finally:
        assert source.finished  # other ranks are in the same gathers: an error must not leave them there


def test_a_whole_push(cpu_group):
    targets = [Target(), Target("replica_1")]
    assert _push(cpu_group, *targets)["sync/gib"] == pytest.approx(5 * 128 / 2**30)
    for target in targets:
        assert target.version == 7 and target.manifest == MANIFEST
        assert all(torch.equal(target.held[name], tensor) for name, tensor in WEIGHTS.items())


def _flip(bucket):
    name, tensor = bucket[0]
    tensor = tensor.clone()
    tensor.view(torch.int32)[1, 3] ^= 1
    return [(name, tensor), *bucket[1:]]


def _break(bucket):
    raise ConnectionError("connection reset")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda bucket: bucket[1:], r"replica_1 .* 3 missing: transformer.layer0.weight"),
        (_flip, r"replica_1 .* holds 3 of 5 tensors with other bits.*transformer.layer0.weight \(sent"),
        (lambda bucket: [*bucket, ("transformer.extra", torch.zeros(1))], r"1 extra: transformer.extra"),
        (_break, r"ConnectionError: connection reset"),
    ],
)
def test_a_replica_that_holds_something_else(cpu_group, fault, text):
    with pytest.raises(AgreedError, match=text):
        _push(cpu_group, Target(), Target("replica_1", fault))


def test_a_trainer_that_sends_other_names_than_the_model_has(cpu_group):
    fewer = dict(list(WEIGHTS.items())[1:])
    target = Target()
    with pytest.raises(AgreedError, match="1 missing: transformer.layer0.weight"):
        _push(cpu_group, target, weights=fewer)
    assert target.version is None  # never committed
