"""The rules of a weight push: when a replica generates, and what it refuses."""

from __future__ import annotations

import pytest

from megadiff.rollout.policy import UNPUSHED, PolicyState, Refused

EXPECTED = {
    "transformer.a": {"dtype": "float32", "shape": [2, 3]},
    "transformer.b": {"dtype": "float32", "shape": [4]},
}
A = {"transformer.a": EXPECTED["transformer.a"]}
B = {"transformer.b": EXPECTED["transformer.b"]}


def refused(status: int, match: str):
    class Expect:
        def __enter__(self) -> None:
            self.context = pytest.raises(Refused, match=match)
            self.info = self.context.__enter__()

        def __exit__(self, *error: object) -> bool:
            swallowed = self.context.__exit__(*error)
            assert self.info.value.status == status
            return swallowed

    return Expect()


def push(policy: PolicyState, version: int) -> None:
    policy.begin(version, EXPECTED)
    for bucket in (A, B):
        policy.check_bucket(bucket)
        policy.loaded(bucket)
    policy.check_commit(version)
    policy.commit()


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
        (EXPECTED | {"transformer.c": {"dtype": "float32", "shape": [1]}}, "1 extra: transformer.c"),
        (EXPECTED | {"transformer.b": {"dtype": "bfloat16", "shape": [4]}}, "transformer.b comes as .*bfloat16"),
        (EXPECTED | {"transformer.b": {"dtype": "float32", "shape": [5]}}, r"transformer.b comes as .*\[5\]"),
        (EXPECTED | {"transformer.b": 7}, "transformer.b comes as 7"),
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
    with refused(409, "is ready, not asleep"):
        policy.wake()
    policy.fall_asleep()
    for call in (policy.require_ready, policy.fall_asleep, lambda: policy.begin(1, EXPECTED)):
        with refused(409, "asleep"):
            call()
    policy.wake()
    policy.require_ready(UNPUSHED)
