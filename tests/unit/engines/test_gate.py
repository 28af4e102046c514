"""A gate that a rescue closes holds up steps; one that it has ended all changes, but not an error's
way out.
"""

from __future__ import annotations

import threading

import pytest
import torch

from megadiff.engines import gate as gate_module
from megadiff.engines.gate import GateEndedError, StepGate

WAIT_S = 20.0


@pytest.fixture
def gate() -> StepGate:
    return StepGate(torch.device("cpu"))


def test_a_change_that_does_not_wait_is_refused_after_the_end(gate: StepGate) -> None:
    with gate.change(waits=False):
        pass
    gate.check_open()
    gate.end(WAIT_S)
    with pytest.raises(GateEndedError):
        gate.check_open()
    with pytest.raises(GateEndedError), gate.change(waits=False):
        raise AssertionError("it changes what a rescue saves")
    assert not gate.is_torn


def test_one_that_waits_for_another_change_is_refused_when_the_end_comes(gate: StepGate) -> None:
    outcome: list[str] = []
    begun = threading.Event()

    def change() -> None:
        begun.set()
        try:
            with gate.change(waits=False):
                outcome.append("changed")
        except GateEndedError:
            outcome.append("refused")

    thread = threading.Thread(target=change, daemon=True)
    with gate.change():
        thread.start()
        assert begun.wait(WAIT_S)
        with pytest.raises(TimeoutError, match="weights were being changed"):
            gate.end(0.1)
        thread.join(WAIT_S)
    assert outcome == ["refused"]


def test_other_changes_and_steps_wait_for_good(gate: StepGate) -> None:
    gate.end(WAIT_S)
    for change in (gate.change, gate.step):
        thread = threading.Thread(target=change().__enter__, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()


def test_closing_waits_for_a_step_and_not_for_an_exchange(
    gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "IDLE_S", 0.1)
    with gate.change():
        assert gate.close() == 0
        with pytest.raises(TimeoutError, match="weights were being changed"):
            gate.end(0.1)  # what is saved may not change meanwhile

    other = StepGate(torch.device("cpu"))
    with other.step(), pytest.raises(TimeoutError, match="weights were being changed"):
        other.close()
    assert other.close() == 1
