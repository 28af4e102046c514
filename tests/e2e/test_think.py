"""Thinking with one real replica of BAGEL: text is sampled first, recorded, and conditioned on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from examples.tiny_models.bagel import write_tiny_bagel
from megadiff.models.bagel.adapter import BagelAdapter
from megadiff.models.bagel.attention import NUM_MARKS
from megadiff.rollout.stages import thinking
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.e2e.recompute import adapter_gap, trajectory_gap
from tests.e2e.replica import Server, start
from tests.plain_module import plain_module

PLAIN = Sampling(
    height=64,
    width=64,
    num_inference_steps=4,
    guidance_scale=4.0,
    sde_window_size=2,
    sde_window_range=(0, 3),
)
TEXTS = ("a red circle", "two blue squares on a wall, above a green star", "a sky")
EXTRA = {"think": True, "max_think_tokens": 6, "do_sample": True, "text_temperature": 1.0}
TOLERANCE = 1e-7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("think") / "model"
    write_tiny_bagel(folder)
    return folder


@pytest.fixture(scope="module")
def stages(model: Path) -> Path:
    """A stage file whose path is not ASCII."""
    file = model.parent / "étapes 阶段.yaml"
    stage = {"stage_id": 0, "devices": "0", "default_sampling_params": {"extra_args": EXTRA}}
    file.write_text(yaml.safe_dump({"pipeline": "bagel_single_stage", "stages": [stage]}))
    return file


@pytest.fixture(scope="module")
def server(model: Path, stages: Path) -> Iterator[Server]:
    server = start(model, model.parent, f"--stage-config={stages}", "--device=cpu")
    yield server
    server.end()


def requests_of(sampling: Sampling) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            prompt=Prompt(text=text, id=letter * 16),
            sampling=sampling,
            sample_indices=(0, 1),
            seed=3,
            step=1,
        )
        for letter, text in zip("abc", TEXTS, strict=True)
    ]


@pytest.mark.parametrize("thinks", [False, True])
def test_the_trajectory_is_the_trainers(
    server: Server, model: Path, stages: Path, thinks: bool
) -> None:
    """From the noise to the clean latents with CFG, texts of three lengths in one call."""
    drawn = replace(PLAIN, sde_type="ode", **(thinking(stages) if thinks else {}))
    requests = requests_of(drawn)
    groups = server.client.draw(requests).groups
    assert len({group.conditioning["prompt_ids"].shape[1] for group in groups}) == len(TEXTS)

    adapter = BagelAdapter(model)
    transformer = plain_module(adapter)
    for request, group in zip(requests, groups, strict=True):
        assert bool(group.thought) == thinks
        assert trajectory_gap(adapter, transformer, request, group) <= 1e-5
    # the guidance and the text matter
    one, other = groups[:2]
    unguided = [
        replace(request, sampling=replace(drawn, guidance_scale=1.0)) for request in requests
    ]
    plain = server.client.draw(unguided).groups[0]
    assert (plain.latents_GSLC - one.latents_GSLC).abs().max() > 1e-2
    swapped = replace(one, conditioning=other.conditioning)
    assert trajectory_gap(adapter, transformer, requests[0], swapped) > 1e-2


def test_text_is_sampled_recorded_and_conditioned_on(
    server: Server, model: Path, stages: Path
) -> None:
    settings = thinking(stages)
    assert settings == {"think_tokens": 6, "think_temperature": 1.0}
    thoughtful = requests_of(replace(PLAIN, **settings))
    groups = server.client.draw(thoughtful).groups
    plain = server.client.draw(requests_of(PLAIN)).groups

    adapter = BagelAdapter(model)
    transformer = plain_module(adapter)
    for group, without in zip(groups, plain, strict=True):
        assert group.thought and not without.thought
        ids = group.conditioning["prompt_ids"][0].tolist()
        prompt = without.conditioning["prompt_ids"][0].tolist()
        # the prompt, what was written, then the image's marks
        assert ids[: len(prompt) - NUM_MARKS] == prompt[:-NUM_MARKS]
        assert ids[-NUM_MARKS:] == prompt[-NUM_MARKS:]
        assert 1 <= len(ids) - len(prompt) <= settings["think_tokens"]
        # the image depends on the text, and the trainer finds the same log_probs by the record
        assert not torch.equal(group.latents_GSLC[:, -1], without.latents_GSLC[:, -1])
        assert adapter_gap(adapter, transformer, group) <= TOLERANCE
        assert adapter_gap(adapter, transformer, without) <= TOLERANCE
    assert len({group.thought for group in groups}) == len(TEXTS)


def test_text_depends_on_the_seed_alone(server: Server, stages: Path) -> None:
    """Not on the call: a group by itself, and again, writes what it wrote beside others."""
    thoughtful = requests_of(replace(PLAIN, **thinking(stages)))
    together = server.client.draw(thoughtful).groups
    (alone,) = server.client.draw(thoughtful[1:2]).groups
    assert alone.thought == together[1].thought
    assert torch.equal(alone.conditioning["prompt_ids"], together[1].conditioning["prompt_ids"])

    other_seed = [replace(request, seed=4) for request in thoughtful]
    others = server.client.draw(other_seed).groups
    assert [group.thought for group in others] != [group.thought for group in together]
