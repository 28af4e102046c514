"""Which samples a step gets, with which weights they are drawn, and what a checkpoint has of them.

The fleet and the replicas are of this process; the scorer, prompts and files are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.checkpoint.run_folders import progress_record, read_progress
from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config, RolloutConfig
from megadiff.data.prompts import prompt_id
from megadiff.data.sampler import PromptSampler
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import AgreedError
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.train.batch_files import (
    StepSamples,
    batch_file,
    batch_files,
    read_batch,
    write_batch,
)
from megadiff.train.batches import BatchSource
from megadiff.train.sampling import Redrawable
from megadiff.types import Progress, Prompt, RolloutGroup, RolloutRequest
from tests.meshes import one_rank_mesh
from tests.stub_fleet import StubFleet, finish

NUM_STEPS = 4
COLORS = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple")


class Fleet(StubFleet):
    """Note each call. release: calls wait until it is set. error: what they raise then."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.release = threading.Event()
        self.release.set()
        self.error: Exception | None = None

    def generate(
        self, requests: Sequence[RolloutRequest], calls: Sequence[ReplicaCall] = ()
    ) -> Iterator[tuple[int, RolloutGroup]]:
        steps = {(request.step, request.policy_version) for request in requests}
        self.events += [f"ask {step} of version {version}" for step, version in steps]
        assert self.release.wait(30)
        if self.error:
            raise self.error
        yield from super().generate(requests)


class Replicas:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def bring(self, version: int, timers: Timers) -> dict[str, float]:
        assert self.fleet.release.is_set(), "a push while a call is in flight"
        self.fleet.events.append(f"push {version}")
        return {"sync/gib": float(version)}

    def finish(self, draw: Redrawable, *, here: bool, version: int | None = None) -> None:
        finish(draw, here=here)

    def rest(self) -> None:
        self.fleet.events.append("rest")


class Parts:
    """A BatchSource with all that it stands on."""

    def __init__(self, staleness: int, scorer: Scorer, **train: int) -> None:
        self.config = Config(rollout=RolloutConfig(height=8, width=8, num_inference_steps=4))
        keys = {"num_steps": NUM_STEPS, "prompts_per_step": 4, "staleness": staleness}
        for key, value in (keys | train).items():
            setattr(self.config.train, key, value)
        self.config.algorithm.group_size = 2
        self.events: list[str] = []
        self.fleet = Fleet(self.events)
        self.timers = Timers()
        self.scorer = scorer
        self.prompts = self.sampler()
        self.source = self.build(one_rank_mesh())

    def sampler(self, dp: int = 1, dp_rank: int = 0) -> PromptSampler:
        texts = [f"a {color} wall" for color in COLORS]
        prompts = [Prompt(text=text, id=prompt_id(text, " "), fields={"n": 1}) for text in texts]
        per_step = self.config.train.prompts_per_step
        return PromptSampler(
            prompts, prompts_per_step=per_step, dp=dp, dp_rank=dp_rank, seed=0, shuffle=True
        )

    def build(self, mesh) -> BatchSource:
        engine = SimpleNamespace(config=self.config, mesh=mesh, adapter=None)
        replicas = Replicas(self.fleet)
        return BatchSource(
            engine,
            replicas,
            self.scorer,
            self.prompts,
            timers=self.timers,
            report=lambda kind, **fields: self.events.append(f"{kind} {fields['replica']}"),
        )


@pytest.fixture
def scorer():
    with closing(Scorer({"color": RewardConfig(type="color")}, num_workers=1)) as scorer:
        yield scorer


def taken(parts: Parts, step: int) -> StepSamples:
    """Take a step's samples, and wait for what is in flight then: tests share a scorer."""
    samples, _ = parts.source.take(step)
    parts.source.settle()
    return samples


def saved_step(parts: Parts, folder: Path) -> dict[str, int | str]:
    """Draw step 2 and write it as a checkpoint of step 1 does; return the prompts' position."""
    taken(parts, 0)
    parts.source.writer(1)(folder)
    return parts.source.position()


def settled_events(parts: Parts) -> list[str]:
    """Return what happened so far, with the call in flight among it."""
    parts.source.settle()
    return parts.events


def test_fresh_samples_are_asked_for_when_they_are_needed(scorer):
    parts = Parts(0, scorer)
    for step in range(NUM_STEPS):
        samples, figures = parts.source.take(step)
        assert {group.policy_version for group in samples.groups} == {step}
        assert "rollout/staleness" not in figures
    assert parts.events[:6] == ["push 0", "ask 0 of version 0", "rest"] + [
        "push 1",
        "ask 1 of version 1",
        "rest",
    ]
    assert parts.source.writer(NUM_STEPS - 1) is None


def test_samples_are_drawn_one_step_ahead(scorer):
    parts = Parts(1, scorer)
    staleness = []
    for step in range(NUM_STEPS):
        samples, figures = parts.source.take(step)
        assert samples.step == step
        staleness.append(figures["rollout/staleness"])
    assert staleness == [0, 1, 1, 1]
    assert settled_events(parts) == [
        "push 0",
        "ask 0 of version 0",
        "ask 1 of version 0",
        "push 1",
        "ask 2 of version 1",
        "push 2",
        "ask 3 of version 2",
        "rest",  # nothing is drawn for a step that does not come
    ]


def test_both_ways_draw_the_same_prompts_and_noise(scorer):
    """Staleness changes the weights and nothing else: a stub's samples do not depend on them."""
    ways = []
    for staleness in (0, 1):
        parts = Parts(staleness, scorer)
        # the position is what a checkpoint of the finished step would say
        ways.append([(taken(parts, step), parts.source.position()) for step in range(NUM_STEPS)])
    for (fresh, position), (ahead, position_ahead) in zip(*ways, strict=True):
        assert fresh.identities == ahead.identities
        assert fresh.rewards["total"].equal(ahead.rewards["total"])
        assert [group.prompt for group in fresh.groups] == [group.prompt for group in ahead.groups]
        assert position == position_ahead


def test_the_seconds_of_a_draw_are_those_of_the_step_that_waits_for_it(scorer):
    parts = Parts(1, scorer)
    taken(parts, 0)
    parts.source.take(1)
    assert "time/sample_s" in parts.timers.pop()
    parts.source.settle()
    seconds = parts.timers.pop()
    assert {"time/settle_s", "time/sample_s", "time/rollout_s", "time/reward_s"} <= seconds.keys()


def test_the_loop_goes_on_while_a_call_hangs(scorer, monkeypatch):
    parts = Parts(1, scorer)
    taken(parts, 0)
    original = Replicas.bring

    def hold(self, version, timers):
        figures = original(self, version, timers)
        self.fleet.release.clear()  # the call after this push hangs
        return figures

    monkeypatch.setattr(Replicas, "bring", hold)
    samples, _ = parts.source.take(1)
    assert samples.step == 1
    assert parts.source.writer(2) is None, "its samples are not there"
    assert parts.source.writer(1) is not None
    parts.fleet.release.set()
    parts.source.settle()
    assert parts.source.writer(2) is not None


@pytest.mark.parametrize("wait", ["take", "settle"])
def test_a_failure_in_the_background_is_raised_where_its_samples_are_waited_for(scorer, wait):
    parts = Parts(1, scorer)
    taken(parts, 0)
    parts.fleet.error = RuntimeError("replica_1 does not answer")
    parts.source.take(1)
    with pytest.raises(AgreedError, match="replica_1 does not answer"):
        parts.source.take(2) if wait == "take" else parts.source.settle()


def test_saved_samples_are_those_that_were_drawn(scorer, tmp_path):
    parts = Parts(1, scorer)
    position = saved_step(parts, tmp_path)
    written = taken(parts, 1)

    again = Parts(1, scorer)
    again.prompts.load_state(position)
    saved = read_batch(tmp_path, num_prompts=4, mesh=one_rank_mesh())
    again.source.restore(1, saved)
    assert again.source.position() == position
    restored, figures = again.source.take(1)
    assert settled_events(again) == ["push 1", "ask 2 of version 1"]
    assert figures["rollout/staleness"] == 1

    assert restored.identities == written.identities
    assert restored.figures == written.figures
    assert restored.rewards.keys() == written.rewards.keys()
    assert all(restored.rewards[name].equal(value) for name, value in written.rewards.items())
    for group, expected in zip(restored.groups, written.groups, strict=True):
        assert group.prompt == expected.prompt and group.prompt.fields == {"n": 1}
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                other = getattr(group, name)
                assert other.dtype == value.dtype and other.equal(value), name
            elif name != "conditioning":
                assert getattr(group, name) == value, name


@pytest.mark.parametrize(("dp", "other"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_other_layouts_read_the_same_samples(scorer, tmp_path, dp, other):
    parts = Parts(1, scorer)
    whole = taken(parts, 0)
    for rank in range(dp):
        count = 4 // dp
        rows = slice(rank * count, (rank + 1) * count)
        mine = replace(
            whole,
            identities=whole.identities[rows],
            groups=whole.groups[rows],
            rewards={name: value[rows] for name, value in whole.rewards.items()},
        )
        write_batch(tmp_path, samples=mine, mesh=layout(dp, rank))

    pieces = [
        read_batch(tmp_path, num_prompts=4, mesh=layout(other, rank)) for rank in range(other)
    ]
    assert [name for piece in pieces for name in piece.identities] == list(whole.identities)
    total = torch.cat([piece.rewards["total"] for piece in pieces])
    assert total.equal(whole.rewards["total"])
    texts = [group.prompt.text for piece in pieces for group in piece.groups]
    assert texts == [group.prompt.text for group in whole.groups]
    # each scorer's figures come once
    assert sum(len(piece.figures) for piece in pieces) == dp


def layout(dp: int, dp_rank: int):
    return replace(one_rank_mesh(), dp=dp, rank=dp_rank, world_size=dp)


def test_samples_of_another_config_are_drawn_again(scorer, tmp_path, caplog):
    parts = Parts(1, scorer)
    position = saved_step(parts, tmp_path)

    other = Parts(1, scorer)
    other.config.seed = 1
    other.prompts.load_state(position)
    other.source.restore(1, read_batch(tmp_path, num_prompts=4, mesh=one_rank_mesh()))
    assert "samples of step 2 are drawn with its own weights" in caplog.text
    _, figures = other.source.take(1)
    assert figures["rollout/staleness"] == 0
    assert settled_events(other)[:2] == ["push 1", "ask 1 of version 1"]
    assert read_batch(tmp_path, num_prompts=8, mesh=one_rank_mesh()) is None
    assert "holds samples of 4 prompts, train.prompts_per_step=8" in caplog.text


def test_samples_that_were_scored_otherwise_are_drawn_again(scorer, tmp_path, caplog):
    parts = Parts(1, scorer)
    position = saved_step(parts, tmp_path)

    with closing(Scorer({"color": RewardConfig(type="color", weight=2.0)}, num_workers=1)) as heavy:
        other = Parts(1, heavy)
        other.prompts.load_state(position)
        other.source.restore(1, read_batch(tmp_path, num_prompts=4, mesh=one_rank_mesh()))
        assert "a reward has another weight" in caplog.text
        _, figures = other.source.take(1)
        assert figures["rollout/staleness"] == 0
        other.source.settle()


def test_without_saved_samples_the_prompts_are_drawn_once(scorer):
    """As after a rescue that could not have them."""
    parts = Parts(1, scorer)
    parts.source.take(0)
    position = parts.source.position()
    parts.source.settle()
    expected = taken(parts, 1)

    again = Parts(1, scorer)
    again.prompts.load_state(position)
    again.source.restore(1, None)
    assert taken(again, 1).identities == expected.identities


def test_a_damaged_file_is_refused(scorer, tmp_path):
    parts = Parts(1, scorer)
    saved_step(parts, tmp_path)
    record = progress_record(tmp_path, Progress(step=1))
    (tmp_path / "progress.json").write_bytes(record)
    read_progress(tmp_path)

    path = batch_file(tmp_path, 0)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not match its fingerprint"):
        read_batch(tmp_path, num_prompts=4, mesh=one_rank_mesh())
    content[50] ^= 1  # in the header
    path.write_bytes(content)
    with pytest.raises(ValueError, match="corrupt"):
        read_progress(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        read_progress(tmp_path)


def test_a_rescue_leaves_no_part_of_the_samples(scorer, tmp_path, caplog):
    parts = Parts(1, scorer)
    saved_step(parts, tmp_path)
    whole = parts.build(layout(1, 0))
    whole.drop_incomplete(tmp_path, 1)
    assert len(batch_files(tmp_path)) == 1
    half = parts.build(layout(2, 0))
    half.drop_incomplete(tmp_path, 1)
    assert not batch_files(tmp_path)
    assert "the samples of step 2 were not all there" in caplog.text


@pytest.mark.parametrize(("mode", "sent"), [("separate", ["a"]), ("colocated", ["a", "idle"])])
def test_idle_replicas_are_sent_where_rank_0_does_not_know_them(scorer, monkeypatch, mode, sent):
    """Separate replicas are many, and all of them are in rank 0's own fleet."""
    parts = Parts(0, scorer)
    parts.config.rollout.mode = mode
    parts.fleet.replicas = [SimpleNamespace(name="a"), SimpleNamespace(name="idle")]
    drawn = ReplicaCall(range(4), 8, replica="a", engine_s=1.0)
    parts.fleet.plan = lambda requests: [drawn]
    works = []

    def gather(work, *, destination, group):
        works.append(work)
        return [work]

    monkeypatch.setattr("megadiff.train.batches.gather_json_at", gather)
    _, figures = parts.source.take(0)
    assert list(works[0]["calls"]) == sent
    assert figures["perf/replica_idle_share/idle"] == 1


def test_a_slow_replica_among_many_is_reported(scorer):
    parts = Parts(0, scorer)
    calls = [
        ReplicaCall([index], 1, replica=f"replica_{index}", engine_s=9.0 if index == 77 else 1.0)
        for index in range(480)
    ]
    parts.fleet.plan = lambda requests: calls
    for step in range(3):
        _, figures = parts.source.take(step)
        assert figures["perf/replica_slowest_ratio"] == 9
    assert [event for event in parts.events if "slow" in event] == ["replica_slow replica_77"]
