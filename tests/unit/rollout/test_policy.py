"""The rules of a weight push: when a replica generates, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megadiff.rollout.server.policy import UNPUSHED, PolicyState, Refused
from megadiff.rollout.server.routes import _answer
from megadiff.tensors.lora_names import lora_from_json
from megadiff.types import LoraSpec

EXPECTED = {
    "transformer.a": {"dtype": "float32", "shape": [2, 3]},
    "transformer.b": {"dtype": "float32", "shape": [4]},
}
A = {"transformer.a": EXPECTED["transformer.a"]}
B = {"transformer.b": EXPECTED["transformer.b"]}


@contextmanager
def refused(status: int, match: str) -> Iterator[None]:
    with pytest.raises(Refused, match=match) as error:
        yield
    assert error.value.status == status


def push(
    policy: PolicyState,
    version: int,
    manifest: dict = EXPECTED,
    lora: LoraSpec | None = None,
    *,
    keeps_base: bool = True,
) -> None:
    """A whole push, a tensor at a time."""
    policy.begin(version, manifest, lora)
    for name, row in manifest.items():
        policy.check_bucket({name: row})
        policy.loaded({name: row})
    policy.check_commit(version)
    policy.commit(keeps_base=keeps_base)


def test_generation_needs_the_asked_version() -> None:
    policy = PolicyState(EXPECTED)
    policy.require_ready(None)
    policy.require_ready(UNPUSHED)
    with refused(409, "policy_version 3 was asked for, this replica holds -1"):
        policy.require_ready(3)
    push(policy, 3)
    policy.require_ready(3)
    with refused(409, "2 was asked for, this replica holds 3"):
        policy.require_ready(2)


def test_no_generation_from_begin_to_commit_nor_after_a_broken_push() -> None:
    policy = PolicyState(EXPECTED)
    policy.begin(1, EXPECTED)
    with refused(409, "version 1 is being pushed over version -1"):
        policy.require_ready(None)
    policy.loaded(A)
    with refused(400, "1 missing: transformer.b"):
        policy.check_commit(1)
    with refused(409, "version 1 is being pushed"):
        policy.require_ready(None)
    push(policy, 2)  # a whole push repairs it, and counts nothing of the broken one
    policy.require_ready(2)


def test_a_new_begin_forgets_what_the_old_push_brought() -> None:
    policy = PolicyState(EXPECTED)
    policy.begin(1, EXPECTED)
    policy.loaded(A)
    policy.begin(1, EXPECTED)
    policy.loaded(B)
    with refused(400, "1 missing: transformer.a"):
        policy.check_commit(1)


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (A, "1 missing: transformer.b"),
        (
            EXPECTED | {"transformer.c": {"dtype": "float32", "shape": [1]}},
            "1 extra: transformer.c",
        ),
        (
            EXPECTED | {"transformer.b": {"dtype": "bfloat16", "shape": [4]}},
            "transformer.b comes as .*bfloat16",
        ),
        (
            EXPECTED | {"transformer.b": {"dtype": "float32", "shape": [5]}},
            r"transformer.b comes as .*\[5\]",
        ),
        (EXPECTED | {"transformer.b": 7}, "transformer.b comes as 7"),
        (  # JSON's 4.0 equals 4
            EXPECTED | {"transformer.b": {"dtype": "float32", "shape": [4.0]}},
            r"transformer.b comes as .*\[4\.0\]",
        ),
    ],
)
def test_a_manifest_that_differs_is_refused(manifest: dict, match: str) -> None:
    policy = PolicyState(EXPECTED)
    with refused(400, match):
        policy.begin(1, manifest)
    policy.require_ready(UNPUSHED)  # nothing was touched


def test_buckets() -> None:
    policy = PolicyState(EXPECTED)
    with refused(409, "no weight push is open"):
        policy.check_bucket(A)
    policy.begin(1, EXPECTED)
    with refused(400, "does not hold: transformer.z"):
        policy.check_bucket({"transformer.z": {"dtype": "float32", "shape": [1]}})
    with refused(400, r"transformer.a comes as .*\[3, 2\]"):
        policy.check_bucket({"transformer.a": {"dtype": "float32", "shape": [3, 2]}})
    with refused(409, "commit of version 2, but the push that is open is 1"):
        policy.check_commit(2)


def test_sleep() -> None:
    policy = PolicyState(EXPECTED)
    policy.begin(1, EXPECTED)
    with refused(409, "is being pushed"):
        policy.fall_asleep()
    policy.loaded(EXPECTED)
    policy.commit()
    policy.fall_asleep()
    for call in (policy.require_ready, policy.fall_asleep):
        with refused(409, "asleep and holds no weights"):
            call()
    with refused(409, "which this replica does not hold"):
        policy.begin(2, {})
    policy.begin(2, EXPECTED)
    assert policy.state == "updating"


def test_a_replica_that_loads_no_weights_is_asleep() -> None:
    policy = PolicyState(EXPECTED, has_weights=False)
    with refused(409, "asleep and holds no weights"):
        policy.require_ready()
    policy.fall_asleep(keeps_base=True)
    with refused(409, "which this replica does not hold"):
        policy.begin(1, {})
    push(policy, 1)
    policy.require_ready(1)


def test_a_base_that_sleep_keeps_need_not_come_again() -> None:
    policy = PolicyState(EXPECTED, has_weights=False)
    push(policy, 1)
    policy.fall_asleep(keeps_base=True)
    with refused(409, "asleep"):
        policy.require_ready(1)
    push(policy, 1, {})
    policy.require_ready(1)


LORA = LoraSpec(rank=2, alpha=4.0, modules=("a",))
ADAPTER = {
    "transformer.a.lora_A.weight": {"dtype": "float32", "shape": [2, 3]},
    "transformer.a.lora_B.weight": {"dtype": "float32", "shape": [2, 2]},
}
BASE = {
    "transformer.a.weight": EXPECTED["transformer.a"],
    "transformer.b": EXPECTED["transformer.b"],
}


def test_lora_alone_needs_a_base_that_was_pushed_whole() -> None:
    policy = PolicyState(BASE)
    with refused(409, "the push leaves out transformer, which this replica does not hold"):
        policy.begin(0, ADAPTER, LORA)
    assert policy.state == "ready"
    push(policy, 0, BASE | ADAPTER, LORA)
    push(policy, 1, ADAPTER, LORA)
    policy.begin(2, ADAPTER, LORA)  # and breaks off
    with refused(409, "leaves out transformer,"):
        policy.begin(2, ADAPTER, LORA)
    with refused(409, "version 2 is being pushed"):
        policy.require_ready(None)
    push(policy, 2, BASE | ADAPTER, LORA)
    push(policy, 3, ADAPTER, LORA)


def test_a_base_of_which_only_copies_are_left_is_pushed_again() -> None:
    policy = PolicyState(BASE)
    push(policy, 0, BASE | ADAPTER, LORA, keeps_base=False)
    policy.require_ready(0)
    with refused(
        409,
        "leaves out transformer, which this replica does not hold from pushes before it; push "
        "everything",
    ):
        policy.begin(1, ADAPTER, LORA)
    push(policy, 1, BASE | ADAPTER, LORA)
    push(policy, 2, ADAPTER, LORA)


def of_second(manifest: dict) -> dict:
    return {name.replace("transformer.", "transformer_2."): row for name, row in manifest.items()}


def test_components_that_are_pushed_one_by_one() -> None:
    """What is left out must be held: committed before, under an equal LoRA, and no push broken off
    since.
    """
    policy, second = PolicyState(BASE | of_second(BASE)), of_second(BASE)

    with refused(409, "leaves out transformer_2, which"):
        policy.begin(0, BASE)
    push(policy, 0, BASE | second)
    push(policy, 1, second)
    push(policy, 2, {})
    for lora in (LORA, LoraSpec(rank=2, alpha=5.0, modules=("a",))):
        with refused(409, "leaves out transformer_2's LoRA, which"):
            policy.begin(3, ADAPTER, lora)
        push(policy, 3, ADAPTER | of_second(ADAPTER), lora)
        push(policy, 4, of_second(ADAPTER), lora)
    push(policy, 5, BASE)  # no LoRA any more
    with refused(409, "leaves out transformer_2's LoRA, which"):
        policy.begin(6, ADAPTER, LORA)
    policy.begin(6, second)  # and breaks off
    with refused(409, "leaves out transformer, which"):
        policy.begin(6, second)
    push(policy, 6, BASE | second)


def test_a_manifest_is_of_whole_parts() -> None:
    policy = PolicyState(BASE)
    (a_name, a_row), (b_name, b_row) = ADAPTER.items()
    with refused(409, "leaves out transformer's LoRA,"):
        policy.begin(0, BASE, LORA)
    for manifest, lora, text in (
        (BASE | ADAPTER, None, "0 tensors of transformer's LoRA: 2 extra"),
        (BASE | {a_name: a_row}, LORA, f"2 tensors of transformer's LoRA: 1 missing: {b_name}"),
        (
            {"transformer.b": EXPECTED["transformer.b"]} | ADAPTER,
            LORA,
            "2 tensors of transformer: 1 missing",
        ),
        (BASE | ADAPTER | {"strange": a_row}, LORA, "0 tensors of strange: 1 extra"),
        (BASE | ADAPTER | {a_name: a_row | {"shape": [3, 3]}}, LORA, f"{a_name} comes as"),
        (BASE | ADAPTER | {b_name: b_row | {"dtype": "bfloat16"}}, LORA, f"{b_name} comes as"),
        (
            BASE | ADAPTER,
            LoraSpec(rank=2, alpha=4.0, modules=("c",)),
            "lora module 'c' is a matrix of none",
        ),
    ):
        with refused(400, text):
            policy.begin(0, manifest, lora)
    assert policy.state == "ready"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "must be null or an object"),
        ({"rank": 1}, "must be null or an object"),
        ({"rank": 0, "alpha": 1.0, "modules": ["a"]}, "lora.rank=0"),
        ({"rank": 1, "alpha": float("nan"), "modules": ["a"]}, "lora.alpha=nan"),
        ({"rank": 1, "alpha": "1", "modules": ["a"]}, "lora.alpha='1'"),
        ({"rank": 1, "alpha": 1, "modules": []}, "at least one module"),
        ({"rank": 1, "alpha": 1, "modules": ["b", "a"]}, "sorted and without doubles"),
        ({"rank": 1, "alpha": 1, "modules": ["a", "a"]}, "sorted and without doubles"),
    ],
)
def test_lora_that_is_no_lora(value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lora_from_json(value)


def test_a_full_disk_is_told_as_such() -> None:
    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    answer = asyncio.run(_answer(full))
    assert answer.status_code == 507 and b"send smaller buckets (sync.bucket_mib)" in answer.body


def test_what_else_a_disk_says_is_told() -> None:
    async def stale() -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "/weights/bucket")

    answer = asyncio.run(_answer(stale))
    assert answer.status_code == 500
    assert b"Stale file handle: '/weights/bucket'; see the replica's log" in answer.body


def test_a_bucket_of_an_earlier_push_is_told_so() -> None:
    policy = PolicyState(EXPECTED)
    policy.begin(1, EXPECTED)
    earlier = policy.num_pushes
    policy.check_push(earlier)
    policy.begin(1, EXPECTED)
    with refused(409, "another push began"):
        policy.check_push(earlier)
