"""What the parity gate asks for: groups that no pipeline can take for one another."""

import pytest
import torch

from megadiff.config.schema import AlgorithmConfig, Config, RolloutConfig
from megadiff.train.probe import TEXTS, at_largest_weight, own_size, unlike_prompts, unlike_size
from megadiff.types import Prompt, Sampling

PROMPT = Prompt(text="a red cat", id="00" * 8, fields={"color": "red"})


def config(*, batch_size: int, group_size: int, **rollout: object) -> Config:
    rollout = {"height": 64, "width": 64, **rollout}
    return Config(
        rollout=RolloutConfig(batch_size=batch_size, **rollout),
        algorithm=AlgorithmConfig(group_size=group_size),
    )


def test_texts_differ_in_length_script_and_negative_text():
    prompts = unlike_prompts([PROMPT], 4, [()])
    lengths = [len(prompt.text.encode()) for prompt in prompts]
    assert len(set(lengths)) == 4 and max(lengths) > 10 * min(lengths)
    assert len({prompt.id for prompt in prompts}) == 4
    assert any(not prompt.text.isascii() for prompt in prompts)
    assert len({prompt.negative_text for prompt in prompts}) >= 3
    assert prompts[0].text == PROMPT.text and not prompts[0].fields


def test_images_of_one_shape_are_asked_for_in_turn_and_one_of_another():
    step = [Prompt(text=f"cat {name}", id=name * 16, images=(f"{name}.png",)) for name in "abcd"]
    alike = unlike_prompts(step[:2], 4, ["flat", "flat"])
    assert [prompt.images[0] for prompt in alike] == ["a.png", "b.png", "a.png", "b.png"]
    mixed = unlike_prompts(step, 4, ["flat", "tall", "flat", "tall"])
    assert [prompt.images[0] for prompt in mixed] == ["a.png", "c.png", "a.png", "c.png", "b.png"]
    assert len({prompt.id for prompt in mixed}) == 5


@pytest.mark.parametrize(
    ("batch_size", "group_size", "own", "unlike"),
    [
        (16, 16, (1, 16), (4, 2)),
        (32, 8, (4, 8), (4, 2)),
        (64, 8, (4, 8), (4, 2)),
        (1, 4, (1, 4), (4, 1)),
        (1, 2, (1, 2), (2, 1)),
        (7, 3, (2, 3), (4, 1)),
    ],
)
def test_calls_are_no_larger_than_the_runs(batch_size, group_size, own, unlike):
    settings = config(batch_size=batch_size, group_size=group_size)
    settings.train.microbatch_size = 64
    assert own_size(settings) == own
    assert unlike_size(settings) == unlike
    assert unlike[0] <= 1 + len(TEXTS)
    settings.train.microbatch_size = 2
    assert own_size(settings) == (own[0], 2)


@pytest.mark.parametrize(
    ("sde_type", "within", "size", "expected"),
    [
        ("flow_sde", (0, 9), 2, (7, 9)),  # the less noise, the more an error counts
        ("flow_sde", (0, 5), 2, (3, 5)),
        ("flow_sde", (2, 4), 2, (2, 4)),
        ("dance_sde", (0, 5), 3, (2, 5)),
        ("flow_cps", (0, 9), 2, (2, 4)),  # without a variance: where noise and error are large
    ],
)
def test_the_runs_own_call_is_drawn_where_an_error_counts_most(sde_type, within, size, expected):
    sampling = Sampling(
        height=64,
        width=64,
        num_inference_steps=10,
        sde_type=sde_type,
        sde_window_size=size,
        sde_window_range=within,
    )
    drawn = at_largest_weight(sampling, torch.linspace(1, 0, 11))
    assert drawn.sde_window_range == expected
    assert drawn.sde_window_size == size
