"""Transport nccl's process groups: how long they are kept, how they break, and who is to blame."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megadiff.sync.transports import group, transfers
from megadiff.sync.transports.base import GroupBrokeError, SyncError
from megadiff.sync.transports.group import GroupTransport, Member
from tests.unit.sync.push_target import BUCKETS, CPU, MANIFEST, Target, assert_held, push


def in_group(*targets: Target, timeout_s: float = transfers.TIMEOUT_S) -> GroupTransport:
    for place, target in enumerate(targets):
        target.name = f"replica_{place}"
    return GroupTransport(
        targets, device=CPU, num_workers=[1] * len(targets), heartbeat_s=2 * timeout_s
    )


def test_a_group_is_kept_until_it_breaks():
    """A replica that refuses a bucket before it receives it leaves nobody waiting; the next push
    has a group of its own.
    """

    def fault(number):
        if number == 5:
            raise ConnectionError("cut")

    targets = [Target(), Target(fault=fault)]
    transport = in_group(*targets)
    groups = []
    for version in (1, 2):
        push(transport, version)
        groups.append(transport._description["group"])
        assert_held(targets[0])
        assert_held(targets[1])
    assert groups[0] == groups[1]
    start = time.monotonic()
    with pytest.raises(ConnectionError):
        push(transport, 3)
    assert time.monotonic() - start < 5
    targets[1].number = 10
    push(transport, 4)
    assert transport._description["group"] not in groups
    assert_held(targets[1])
    transport.close()


def test_a_replica_that_is_busy_for_long_joins_late():
    class Late(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            time.sleep(2)
            super().weights_begin(version, manifest, lora=lora, transport=transport)

    targets = [Target(), Late()]
    transport = in_group(*targets, timeout_s=1.0)
    push(transport, 1)
    assert_held(targets[0])
    assert_held(targets[1])
    transport.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_closed_its_connection_is_named(answers):
    """gloo then refuses to begin a message, where others fail later."""

    class Silent(Target):
        def weights_bucket(self, bucket):
            time.sleep(2.5)  # longer than a message may take; until the fleet finds it hung
            raise ConnectionError("replica_1 has not answered for 2 s")

    targets = [Target(), Target() if answers else Silent()]
    transport = in_group(*targets, timeout_s=2.0)
    transport.begin(1, MANIFEST, None)
    targets[1].receiver._group._drop()
    time.sleep(0.5)  # until its connection is closed
    with pytest.raises(
        (ValueError, ConnectionError), match="not in group" if answers else "replica_1 has not"
    ):
        transport.send(BUCKETS[0])
    transport.end(ValueError())
    transport.close()


def wait_in_vain(number):
    raise GroupBrokeError("replica: nothing came")


def die(number):
    time.sleep(0.5)  # later than the others notice
    raise ConnectionError("reset by peer")


def say_nothing(number):
    time.sleep(3)


@pytest.mark.parametrize(
    ("fault", "has_served", "told", "lost"),
    [
        (die, True, "reset by peer", []),
        (wait_in_vain, True, "replica_2 broke.*nothing came", ["replica_0", "replica_2"]),
        (wait_in_vain, False, "replica_2 broke.*nothing came", []),
        (say_nothing, True, "the trainer and replica_2 broke", ["replica_2"]),
        (say_nothing, False, "the trainer and replica_2 broke", []),
    ],
)
def test_who_waited_in_vain_is_lost_only_where_nobody_else_has_failed(
    fault, has_served, told, lost
):
    """A broadcast between GPUs fails for all when one replica is gone. Of newcomers none is lost
    here: the run itself finds out which of them it can take.
    """
    targets = [Target(fault=wait_in_vain), Target(), Target(fault=fault)]
    targets[2].has_served = has_served
    transport = in_group(*targets, timeout_s=20.0)
    transport.patience_s = 1.0
    with pytest.raises((ConnectionError, SyncError), match=told):
        push(transport)
    assert [target.name for target in targets if target.reasons] == lost
    transport.close()


def test_a_replica_that_does_not_join_takes_nobody_along():
    """Those that joined say that they have waited in vain, and wait no longer."""
    ended = threading.Event()

    class Refusing(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            time.sleep(0.5)  # the other has joined
            raise ValueError("no memory for the weights")

    class Joining(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            try:
                super().weights_begin(version, manifest, lora=lora, transport=transport)
            except RuntimeError as error:
                assert group.BROKE in str(error)
                ended.set()
                raise GroupBrokeError(str(error)) from error

    targets = [Joining(), Refusing()]
    start = time.monotonic()
    with pytest.raises(ValueError, match="no memory for the weights"):
        push(in_group(*targets))
    assert ended.wait(5) and time.monotonic() - start < 5
    assert not targets[0].reasons


def test_a_trainer_that_goes_leaves_a_worker_waiting_for_no_longer_than_its_limit():
    target = Target()
    transport = in_group(target, timeout_s=1.0)
    transport.begin(1, MANIFEST, None)
    source = {"transport": "nccl", "group": transport._description["group"], "tensors": MANIFEST}
    with pytest.raises(RuntimeError, match="did not come whole from the trainer"):
        target.weights_bucket(source)
    with pytest.raises(ValueError, match="not in group"):
        target.weights_bucket(source)
    transport.close()


DESCRIPTION = {
    "group": "a",
    "address": "127.0.0.1",
    "port": 1,
    "rank": 1,
    "world_size": 2,
    "timeout_s": 1.0,
}


@pytest.mark.parametrize("key", DESCRIPTION)
def test_a_description_of_no_group(key):
    with pytest.raises(ValueError, match=f"transport nccl needs '{key}'"):
        Member(CPU, worker=0).join(DESCRIPTION | {key: None})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 2 * transfers.TIMEOUT_S])
def test_a_trainer_cannot_hold_a_worker_for_longer_than_the_workers_own_limit(timeout_s):
    with pytest.raises(ValueError, match="must be above 0 and at most 30"):
        Member(CPU, worker=0).join(DESCRIPTION | {"timeout_s": timeout_s})


def test_a_broadcast_that_ends_by_an_error_is_no_success():
    """NCCL's work is complete then, and a wait() without a timeout says nothing."""

    class Work:
        def is_completed(self):
            return True

        def wait(self, timeout=None):
            if timeout is not None:
                raise RuntimeError("NCCL communicator was aborted")

    class Group:
        def broadcast(self, tensors, options):
            return Work()

    with pytest.raises(RuntimeError, match="communicator was aborted"):
        transfers.broadcast(Group(), torch.zeros(4), timeout_s=1.0).result(5)


def test_a_message_of_another_size_or_bucket_is_not_taken():
    """gloo itself would fill the buffer in part, or end the process."""
    tags = {transfers.message_tag(number, size) for number in range(50) for size in range(50)}
    assert len(tags) == 2500 and all(0 <= tag < 2**31 for tag in tags)


def test_a_group_by_gloo_across_two_hosts():
    """Each end listens on its address that leads to the other, whatever its name stands for."""
    namespace = ["unshare", "-rn"]
    veth = [*namespace, *"ip link add cable0 type veth peer name cable1".split()]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network namespaces need unshare and ip (util-linux, iproute2)")
    refusal = subprocess.run(veth, capture_output=True, text=True)
    if refusal.returncode:
        pytest.skip(f"network namespaces are not permitted here: {refusal.stderr.strip()}")
    script = Path(__file__).with_name("two_hosts.py")
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [*namespace, sys.executable, str(script), "trainer"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr[-3000:]
