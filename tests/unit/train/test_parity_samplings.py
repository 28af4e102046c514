"""The gate draws every component, whatever the run's windows cover."""

from types import SimpleNamespace

import pytest
import torch

from megadiff.train.parity import component_samplings
from megadiff.types import Sampling

SCHEDULE = torch.tensor([1.0, 0.96, 0.9, 0.8, 0.6, 0.4, 0.0])


def adapter(boundary: float | None):
    components = ("transformer",) if boundary is None else ("transformer", "transformer_2")
    component_of = lambda sigma: components[0 if boundary is None or sigma >= boundary else 1]  # noqa: E731
    return SimpleNamespace(
        components=components, component_of=component_of, schedule=lambda sampling: SCHEDULE
    )


@pytest.mark.parametrize(
    ("boundary", "window", "size", "expected"),
    [
        (None, (0, 5), 2, {"transformer": ((0, 5), 2)}),
        (None, (1, 4), 2, {"transformer": ((1, 4), 2)}),
        (None, (1, 4), 0, {"transformer": ((1, 4), 2)}),  # also of a run without windows
        (0.875, (0, 5), 2, {"transformer": ((0, 3), 2), "transformer_2": ((3, 5), 2)}),
        (0.875, (1, 4), 3, {"transformer": ((1, 3), 2), "transformer_2": ((3, 4), 1)}),
        # trained or not
        (0.875, (0, 3), 2, {"transformer": ((0, 3), 2), "transformer_2": ((3, 5), 2)}),
        # the other has the last step alone, which is never stochastic
        (0.5, (0, 5), 2, {"transformer": ((0, 5), 2)}),
    ],
)
def test_windows_of_each_component(boundary, window, size, expected):
    sampling = Sampling(
        height=64, width=64, num_inference_steps=6, sde_window_size=size, sde_window_range=window
    )
    found = component_samplings(adapter(boundary), sampling)
    assert {
        name: (one.sde_window_range, one.sde_window_size) for name, one in found.items()
    } == expected
