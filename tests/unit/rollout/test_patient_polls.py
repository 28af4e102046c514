"""An idle engine is asked rarely; one that just answered is asked every millisecond."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from megadiff.rollout.server import patient_polls
from megadiff.rollout.server.patient_polls import LONGEST_S, PatientAsyncio, poll_patiently


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that asyncio.sleep is asked for; nothing sleeps."""
    seconds = []

    async def note(delay: float, result: object = None) -> object:
        seconds.append(delay)
        return result

    monkeypatch.setattr(asyncio, "sleep", note)
    return seconds


def test_polls_become_rare_and_a_result_makes_them_frequent(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = iter([100.0, 100.04, 100.1, 100.25, 160.0, 160.1])
    clock = SimpleNamespace(monotonic=lambda: next(clock_s))
    monkeypatch.setattr(patient_polls, "time", clock)  # not the event loop's
    patient = PatientAsyncio()
    for _ in range(5):
        asyncio.run(patient.sleep(0.001))
    assert slept == pytest.approx([0.001, 0.001, 0.002, 0.005, LONGEST_S])

    slept.clear()
    for delay in (0, 0.001, 0.5):
        asyncio.run(patient.sleep(delay))
    assert slept == [0, 0.001, 0.5]


def test_the_module_stays_what_it_was_but_for_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_OMNI_EVENT_DRIVEN_ORCH", raising=False)
    module = SimpleNamespace(asyncio=asyncio)
    poll_patiently(module)
    patient = module.asyncio
    poll_patiently(module)
    assert module.asyncio is patient and patient.Queue is asyncio.Queue
