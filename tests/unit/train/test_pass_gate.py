"""The gate decides whose old log_probs a run takes, also when a replica joins later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.observe.timers import Timers
from megadiff.train import loop, parity, probe
from megadiff.types import Figures, Progress

CLIP_RANGE = 1e-5
BELOW = CLIP_RANGE / 4
ABOVE = CLIP_RANGE


class StubReplicas:
    """Replicas of which none is ever lost."""

    version = 3
    gate: Callable[[Sequence[str]], object]

    def rest(self) -> None:
        pass

    def wake(self, version: int) -> None:
        pass

    def retry(self, action: Callable[[], Figures]) -> Figures:
        return action()


def run_of(monkeypatch: pytest.MonkeyPatch, gaps: dict[str, float], **algorithm: Any) -> Any:
    """Return a run whose replicas have these gaps, by their names."""
    settings = AlgorithmConfig(clip_range=CLIP_RANGE, **algorithm)

    def check(*_: Any, names: Sequence[str] = ("first",), **__: Any) -> Figures:
        return {parity.LOG_PROB_GAP: max(gaps[name] for name in names)}

    monkeypatch.setattr(parity, "check", check)
    monkeypatch.setattr(probe, "prepare", lambda *_, **__: ["a call"])
    return SimpleNamespace(
        engine=SimpleNamespace(config=Config(algorithm=settings), mesh=None, adapter=None),
        algorithm=build_algorithm(settings),
        progress=Progress(),
        recorder=SimpleNamespace(timers=Timers()),
        replicas=StubReplicas(),
        prompts=SimpleNamespace(peek=lambda: SimpleNamespace(prompts=[])),
    )


@pytest.mark.parametrize("gap, recomputes", [(BELOW, False), (ABOVE, True)])
def test_auto_looks_at_replicas_that_join_later(
    monkeypatch: pytest.MonkeyPatch, gap: float, recomputes: bool
) -> None:
    run = run_of(monkeypatch, {"first": BELOW, "later": gap}, old_log_prob="auto")
    assert loop.pass_gate(run) == {parity.LOG_PROB_GAP: BELOW}
    assert not run.progress.recomputes
    run.replicas.gate(["later"])
    assert run.progress.recomputes is recomputes


def test_auto_stays_with_the_trainers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, {"first": ABOVE, "later": BELOW}, old_log_prob="auto")
    loop.pass_gate(run)
    run.replicas.gate(["later"])
    assert run.progress.recomputes


def test_a_newcomer_changes_nothing_where_the_config_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(monkeypatch, {"first": BELOW, "later": ABOVE}, old_log_prob="rollout")
    loop.pass_gate(run)
    run.replicas.gate(["later"])
    assert not run.progress.recomputes
