"""Layouts that fit, and the numbers in the refusal of those that do not."""

import pytest

from megadiff.parallel.mesh import Layout, check_nodes, local_world_size_of, resolve_layout

ONE = {"dp": 0, "sp": 1, "tp": 1, "dp_replicate": 1}


def test_dp_is_what_the_world_leaves():
    assert resolve_layout(**ONE | {"sp": 2, "tp": 2}, world_size=16) == Layout(
        world_size=16, dp=4, dp_replicate=1, sp=2, tp=2
    )


@pytest.mark.parametrize(
    ("sizes", "world_size", "text"),
    [
        (
            {"dp": 2, "sp": 2, "tp": 4},
            8,
            r"world_size=8 != dp\*sp\*tp = 2\*2\*4 = 16; set parallel.dp=1",
        ),
        ({"sp": 3}, 8, r"world_size=8 is not a multiple of sp\*tp = 3\*1 = 3"),
        ({"dp_replicate": 3}, 4, r"parallel.dp=4 is not a multiple of parallel.dp_replicate=3"),
        ({"sp": 0}, 4, r"parallel.sp=0 < 1"),
        ({"dp": -1}, 4, r"parallel.dp=-1 < 0"),
    ],
)
def test_layouts_that_do_not_fit(sizes, world_size, text):
    with pytest.raises(ValueError, match=text):
        resolve_layout(**ONE | sizes, world_size=world_size)


@pytest.mark.parametrize("sizes", [{"sp": 4, "tp": 2}, {"tp": 8}, {"sp": 3}, {"sp": 8, "tp": 8}])
def test_peers_stay_on_one_node(sizes):
    world_size = 192
    layout = resolve_layout(**ONE | sizes, world_size=world_size)
    peers = layout.sp * layout.tp
    check_nodes(layout, ranks_per_node=world_size)  # one node has all
    if 8 % peers == 0:
        check_nodes(layout, ranks_per_node=8)
        return
    text = rf"= {peers} does not divide a node's 8 ranks: .* product divides 8"
    with pytest.raises(ValueError, match=text):
        check_nodes(layout, ranks_per_node=8)


def test_nodes_have_equally_many_ranks(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_world_size_of(12) == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_world_size_of(12) == 4
    with pytest.raises(ValueError, match="10 processes in all are no multiple of this node's 4"):
        local_world_size_of(10)
