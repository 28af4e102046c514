from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from megadiff.data.prompts import prompt_id
from megadiff.data.sampler import PromptSampler, epoch_permutation
from megadiff.types import Prompt, PromptBatch


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(text=f"p{i}", id=prompt_id(f"p{i}", " ")) for i in range(count)]


def make(
    count: int, per_step: int, dp: int = 1, rank: int = 0, seed: int = 0, shuffle: bool = True
) -> PromptSampler:
    return PromptSampler(
        make_prompts(count),
        prompts_per_step=per_step,
        dp=dp,
        dp_rank=rank,
        seed=seed,
        shuffle=shuffle,
    )


def texts(batch: PromptBatch) -> list[str]:
    return [prompt.text for prompt in batch.prompts]


def world_step(samplers: list[PromptSampler]) -> list[str]:
    """One step of all ranks: the global batch in group order."""
    return [text for sampler in samplers for text in texts(next(sampler))]


def test_property_global_order_does_not_depend_on_dp_and_resumes_under_any() -> None:
    rng = random.Random(0)
    for _ in range(60):
        count, per_step = rng.randrange(1, 40), 4 * rng.randrange(1, 6)
        seed, shuffle, num_steps = rng.randrange(-5, 2**40), rng.random() < 0.8, rng.randrange(2, 9)
        steps: dict[int, list[list[str]]] = {}
        for dp in (1, 2, 4):
            world = [make(count, per_step, dp, rank, seed, shuffle) for rank in range(dp)]
            steps[dp] = [world_step(world) for _ in range(num_steps)]
            assert all(sampler.state() == world[0].state() for sampler in world)
        assert steps[1] == steps[2] == steps[4]

        stop = rng.randrange(num_steps)
        before = [make(count, per_step, 2, rank, seed, shuffle) for rank in range(2)]
        for _ in range(stop):
            world_step(before)
        after_dp = rng.choice([1, 2, 4])
        after = [make(count, per_step, after_dp, rank, seed, shuffle) for rank in range(after_dp)]
        for sampler in after:
            sampler.load_state(before[0].state())
        assert [world_step(after) for _ in range(stop, num_steps)] == steps[1][stop:]

        flat = [text for step in steps[1] for text in step]
        for epoch in range(len(flat) // count):  # every epoch holds every prompt once
            assert len(set(flat[epoch * count : (epoch + 1) * count])) == count
        assert max(Counter(flat).values()) - (len(flat) // count) <= 1


@pytest.mark.parametrize(("count", "per_step"), [(5, 4), (6, 4), (3, 8), (40, 8)])
def test_groups_of_one_prompt_in_a_step_are_told_apart_over_all_ranks(
    count: int, per_step: int
) -> None:
    for dp in (1, 2, 4):
        world = [make(count, per_step, dp, rank) for rank in range(dp)]
        for _ in range(10):
            batches = [next(sampler) for sampler in world]
            groups = [
                pair for batch in batches for pair in zip(texts(batch), batch.repeats, strict=True)
            ]
            assert len(set(groups)) == per_step
            assert all(
                (text, before) in groups for text, repeat in groups for before in range(repeat)
            )


def test_peek_does_not_advance() -> None:
    sampler = make(10, 4)
    for _ in range(5):
        peeked, state = sampler.peek(), sampler.state()
        assert sampler.peek() == peeked and sampler.state() == state
        assert next(sampler) == peeked and sampler.state() != state


def test_epochs_and_seeds_differ_and_file_order_without_shuffle() -> None:
    sampler = make(50, 50)
    first, second = texts(next(sampler)), texts(next(sampler))
    assert first != second and sorted(first) == sorted(second)
    assert texts(make(50, 50, seed=1).peek()) != first
    ordered = make(3, 4, shuffle=False)
    assert texts(next(ordered)) == ["p0", "p1", "p2", "p0"] and texts(next(ordered)) == [
        "p1",
        "p2",
        "p0",
        "p1",
    ]


def test_the_order_is_golden() -> None:
    # A resumed run must find the order of the run before it, also under another numpy: these
    # numbers never change.
    assert epoch_permutation(8, seed=0, epoch=0).tolist() == [4, 2, 3, 0, 5, 1, 6, 7]
    assert epoch_permutation(8, seed=0, epoch=1).tolist() == [0, 3, 7, 4, 5, 1, 6, 2]


def test_state_is_plain_json() -> None:
    sampler = make(10, 4)
    next(sampler)
    state = sampler.state()
    assert {key: state[key] for key in ("position", "num_prompts", "seed", "shuffle")} == {
        "position": 4,
        "num_prompts": 10,
        "seed": 0,
        "shuffle": 1,
    }
    assert json.loads(json.dumps(state)) == state


def test_other_prompts_of_the_same_number_are_refused_unless_they_are_meant(caplog) -> None:
    """Renamed files are not others: what counts are the prompts, in their order."""
    rows = make_prompts(10)
    saved = sampler_of(rows, source="old.txt")
    next(saved)
    state = json.loads(json.dumps(saved.state()))
    sampler_of(rows, source="moved.txt").load_state(state)
    for others in (rows[::-1], [*rows[:9], make_prompts(11)[10]]):
        sampler = sampler_of(others, source="new.txt")
        with pytest.raises(ValueError) as caught:
            sampler.load_state(state)
        for word in (state["digest"], sampler.state()["digest"], "old.txt", "new.txt"):
            assert word in str(caught.value)
        assert "checkpoint.accept_changes=true" in str(caught.value)
        assert sampler.state()["position"] == 0
        sampler.load_state(state, accept_changes=True)
        assert sampler.state()["position"] == 4 and "old.txt" in caplog.text


def sampler_of(prompts: list[Prompt], *, source: str) -> PromptSampler:
    return PromptSampler(
        prompts, prompts_per_step=4, dp=1, dp_rank=0, seed=0, shuffle=True, source=source
    )


def test_equal_rows_are_told_apart() -> None:
    """They share an id, from which noise follows; and a step may be longer than the file."""
    same = [Prompt(text="p", id=prompt_id("p", " "))] * 3
    for dp in (1, 2):
        world = [
            PromptSampler(same, prompts_per_step=8, dp=dp, dp_rank=rank, seed=0, shuffle=True)
            for rank in range(dp)
        ]
        repeats = [repeat for sampler in world for repeat in next(sampler).repeats]
        assert repeats == list(range(8))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make(11, 4), ["num_prompts=10", "num_prompts=11"]),
        (make(10, 4, seed=3), ["seed=0", "seed=3"]),
        (make(10, 4, shuffle=False), ["shuffle=1", "shuffle=0"]),
    ],
)
def test_a_state_of_another_order_is_refused(other: PromptSampler, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        other.load_state(make(10, 4).state())
    assert all(word in str(caught.value) for word in words)
    assert other.state()["position"] == 0


def test_another_prompts_per_step_continues_where_the_last_stopped() -> None:
    reference, sampler, resumed = make(20, 20), make(20, 4), make(20, 8)
    next(sampler)
    resumed.load_state(sampler.state())
    assert texts(next(resumed)) == texts(next(reference))[4:12]


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"prompts_per_step=6 .* dp=4.*set train\.prompts_per_step=8"
    ):
        make(10, 6, 4)
    with pytest.raises(ValueError, match=r"prompts_per_step=0 .*set train\.prompts_per_step=2"):
        make(10, 0, 2)


def test_a_large_file_costs_one_permutation_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(num_prompts: int, *, seed: int, epoch: int) -> object:
        calls.append(epoch)
        return epoch_permutation(num_prompts, seed=seed, epoch=epoch)

    monkeypatch.setattr("megadiff.data.sampler.epoch_permutation", counted)
    sampler = make(1000, 64)
    for _ in range(40):
        next(sampler)
    assert calls == [0, 1, 2]
