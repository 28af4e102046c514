"""How groups are cut into calls to the replicas, and that each group comes back under its request's
index.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megadiff.rollout.client.call_queue import calls
from megadiff.rollout.client.fleet import Fleet
from tests.unit.rollout.fakes import SAMPLING, FakeReplica, make_request


def lengths(sizes: list[int], **arguments: int) -> list[int]:
    return [len(cut) for cut in calls(sizes, **arguments)]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "num_replicas", "expected"),
    [
        ([16] * 32, 512, 1, [32]),
        ([16] * 32, 512, 2, [16, 16]),  # no replica is idle
        ([16] * 32, 16, 1, [1] * 32),
        ([16] * 32, 200, 1, [11, 11, 10]),  # as even as three calls can be
        ([16] * 32, 200, 2, [8, 8, 8, 8]),  # two rounds, not 12 + 12 + 8
        ([16] * 5, 512, 4, [2, 2, 1]),
        ([16] * 3, 8, 1, [1, 1, 1]),  # a group larger than a call is still one call
        ([2, 2, 3, 3], 6, 1, [2, 2]),
        ([], 16, 2, []),
    ],
)
def test_cuts(sizes: list[int], batch_size: int, num_replicas: int, expected: list[int]) -> None:
    arguments = {"batch_size": batch_size, "num_replicas": num_replicas, "most_groups": 99}
    assert lengths(sizes, **arguments) == expected
    assert lengths(sizes, **arguments | {"most_groups": 1}) == [1] * len(sizes)


def test_every_cut_keeps_the_rules() -> None:
    for num_groups in range(1, 40):
        for batch_size in (1, 5, 16, 40, 1000):
            for num_replicas in (1, 2, 3, 8):
                sizes = [3 + index % 2 for index in range(num_groups)]
                cuts = calls(
                    sizes, batch_size=batch_size, num_replicas=num_replicas, most_groups=99
                )
                assert [index for cut in cuts for index in cut] == list(range(num_groups))
                assert max(map(len, cuts)) <= -(-num_groups // num_replicas)
                assert all(
                    len(cut) == 1 or sum(sizes[index] for index in cut) <= batch_size
                    for cut in cuts
                )


def test_a_call_holds_images_of_one_shape_and_as_many_as_its_body_takes() -> None:
    """Sizes of images in turn; one of 2800 x 2800 pixels is 31 MB, and a body holds 64 MiB."""
    shapes = [(), ((64, 64),), ((2800, 2800),)]
    requests = []
    for place in range(12):
        sampling = replace(SAMPLING, images=shapes[place % 3])
        requests.append(replace(make_request(place, 2), sampling=sampling))
    replica = FakeReplica("a")
    with Fleet([replica], batch_size=64) as fleet:
        arrived = dict(fleet.generate(requests))
        assert [arrived[index] for index in range(12)] == requests
        again = fleet.generate_on(0, requests)
    assert again == requests
    asked = [(len(call), {request.sampling for request in call}) for call in replica.drawn]
    assert all(len(samplings) == 1 for _, samplings in asked)
    assert sorted(count for count, _ in asked) == sorted(2 * [4, 4, 2, 2])


def test_groups_come_under_their_index() -> None:
    requests = [make_request(place, 2 + place % 2) for place in range(10)]
    replicas = [FakeReplica("a"), FakeReplica("b")]
    with Fleet(replicas, batch_size=9) as fleet:
        arrived = list(fleet.generate(requests))
    assert sorted(index for index, _ in arrived) == list(range(10))
    assert all(group is requests[index] for index, group in arrived)
    asked = sorted((call[0].prompt.id, len(call)) for replica in replicas for call in replica.drawn)
    assert [count for _, count in asked] == [3, 3, 3, 1]


def test_a_replica_that_others_use_is_not_slow() -> None:
    requests = [make_request(place, 2) for place in range(4)]
    replicas = [FakeReplica("a"), FakeReplica("b")]
    replicas[1].waits_s = 8.0
    with Fleet(replicas, batch_size=2) as fleet:
        list(fleet.generate(requests))
        for replica in replicas:
            replica.drawn.clear()
        list(fleet.generate(requests))
    assert [len(replica.drawn) for replica in replicas] == [2, 2]


def test_prompts_of_similar_length_go_together_whatever_their_order() -> None:
    lengths_of_text = [9, 1, 30, 8, 2, 31, 3, 32, 7]
    for shift in range(3):
        texts = ["x" * length for length in lengths_of_text[shift:] + lengths_of_text[:shift]]
        replica = FakeReplica("a")
        with Fleet([replica], batch_size=6) as fleet:
            list(
                fleet.generate(
                    [make_request(place, 2, text=text) for place, text in enumerate(texts)]
                )
            )
        asked = sorted([len(request.prompt.text) for request in call] for call in replica.drawn)
        assert asked == [[1, 2, 3], [7, 8, 9], [30, 31, 32]]


def test_ranks_that_share_replicas_begin_with_their_own() -> None:
    """4 ranks on 4 replicas: each sends its groups as one call to another replica, none cuts them
    for all four.
    """
    requests = [make_request(place, 2) for place in range(6)]
    used = []
    for rank in range(4):
        replicas = [FakeReplica(str(index)) for index in range(4)]
        with Fleet(replicas, batch_size=512, rank=rank, num_ranks=4) as fleet:
            list(fleet.generate(requests))
        used.append([replica.name for replica in replicas if replica.drawn])
        assert sum(len(replica.drawn) for replica in replicas) == 1
    assert used == [["0"], ["1"], ["2"], ["3"]]
