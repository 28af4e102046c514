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
from megadiff.tensors.shards import Shard
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.e2e.recompute import adapter_gap
from tests.e2e.replica import Server, start

PLAIN = Sampling(
    height=64,
    width=64,
    num_inference_steps=4,
    guidance_scale=4.0,
    sde_window_size=2,
    sde_window_range=(0, 3),
)
TEXTS = ("a red circle", "two blue squares on a wall, above a green star", "sky")
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


def trainer_module(adapter: BagelAdapter) -> torch.nn.Module:
    """Return the trainer's transformer with the folder's weights, float32."""
    module = adapter.empty_transformer().to_empty(device="cpu")
    source = SourceFolder(adapter.model_folder / "transformer")
    source.check_names({name: tuple(p.shape) for name, p in module.named_parameters()})
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        source.read_into(name, Shard(local=parameter.data, offsets=(0,) * len(shape), shape=shape))
    return module


def test_text_is_sampled_recorded_and_conditioned_on(
    server: Server, model: Path, stages: Path
) -> None:
    settings = thinking(stages)
    assert settings == {"think_tokens": 6, "think_temperature": 1.0}
    thoughtful = requests_of(replace(PLAIN, **settings))
    groups = server.client.generate_batch(thoughtful)
    plain = server.client.generate_batch(requests_of(PLAIN))

    adapter = BagelAdapter(model)
    transformer = trainer_module(adapter)
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
    together = server.client.generate_batch(thoughtful)
    (alone,) = server.client.generate_batch(thoughtful[1:2])
    assert alone.thought == together[1].thought
    assert torch.equal(alone.conditioning["prompt_ids"], together[1].conditioning["prompt_ids"])

    other_seed = [replace(request, seed=4) for request in thoughtful]
    others = server.client.generate_batch(other_seed)
    assert [group.thought for group in others] != [group.thought for group in together]
