"""The plan of an evaluation, and what evaluate() makes of it, through a fleet in this process and
the real scorer.
"""

import sys
from collections import Counter
from contextlib import closing

import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config, RolloutConfig
from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import Reward
from megadiff.rewards.color import closeness
from megadiff.rewards.score import Scorer
from megadiff.train import evaluate as module
from megadiff.train.evaluate import (
    EVAL_STEP,
    eval_metrics,
    eval_sampling,
    evaluate,
    pictured,
    spread,
)
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.meshes import one_rank_mesh
from tests.stub_fleet import StubFleet, finish

COLORS = ("red", "green", "blue", "yellow", "white", "black")


def config_of(seed: int, batch_size: int) -> Config:
    rollout = RolloutConfig(height=8, width=8, num_inference_steps=4, batch_size=batch_size)
    return Config(seed=seed, rollout=rollout)


def prompt(text: str, task: str | None = None) -> Prompt:
    return Prompt(text=text, id=prompt_id(text, " "), fields={"task": task} if task else {})


def tasked(**counts: int) -> list[Prompt]:
    """`count` prompts a task, the tasks in turn."""
    numbered = [(number, task) for task, count in counts.items() for number in range(count)]
    return [
        prompt(f"a {COLORS[number % 6]} {task} {number}", task) for number, task in sorted(numbered)
    ]


def test_noise_of_its_own_for_every_sample_and_eulers_steps():
    config = config_of(0, 4)
    config.rollout.same_noise = True
    config.rollout.ode_solver = "dpm2"
    sampling = eval_sampling(config)
    assert not sampling.same_noise and sampling.ode_solver == "euler"
    assert sampling == eval_sampling(config_of(0, 4))


def counts_by_task(plan):
    counts = Counter()
    for each, indices in plan:
        counts[each.fields["task"]] += len(indices)
    return counts


def test_every_task_gets_the_same_number_whatever_its_prompts():
    plan = spread(tasked(few=3, many=40, one=1), 100)
    assert counts_by_task(plan) == {"few": 34, "many": 33, "one": 33}
    by_text = {each.text: len(indices) for each, indices in plan}
    assert sorted(n for text, n in by_text.items() if "few" in text) == [11, 11, 12]
    # the last seven of 40 get none
    assert sorted(n for text, n in by_text.items() if "many" in text) == [1] * 33
    assert all(indices == range(len(indices)) for _, indices in plan)


def test_within_a_task_the_first_prompts_of_the_file_get_one_more():
    plan = spread(tasked(few=3), 10)
    counts = [(each.text, len(indices)) for each, indices in plan]
    assert counts == [("a red few 0", 4), ("a green few 1", 3), ("a blue few 2", 3)]


def test_more_samples_keep_those_of_a_smaller_evaluation():
    def identities(count):
        return {
            (each.id, index)
            for each, indices in spread(tasked(a=5, b=7), count)
            for index in indices
        }

    assert identities(40) < identities(90) and len(identities(90)) == 90


def test_prompts_without_tasks_share_evenly_and_zero_is_one_each():
    prompts = [prompt(f"a {color} wall") for color in COLORS]
    assert [len(indices) for _, indices in spread(prompts, 8)] == [2, 2, 1, 1, 1, 1]
    assert [len(indices) for _, indices in spread(prompts, 0)] == [1] * 6
    assert [each.text for each, _ in spread(prompts, 2)] == ["a red wall", "a green wall"]


def test_a_repeated_prompt_draws_no_noise_twice():
    plan = spread([prompt("a red wall"), prompt("a blue wall"), prompt("a red wall")], 4)
    assert [(each.text, len(indices)) for each, indices in plan] == [
        ("a red wall", 2),
        ("a blue wall", 2),
    ]


def test_of_a_repeated_prompt_the_first_row_counts():
    first = prompt("a red wall", "ocr")
    again = prompt("a red wall", "count")
    assert first.id == again.id
    for num_samples in (0, 2):
        ((kept, _),) = spread([first, again], num_samples)
        assert kept.fields == {"task": "ocr"}


def test_fewer_samples_than_tasks_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"2 samples < 3 tasks of the prompts \(a, b, c\)"):
        spread(tasked(a=2, b=2, c=2), 2)


def test_pictures_are_balanced_over_tasks_and_prefer_different_prompts():
    plan = spread(tasked(few=2, many=40, one=1), 300)
    wanted = pictured(plan, 12)
    texts = {each.id: each for each, _ in plan}
    by_task = Counter(texts[key].fields["task"] for key, _ in wanted)
    assert by_task == {"few": 4, "many": 4, "one": 4}
    assert sorted(
        (texts[key].text, index) for key, index in wanted if "many" in texts[key].text
    ) == [
        (f"a {COLORS[number]} many {number}", 0)
        for number in sorted(range(4), key=lambda n: COLORS[n])
    ]
    assert sorted(index for key, index in wanted if "one" in texts[key].text) == [0, 1, 2, 3]
    assert wanted == pictured(plan, 12) and len(pictured(spread(tasked(a=1), 3), 12)) == 3


@pytest.fixture(scope="module")
def mesh():
    return one_rank_mesh()


REWARDS = {
    "color": RewardConfig(type="color"),
    "size": RewardConfig(type="jpeg_size", weight=0.5),
}


def run(mesh, plan, *, batch_size=16, seed=0, version=None, fleet=None, rewards=REWARDS):
    fleet = fleet or StubFleet()
    counted = []
    with closing(Scorer(rewards, num_workers=2)) as scorer:
        outcome = evaluate(
            fleet,
            finish,
            scorer,
            plan,
            config_of(seed, batch_size),
            adapter=None,  # none of the prompts brings an image
            policy_version=version,
            mesh=mesh,
            model="stub",
            on_samples=counted.append,
        )
        metrics = eval_metrics(outcome.evaluation)
    assert sum(counted) == len(outcome.evaluation.samples)
    return outcome, metrics


def test_every_sample_is_drawn_once_and_scored_as_its_own(mesh):
    plan = spread(tasked(few=2, many=9), 40)
    fleet = StubFleet()
    outcome, metrics = run(mesh, plan, fleet=fleet, version=7)
    found = outcome.evaluation
    assert [s.identity for s in found.samples] == [
        (each.id, index) for each, indices in plan for index in indices
    ]
    asked = {(request.seed, request.step, request.policy_version) for request in fleet.requests}
    assert asked == {(0, EVAL_STEP, 7)} and found.step == 7
    # a reward's matter, not the replica's
    assert all(not request.prompt.fields for request in fleet.requests)
    for sample in found.samples:
        if sample.file:
            color = sample.caption.split()[1]  # its own prompt's, and its own pixels
            assert sample.rewards["color"] == pytest.approx(
                closeness(outcome.images[sample.file].numpy(), color)
            )
    assert len(outcome.images) == 28
    means = {name: found.estimate(name).mean for name in ("color", "size")}
    assert metrics["eval/color"] == means["color"] and metrics["eval/size"] == means["size"]
    assert metrics["eval/mean"] == pytest.approx(means["color"] + 0.5 * means["size"])
    assert {"eval/latent_spread", "eval/colour_entropy_bit", "eval/saturation"} < metrics.keys()
    assert 1.2 < metrics["eval/latent_spread"] < 1.6  # of standard normal noise: √2


class Half(Reward):
    """Cannot score samples of an odd index."""

    def score(self, samples):
        return [None if sample.sample_index % 2 else 0.25 for sample in samples]


def test_the_mean_is_that_of_the_samples_totals(mesh, monkeypatch):
    """A reward that is not asked adds nothing; where one with a weight failed, none counts."""
    monkeypatch.setitem(sys.modules, "own_half", sys.modules[__name__])
    rewards = {
        "color": RewardConfig(type="color", only={"task": "few"}),
        "size": RewardConfig(type="jpeg_size", weight=0.5, only={"task": "many"}),
        "half": RewardConfig(
            type="own_half:Half", weight=2.0, on_failure="drop", only={"task": "flag"}
        ),
        "watched": RewardConfig(type="own_half:Half", weight=0.0),
    }
    prompts = [*tasked(few=1, many=30), prompt("a red flag", "flag")]
    plan = [(each, range(2)) for each in prompts]
    outcome, metrics = run(mesh, plan, rewards=rewards)
    totals = []
    for sample in outcome.evaluation.samples:
        found = sample.rewards
        if sample.task == "flag":
            expected = None if sample.sample_index else 2.0 * 0.25
        elif sample.task == "few":
            expected = found["color"]
        else:
            expected = 0.5 * found["size"]
        assert sample.total == (None if expected is None else pytest.approx(expected))
        totals += [] if expected is None else [expected]
    assert len(totals) == 2 * len(prompts) - 1
    assert metrics["eval/mean"] == pytest.approx(sum(totals) / len(totals))


@pytest.mark.parametrize("batch_size, at_once", [(1, 512), (3, 512), (5, 7), (64, 1)])
def test_how_samples_are_cut_into_requests_does_not_matter(mesh, monkeypatch, batch_size, at_once):
    plan = spread(tasked(few=2, many=9), 61)
    expected, _ = run(mesh, plan)
    monkeypatch.setattr(module, "SAMPLES_AT_ONCE", at_once)
    fleet = StubFleet()
    found, _ = run(mesh, plan, batch_size=batch_size, fleet=fleet)
    assert max(len(request.sample_indices) for request in fleet.requests) <= batch_size
    assert found.evaluation == expected.evaluation
    assert found.images.keys() == expected.images.keys()
    assert all(torch.equal(found.images[file], expected.images[file]) for file in found.images)


@pytest.mark.parametrize(("num_frames", "runs"), [(1, [8]), (49, [1] * 8), (5, [3, 3, 2])])
def test_few_long_videos_are_held_at_once(monkeypatch, num_frames, runs):
    """Of requests of two samples each; one that alone is too much is drawn nevertheless."""
    monkeypatch.setattr(module, "PIXEL_BYTES_AT_ONCE", 6 * 5 * 64 * 64 * 3)
    sampling = Sampling(height=64, width=64, num_frames=num_frames, num_inference_steps=4)
    requests = [
        RolloutRequest(
            prompt=prompt(f"a red {index}"),
            sampling=sampling,
            sample_indices=(0, 1),
            seed=0,
            step=EVAL_STEP,
        )
        for index in range(8)
    ]
    assert [len(run) for run in module._chunks(requests)] == runs


def test_another_seed_draws_other_noise(mesh):
    plan = spread(tasked(a=3), 12)
    first, second, again = (run(mesh, plan, seed=seed)[0].evaluation for seed in (0, 1, 0))
    assert first == again and first.samples != second.samples


def test_diversity_of_colour_is_that_of_prompts_that_name_none(mesh):
    named, free = prompt("a red wall"), prompt("a wall that is white")
    alone, both = (
        run(mesh, spread(prompts, 4 * len(prompts)))[0].evaluation
        for prompts in ([free], [named, free])
    )
    assert both.diversity["colour_entropy_bit"] == alone.diversity["colour_entropy_bit"] > 0
    assert run(mesh, spread([named], 4))[0].evaluation.diversity["colour_entropy_bit"] is None
    assert both.diversity["latent_spread"] != alone.diversity["latent_spread"]


def test_without_two_samples_of_a_prompt_diversity_is_unknown_and_unlogged(mesh):
    outcome, metrics = run(mesh, spread(tasked(a=3), 0))
    assert outcome.evaluation.diversity["latent_spread"] is None
    assert "eval/latent_spread" not in metrics and "eval/saturation" in metrics
