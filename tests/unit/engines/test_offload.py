"""Tensors that wait on the host: where their values are at any moment, and memory taken once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.engines import offload
from megadiff.engines.offload import HostCopies, check_free, offloads

CPU = torch.device("cpu")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "odd": torch.randn(3, 5, generator=generator),
        "half": torch.randn(129, generator=generator).bfloat16(),
        "empty": torch.empty(0, 4),
    }


def num_bytes(held: dict[str, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def assert_current(copies: HostCopies, held: dict[str, Tensor], expected: dict[str, Tensor]):
    for key, tensor in held.items():
        current = copies.current(key, tensor)
        assert torch.equal(current, expected[key]) and current.dtype == tensor.dtype, key


def test_values_are_where_current_says_at_every_place() -> None:
    held = tensors()
    before = {key: tensor.clone() for key, tensor in held.items()}
    size = num_bytes(held)
    views = {key: tensor.view(-1) for key, tensor in held.items()}  # as an optimizer has them
    copies = HostCopies(CPU)

    copies.begin_leaving(held)
    assert copies.moves and num_bytes(held) == size
    assert_current(copies, held, before)
    assert all(copies.current(key, tensor) is tensor for key, tensor in held.items())

    copies.settle()
    assert not copies.moves and not copies.on_device and num_bytes(held) == 0
    assert_current(copies, held, before)

    copies.begin_returning()
    assert copies.moves and num_bytes(held) == size
    assert all(copies.current(key, tensor) is not tensor for key, tensor in held.items())
    assert_current(copies, held, before)

    copies.arrive()
    assert copies.on_device
    assert all(copies.current(key, tensor) is tensor for key, tensor in held.items())
    assert_current(copies, held, before)
    assert all(torch.equal(view, before[key].view(-1)) for key, view in views.items())


def test_what_is_called_back_before_it_left_stays() -> None:
    held = tensors()
    copies = HostCopies(CPU)
    copies.begin_leaving(held)
    copies.begin_returning()
    held["odd"] += 1  # as an update does
    changed = {key: tensor.clone() for key, tensor in held.items()}
    assert copies.on_device
    copies.begin_leaving(held)
    copies.settle()
    assert_current(copies, held, changed)


def test_what_is_sent_away_before_it_came_back_is_on_the_host() -> None:
    held = tensors()
    before = {key: tensor.clone() for key, tensor in held.items()}
    copies = HostCopies(CPU)
    copies.begin_leaving(held)
    copies.settle()
    copies.begin_returning()
    copies.settle()
    assert num_bytes(held) == 0
    for key, tensor in held.items():
        copies.current(key, tensor).mul_(2)  # as an exchange with other weights does
    copies.arrive()
    assert_current(copies, held, {key: 2 * tensor for key, tensor in before.items()})


def test_host_memory_is_taken_once() -> None:
    held = tensors()
    copies = HostCopies(CPU)
    with patch.object(offload, "take_host_memory", wraps=offload.take_host_memory) as take:
        copies.reserve(held)
        sizes = [call.args[0] for call in take.call_args_list]
        assert sizes == [2 * offload.ALIGNMENT]
        for _ in range(3):
            copies.begin_leaving(held)
            copies.settle()
            copies.arrive()
        assert sum(call.args[0] for call in take.call_args_list[1:]) == 0


def test_a_host_without_room_is_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "free_bytes", lambda: 3 << 29)
    check_free(3 << 29)
    with pytest.raises(ValueError, match=r"keeps 2\.00 GiB .* 1\.50 GiB are free .*=never"):
        check_free(2 << 30)


@pytest.mark.parametrize(
    ("key", "num_components", "device_type", "expected"),
    [
        ("always", 1, "cpu", True),
        ("auto", 1, "cuda", False),  # `megadiff train` has decided
        ("auto", 2, "cuda", True),
        ("auto", 2, "cpu", False),
        ("never", 2, "cuda", False),
    ],
)
def test_which_engines_offload(
    key: str, num_components: int, device_type: str, expected: bool
) -> None:
    config = Config()
    config.engine.offload = key
    is_on = offloads(config, num_components=num_components, device_type=device_type)
    assert is_on == expected
