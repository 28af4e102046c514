"""How much of a larger GPU is held, by a GPU that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import bench_step
import held_memory
import pytest

from megadiff.observe.device_memory import GIB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of a GPU of 140 GiB, whose context takes 1."""
    left = [139 * GIB]

    def take(num_bytes: int, **_: object) -> list[int]:
        left[0] -= num_bytes
        return [num_bytes]

    def give_back() -> None:
        left[0] = 139 * GIB

    cuda = SimpleNamespace(
        device_count=lambda: 1,
        mem_get_info=lambda index: (left[0], 140 * GIB),
        empty_cache=give_back,
    )
    torch = SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: None, empty=take, uint8=None)
    monkeypatch.setattr(held_memory, "torch", torch)
    return left


def test_the_smaller_gpus_memory_is_left(free: list[int]) -> None:
    with held_memory.hold_all_but(80.0, num_gpus=1) as held_gib:
        assert free == [80 * GIB]
        assert held_gib == 60  # the context of who holds it counts as held
    assert free == [139 * GIB]


def test_what_cannot_be_held_is_refused(free: list[int]) -> None:
    with (
        pytest.raises(ValueError, match="leaves 178.4 GiB free, but GPU 0 has 139.0 of 140.0"),
        held_memory.hold_all_but(178.4, num_gpus=1),
    ):
        pass
    with (
        pytest.raises(ValueError, match="needs 2 GPUs, found 1"),
        held_memory.hold_all_but(80.0, num_gpus=2),
    ):
        pass
    assert free == [139 * GIB]


def test_a_benchmark_without_a_gpu_says_so(tiny_model, capsys) -> None:
    config = "configs/quickstart.yaml"
    code = bench_step.main([config, "--gpu", "h100", "--hold", f"model.path={tiny_model}"])
    assert code == 2
    assert "--hold needs 1 GPU, found 0" in capsys.readouterr().err
