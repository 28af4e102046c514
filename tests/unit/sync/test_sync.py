"""The sync against targets that misbehave. (What real replicas do is in tests/e2e.)"""

import threading
import time
import weakref

import pytest
import torch

from megadiff.models.served_names import ServedPlace
from megadiff.parallel.collectives import AgreedError
from megadiff.sync.shared_base import MAPPED, MappedMemory, SharedBase
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.base import HttpTransport
from tests.meshes import one_rank_mesh
from tests.unit.sync.fake_replica import (
    LORA,
    MANIFEST,
    NAME,
    PAIR,
    PAIR_MANIFEST,
    WEIGHTS,
    Source,
    Target,
    lora_tensors,
)


@pytest.fixture(scope="module")
def cpu_group():
    return one_rank_mesh().cpu_group


def _sync(cpu_group, source, *targets, manifest=MANIFEST):
    boxes = {target.name: target.boxes for target in targets}
    return WeightSync(
        source, HttpTransport(targets), manifest, boxes=boxes, bucket_bytes=1, cpu_group=cpu_group
    )


def _push(cpu_group, *targets, weights=WEIGHTS):
    source = Source(weights)
    try:
        return _sync(cpu_group, source, *targets).push(7)
    finally:
        assert (
            source.finished
        )  # other ranks are in the same gathers: an error must not leave them there


def test_a_whole_push(cpu_group):
    targets = [Target(), Target("replica_1")]
    assert _push(cpu_group, *targets)["sync/gib"] == pytest.approx(5 * 128 / 2**30)
    for target in targets:
        assert target.version == 7 and target.begun == [set(MANIFEST)]
        assert all(torch.equal(target.held[name], tensor) for name, tensor in WEIGHTS.items())
        assert [worker.keys() for worker in target.answer] == [{"digest"}]


def test_a_digest_of_something_else_is_no_proof(cpu_group):
    class Confused(Target):
        def weights_commit(self, version, digests):
            return [{"digest": "0" * 64}]

    with pytest.raises(AgreedError, match="holds other tensors than were sent: 5 missing"):
        _push(cpu_group, Confused())


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
        (
            _flip,
            r"replica_1 .* holds 3 of 5 tensors with other bits.*transformer.layer0.weight \(sent",
        ),
        (
            lambda bucket: [*bucket, ("transformer.extra", torch.zeros(1))],
            r"1 extra: transformer.extra",
        ),
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


def test_the_base_travels_once_and_then_lora_alone(cpu_group):
    source, target = Source(WEIGHTS, LORA), Target()
    sync = _sync(cpu_group, source, target)
    sync.push(0)
    source.factor, source.changed = 2.0, {"transformer"}
    assert sync.push(1)["sync/gib"] == pytest.approx(4 * (2 * 2 * 8 + 2 * 4 * 2) / 2**30)
    assert target.begun == [set(MANIFEST) | set(lora_tensors(1)), set(lora_tensors(1))]
    assert (target.held["transformer.layer1.lora_B.weight"] == 2).all()
    assert sync.push(1)["sync/gib"] > 0 and len(target.begun) == 2  # it is there already

    target.held[NAME] = target.held[NAME] + 1  # no push of the base would find that out
    source.changed = {"transformer"}
    with pytest.raises(AgreedError, match=f"holds 1 of 9 tensors with other bits.*{NAME}"):
        sync.push(2)
    sync.push(2)  # after a failure: everything
    assert target.begun[-1] == set(MANIFEST) | set(lora_tensors(1)) and torch.equal(
        target.held[NAME], WEIGHTS[NAME]
    )
    sync.push(3)
    assert target.begun[-1] == set()  # nothing was trained


class MappingTarget(Target):
    """A replica that maps the base instead of reading it."""

    def weights_bucket(self, bucket):
        if not isinstance(bucket, dict):
            super().weights_bucket(bucket)
            return
        assert bucket["transport"] == MAPPED
        places = {name: ServedPlace(parameter=name) for name in bucket["tensors"]}
        empty = {name: torch.empty(row["shape"]) for name, row in bucket["tensors"].items()}
        self.memory = MappedMemory(torch.device("cpu"))
        self.held |= dict(self.memory.views(bucket, places, empty))


def test_a_shared_base_is_mapped_and_never_sent(cpu_group):
    """A push that wakes replicas brings nothing; one flipped bit of the base is found."""
    base = SharedBase(
        {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()},
        dtype=torch.float32,
        served_names={},
        device=torch.device("cpu"),
    )
    for name, tensor in base.tensors.items():
        tensor.copy_(WEIGHTS[name])
    source, target = Source(base.tensors, LORA), MappingTarget()
    sync = _sync(cpu_group, source, target)
    sync.shared_base = base
    lora_gib = pytest.approx(4 * (2 * 2 * 8 + 2 * 4 * 2) / 2**30)
    assert sync.push(0)["sync/gib"] == lora_gib
    assert target.begun == [set(MANIFEST) | set(lora_tensors(1))]
    assert torch.equal(target.held[NAME], WEIGHTS[NAME])

    sync.wake()
    assert sync.push(0)["sync/gib"] == 0 and target.begun[-1] == set()
    source.changed = {"transformer"}
    assert sync.push(1)["sync/gib"] == lora_gib and target.begun[-1] == set(lora_tensors(1))

    bits = base.tensors[NAME].view(torch.int32)
    bits[1, 3] ^= 1
    source.changed = {"transformer"}
    with pytest.raises(AgreedError, match=f"holds 1 of 9 tensors with other bits.*{NAME}"):
        sync.push(2)


def test_lora_that_is_bound_to_fewer_modules(cpu_group):
    target = Target()
    target.bound = ["transformer.layer1"]
    text = "replica_0 .* LoRA bound to other modules than were sent: 1 missing: transformer.layer3"
    with pytest.raises(AgreedError, match=text):
        _sync(cpu_group, Source(WEIGHTS, LORA), target).push(0)


def test_only_the_component_that_was_trained_travels(cpu_group):
    """What stays is verified all the same, against what was sent of it before."""
    source, targets = Source(dict(PAIR)), (Target(), Target("replica_1"))
    sync = _sync(cpu_group, source, *targets, manifest=PAIR_MANIFEST)
    assert sync.push(0)["sync/gib"] == pytest.approx(10 * 128 / 2**30)
    second = {name for name in PAIR if name.startswith("transformer_2.")}
    source.weights |= {name: PAIR[name] * 2 for name in second}
    source.changed = {"transformer_2"}
    assert sync.push(1)["sync/gib"] == pytest.approx(5 * 128 / 2**30)
    for target in targets:
        assert target.begun == [set(PAIR), second]
        assert all(
            torch.equal(target.held[name], tensor) for name, tensor in source.weights.items()
        )
    targets[1].held[NAME] = targets[1].held[NAME] + 1  # of the component that stays
    source.changed = {"transformer_2"}
    with pytest.raises(
        AgreedError, match=f"replica_1 at version 2 holds 1 of 10 tensors with other bits.*{NAME}"
    ):
        sync.push(2)
    sync.push(2)
    assert targets[1].begun[-1] == set(PAIR)


def test_other_weights_under_the_same_version_travel(cpu_group):
    """As an average that is evaluated does, and the trained weights after it."""
    source, target = Source(dict(PAIR)), Target()
    sync = _sync(cpu_group, source, target, manifest=PAIR_MANIFEST)
    sync.push(3)
    for factor in (2, 1):
        source.weights = {name: factor * tensor for name, tensor in PAIR.items()}
        source.changed = {"transformer", "transformer_2"}
        sync.push(3)
        assert target.version == 3 and torch.equal(target.held[NAME], factor * WEIGHTS[NAME])
    sync.push(3)
    assert len(target.begun) == 3  # nothing has changed since


def test_what_was_forgotten_travels_again(cpu_group):
    """As after a replica slept: all of it, and for the same version too."""
    source, target = Source(dict(PAIR)), Target()
    sync = _sync(cpu_group, source, target, manifest=PAIR_MANIFEST)
    sync.push(0)
    source.changed = set()
    for version in (0, 1):
        sync.forget()
        target.held.clear()
        sync.push(version)
        assert target.begun[-1] == target.held.keys() == set(PAIR)


BOXES = [
    {NAME: ((0, 4), (0, 4)), "transformer.layer1.weight": ((2 * rank, 2 * rank + 2), (0, 8))}
    for rank in range(2)
]
BOXES[1][NAME] = ((0, 4), (4, 8))


def test_every_worker_answers_for_its_part(cpu_group):
    _push(cpu_group, Target(boxes=BOXES), Target("whole"))
    swapped = Target(boxes=BOXES)
    source = Source(WEIGHTS)
    sync = _sync(cpu_group, source, swapped)
    swapped.boxes = BOXES[::-1]
    with pytest.raises(
        AgreedError,
        match=r"replica_0 at version 7 \(worker 0 of 2\) holds 2 of 5 tensors with other bits",
    ):
        sync.push(7)


def test_lora_follows_the_part_of_the_base_weight(cpu_group):
    """Rows of the base are rows of B, its columns are columns of A; the other of the two is there
    whole.
    """
    boxes = [
        {
            "transformer.layer1.weight": ((0, 2), (0, 8)),
            "transformer.layer3.weight": ((0, 4), (4, 8)),
        }
    ]
    held_boxes = boxes[0] | {
        "transformer.layer1.lora_B.weight": ((0, 2), (0, 2)),
        "transformer.layer3.lora_A.weight": ((0, 2), (4, 8)),
    }
    target = Target(boxes=boxes)
    sync = _sync(cpu_group, Source(WEIGHTS, LORA), target)
    target.boxes = [held_boxes | {"transformer.layer1.lora_A.weight": ((0, 2), (0, 8))}]
    sync.push(0)


class CountingSource:
    """Every tensor is made for the receiver; most: how many buckets were alive when one more had
    been gathered.
    """

    lora, changed = None, set()

    def __init__(self, gathering):
        self.gathering, self.most, self._alive = gathering, 0, []

    def mark_pushed(self): ...

    def named_weights(self, bucket_bytes, components):
        for name, tensor in WEIGHTS.items():
            self.gathering(name)
            tensor = tensor.clone()
            self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(tensor)]
            self.most = max(self.most, len(self._alive))
            bucket = [(name, tensor)]
            del tensor
            yield bucket
            del bucket


def test_one_bucket_is_gathered_while_the_one_before_travels(cpu_group):
    """Every bucket arrives only when the next one's gather has begun, and never are three of them
    alive.
    """
    names = list(WEIGHTS)
    begun = {name: threading.Event() for name in names}
    begun["end"] = threading.Event()
    begun["end"].set()

    def arrive(bucket):
        after = [*names, "end"][names.index(bucket[0][0]) + 1]
        assert begun[after].wait(10), f"{bucket[0][0]} travels before the gather of {after} begins"
        time.sleep(0.01)
        return bucket

    source = CountingSource(lambda name: begun[name].set())
    _sync(cpu_group, source, Target(fault=arrive)).push(1)
    assert source.most == 2


def test_a_gather_that_fails_ends_the_push(cpu_group):
    def gather(name):
        if name == "transformer.layer3.weight":
            raise FloatingPointError("gather")

    target = Target()
    with pytest.raises(FloatingPointError, match="gather"):
        _sync(cpu_group, CountingSource(gather), target).push(1)
    assert target.version is None
