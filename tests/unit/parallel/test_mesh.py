"""Layouts that fit, and the numbers in the refusal of those that do not."""

import pytest

from megadiff.parallel.mesh import Layout, resolve_layout

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
