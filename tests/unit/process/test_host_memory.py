"""Page-locked memory is unlocked when it is freed, if it was locked, by a driver that counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megadiff.process import host_memory


class Driver:
    """Registers addresses as CUDA does, or refuses."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.locked
        if not self.code:
            self.locked[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_it_stays_locked_while_a_view_of_it_is_used(driver: Driver) -> None:
    memory = host_memory.take_host_memory(4096, for_gpu=True)
    assert driver.locked == {memory.data_ptr(): 4096}
    part = memory[16:].view(torch.float32)
    del memory
    assert len(driver.locked) == 1
    del part
    assert not driver.locked


def test_what_was_refused_is_not_unlocked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.code = 2
    zeros = SimpleNamespace(calls=0)

    def count(*_: object, **__: object) -> None:
        zeros.calls += 1

    monkeypatch.setattr(torch, "zeros", count)
    memory = host_memory.take_host_memory(64, for_gpu=True)
    assert zeros.calls == 1  # CUDA's error is told to this kernel
    assert memory.shape == (64,) and memory.dtype == torch.uint8
    del memory  # Driver would raise


def test_without_a_gpu_nothing_is_locked(driver: Driver) -> None:
    assert host_memory.take_host_memory(64, for_gpu=False).nbytes == 64
    assert host_memory.take_host_memory(0, for_gpu=True).nbytes == 0
    assert not driver.locked
