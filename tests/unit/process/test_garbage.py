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
    for index in range(3):
        kept.append([[] for _ in range(1000)])
        rounds.end()
        # frozen objects are not listed; their count falls when any old one ends
        listed = set(map(id, gc.get_objects()))
        num_listed = sum(id(each) in listed for each in kept[-1])
        assert num_listed == (0 if index < 2 else 1000)


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
