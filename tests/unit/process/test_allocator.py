"""Which settings of torch's allocator hold when; on a CPU they can be set, and read back."""

from __future__ import annotations

import pytest
import torch

from megadiff.process.allocator import VARIABLE, fixed_segments, grow_segments

GROWING = "expandable_segments:True"


def test_segments_grow_unless_the_user_has_said_otherwise():
    for given, expected in (
        ({}, {VARIABLE: f"{GROWING},large_segment_size_mb:128"}),
        ({VARIABLE: "max_split_size_mb:64"}, {VARIABLE: "max_split_size_mb:64"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        ),
    ):
        grow_segments(given)
        assert given == expected


@pytest.fixture
def restored():
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("name", [VARIABLE, "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", [GROWING, "expandable_segments: True"])
def test_fixed_segments_within_and_growing_ones_after(monkeypatch, restored, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(MemoryError), fixed_segments():
        assert "expandable_segments:False" in torch._C._accelerator_getAllocatorSettings()
        raise MemoryError
    assert GROWING in torch._C._accelerator_getAllocatorSettings()


def test_torch_knows_every_setting_and_takes_it_back(monkeypatch, restored):
    """An unknown one would end each process that uses a GPU."""
    environment = {}
    grow_segments(environment)
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    with fixed_segments():
        assert "large_segment_size_mb:128" in torch._C._accelerator_getAllocatorSettings()
    assert torch._C._accelerator_getAllocatorSettings() == environment[VARIABLE]


def test_nothing_is_touched_where_segments_do_not_grow(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = torch._C._accelerator_getAllocatorSettings()
    with fixed_segments():
        assert torch._C._accelerator_getAllocatorSettings() == before
