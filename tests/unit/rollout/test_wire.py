"""What is sent is what arrives: records and tensors bit by bit, and bad input names its fault."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from megadiff.rollout.wire import (
    decode_groups,
    encode_groups,
    requests_from_json,
    requests_to_json,
)
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling, Trajectory

PROMPT = Prompt(
    text="猫 “quoted” \n", id="0123456789abcdef", fields={"color": "red", "weights": [1, 2.5, None]}
)
SAMPLING = Sampling(height=64, width=48, num_inference_steps=6, sde_window_range=(1, 4))


def make_request(**changes: object) -> RolloutRequest:
    values = {
        "prompt": PROMPT,
        "sampling": SAMPLING,
        "sample_indices": (4, 7),
        "seed": 1,
        "step": 2,
    }
    return RolloutRequest(**(values | changes))


SCHEDULE = torch.linspace(1, 0, 7)  # the groups of a batch share one tensor


def make_group(*, sample_indices: tuple[int, ...] = (4, 7)) -> RolloutGroup:
    generator = torch.Generator().manual_seed(len(sample_indices))
    schedule = SCHEDULE
    trajectories = tuple(
        Trajectory(
            latents_SLC=torch.randn(3, 12, 64, generator=generator),
            sigmas=schedule[2:5],  # a view, which safetensors alone would refuse
            timesteps=1000 * schedule[2:4],
            log_probs=torch.randn(2, generator=generator),
            window_start=2,
            pixels=torch.randint(0, 256, (1, 64, 48, 3), generator=generator, dtype=torch.uint8),
            prompt_id=PROMPT.id,
            sample_index=index,
            policy_version=5,
        )
        for index in sample_indices
    )
    conditioning = {
        "prompt_embeds": torch.randn(1, 9, 8).bfloat16(),
        "prompt_mask": torch.ones(1, 9, dtype=torch.bool),
    }
    return RolloutGroup(
        prompt=PROMPT,
        sampling=SAMPLING,
        schedule=schedule,
        conditioning=conditioning,
        trajectories=trajectories,
        policy_version=5,
        replica="replica-1",
    )


def assert_same(arrived: RolloutGroup, group: RolloutGroup) -> None:
    assert (arrived.prompt, arrived.sampling) == (group.prompt, group.sampling)
    assert (arrived.policy_version, arrived.replica) == (group.policy_version, group.replica)
    assert torch.equal(arrived.schedule, group.schedule)
    assert arrived.conditioning.keys() == group.conditioning.keys()
    for name, tensor in group.conditioning.items():
        assert arrived.conditioning[name].dtype == tensor.dtype and torch.equal(
            arrived.conditioning[name], tensor
        )
    for one, other in zip(arrived.trajectories, group.trajectories, strict=True):
        for name, value in vars(other).items():
            found = getattr(one, name)
            assert (
                torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            ), name


def test_requests_round_trip() -> None:
    requests = [
        make_request(),
        make_request(policy_version=3),
        make_request(sample_indices=(1,), seed=9),
    ]
    requests.append(
        make_request(first_frame=bytes(range(256)), sampling=replace(SAMPLING, first_frame=True))
    )
    assert requests_from_json(json.loads(json.dumps(requests_to_json(requests)))) == requests


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("seed",), "1", "request.seed='1' is a str"),
        (("seed",), True, "request.seed=True is a bool"),
        (("colour",), 1, "unknown keys colour"),
        (("sampling", "height"), 64.5, "sampling.height=64.5"),
        (("sampling", "sde_window_range"), [1], "must be a list of 2 integers"),
        (("sample_indices",), [1, "2"], "request.sample_indices"),
        (("prompt",), "a cat", "prompt is a str"),
        (("sampling", "first_frame"), 1, "sampling.first_frame=1 is a int"),
        (("first_frame",), "a*b=", "request.first_frame is 'a.b=', not bytes in base64"),
        (("first_frame",), "ü", "request.first_frame is 'ü', not bytes in base64"),
        (("first_frame",), [1], "request.first_frame is .1], not bytes in base64"),
    ],
)
def test_bad_request_names_its_place_and_key(
    path: tuple[str, ...], value: object, message: str
) -> None:
    body = json.loads(json.dumps(requests_to_json([make_request()] * 3)))
    parent = body[1]
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(ValueError, match=r"^requests\[1\]: .*" + message.replace("[", r"\[")):
        requests_from_json(body)


def test_bodies_that_are_no_list_of_requests() -> None:
    (body,) = requests_to_json([make_request()])
    with pytest.raises(ValueError, match="the body is a dict; it must be a JSON list"):
        requests_from_json(body)
    with pytest.raises(ValueError, match=r"requests\[0\]: request is a int"):
        requests_from_json([1])
    del body["sampling"]["width"]
    with pytest.raises(ValueError, match=r"requests\[0\]: sampling lacks width"):
        requests_from_json([body])


def test_groups_round_trip() -> None:
    groups = [make_group(), make_group(sample_indices=(0, 1, 2)), make_group(sample_indices=(5,))]
    for arrived, group in zip(decode_groups(encode_groups(groups)), groups, strict=True):
        assert_same(arrived, group)


def test_more_than_ten_groups_keep_their_places() -> None:
    groups = [make_group(sample_indices=tuple(range(count))) for count in range(1, 13)]
    arrived = decode_groups(encode_groups(groups))
    assert [len(group.trajectories) for group in arrived] == list(range(1, 13))
    assert_same(arrived[11], groups[11])


def test_group_without_window() -> None:
    group = make_group()
    without = [
        Trajectory(
            **(vars(trajectory) | {"log_probs": torch.zeros(0), "timesteps": torch.zeros(0)})
        )
        for trajectory in group.trajectories
    ]
    (arrived,) = decode_groups(
        encode_groups([RolloutGroup(**(vars(group) | {"trajectories": tuple(without)}))])
    )
    assert arrived.trajectories[1].log_probs.shape == (0,)


def test_bytes_that_are_no_group() -> None:
    for body in (b"", b"hello", encode_groups([make_group()])[:-5]):
        with pytest.raises(ValueError, match="is not safetensors"):
            decode_groups(body)
    with pytest.raises(ValueError, match="metadata"):
        decode_groups(save({"a": torch.zeros(1)}))
