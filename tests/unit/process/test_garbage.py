"""What the garbage collector leaves out."""

from __future__ import annotations

import gc

import pytest

from megadiff.process.garbage import FirstRounds


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_what_the_first_rounds_made_is_left_out_and_nothing_later():
    rounds = FirstRounds(2)
    kept = []
    for _ in range(3):
        before = gc.get_freeze_count()
        kept += [[] for _ in range(1000)]
        rounds.end()
        grown = gc.get_freeze_count() - before
        if len(kept) <= 2000:
            assert grown >= 1000
    assert grown <= 0


def test_garbage_of_the_first_rounds_is_collected_before():
    class Node:
        pass

    node = Node()
    node.itself = node
    del node
    FirstRounds(1).end()
    assert not [each for each in gc.get_objects() if type(each) is Node]
    gc.unfreeze()
    assert not [each for each in gc.get_objects() if type(each) is Node]
