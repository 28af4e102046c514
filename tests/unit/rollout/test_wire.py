"""What is sent is what arrives: records and tensors bit by bit, and bad input names its fault."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from megadiff.process.bounded_http import Answer
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.wire import (
    decode_groups,
    encode_groups,
    requests_from_json,
    requests_to_json,
)
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling

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
    count = len(sample_indices)
    pixels_NFHWC = torch.randint(0, 256, (count + 1, 1, 64, 48, 3), generator=generator)
    conditioning = {
        "prompt_embeds": torch.randn(1, 9, 8).bfloat16(),
        "prompt_mask": torch.ones(1, 9, dtype=torch.bool),
    }
    return RolloutGroup(
        prompt=PROMPT,
        sampling=SAMPLING,
        sample_indices=sample_indices,
        window_start=2,
        latents_GSLC=torch.randn(count, 3, 12, 64, generator=generator),
        log_probs_GW=torch.randn(count, 2, generator=generator, dtype=torch.float64),
        pixels_GFHWC=pixels_NFHWC.byte()[1:],  # a view, which safetensors alone would refuse
        schedule=SCHEDULE,
        conditioning=conditioning,
        policy_version=5,
        replica="replica-1",
        thought="a circle, 圆",
    )


def assert_same(arrived: RolloutGroup, group: RolloutGroup) -> None:
    assert arrived.conditioning.keys() == group.conditioning.keys()
    pairs = [(arrived.conditioning[name], value) for name, value in group.conditioning.items()]
    for name, value in vars(group).items():
        if isinstance(value, torch.Tensor):
            pairs.append((getattr(arrived, name), value))
        elif name != "conditioning":
            assert getattr(arrived, name) == value, name
    for tensor, expected in pairs:
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_requests_round_trip() -> None:
    requests = [
        make_request(),
        make_request(policy_version=3),
        make_request(sample_indices=(1,), seed=9),
    ]
    given = replace(SAMPLING, images=((4, 8), (1, 1)))
    requests.append(make_request(images=(bytes(range(96)), b"abc"), sampling=given))
    named = replace(PROMPT, images=("a.png", "zwei ü.png"))
    requests.append(make_request(prompt=named))
    fields = {"same_noise": True, "ode_solver": "dpm2"}
    requests.append(make_request(sampling=replace(SAMPLING, **fields)))
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
        (("sampling", "images"), 1, "sampling.images=1 is a int, not a list"),
        (("sampling", "images"), [[1, 2], [3]], "sampling.images=[3] must be a list of 2 integers"),
        (("prompt", "images"), [1], "prompt.images has 1, a int; it must be str"),
        (("sampling", "same_noise"), "yes", "sampling.same_noise='yes' is a str"),
        (("sampling", "ode_solver"), 2, "sampling.ode_solver=2 is a int"),
        (("images",), "YQ==", "request.images='YQ==' is a str, not a list"),
        (("images",), ["YQ==", "a*b="], "request.images has 'a.b=', not bytes in base64"),
        (("images",), ["ü"], "request.images has 'ü', not bytes in base64"),
        (("images",), [[1]], "request.images has .1], not bytes in base64"),
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
    assert [len(group.latents_GSLC) for group in arrived] == list(range(1, 13))
    assert_same(arrived[11], groups[11])


def test_group_without_window() -> None:
    group = replace(
        make_group(),
        window_start=6,
        latents_GSLC=torch.zeros(2, 1, 12, 64),
        log_probs_GW=torch.zeros(2, 0, dtype=torch.float64),
    )
    (arrived,) = decode_groups(encode_groups([group]))
    assert_same(arrived, group)


def test_columns_of_another_version_are_named() -> None:
    body = encode_groups([make_group()])
    length = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + length])["__metadata__"]
    tensors = load(body)
    tensors["latents"] = tensors.pop("latents_GSLC")
    with pytest.raises(ValueError, match="lack latents_GSLC; .* the same megadiff"):
        decode_groups(save(tensors, metadata=metadata))


ROWS = torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        ({"log_probs_GW": torch.zeros(3, 2)}, {}),  # of three samples
        ({"log_probs_GW": torch.zeros(())}, {}),
        ({"log_probs_GW": torch.zeros(2, 3)}, {}),  # of another window
        ({"latents_GSLC": ROWS}, {}),
        ({"pixels_GFHWC": ROWS}, {}),
        ({"pixels_GFHWC": torch.zeros(2, 1, 48, 64, 3, dtype=torch.uint8)}, {}),
        ({"x.prompt_embeds": ROWS}, {}),
        ({}, {"window_start": "2"}),
        ({}, {"policy_version": None}),
        ({}, {"sample_indices": 2}),
        ({}, {"sampling": {}}),
        ({}, None),
    ],
)
def test_an_odd_answer_counts_as_none(tensors, header, monkeypatch) -> None:
    """It is drawn again, and does not end the run."""
    body = encode_groups([make_group()])
    length = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + length])["__metadata__"]
    if header is None:
        metadata["megadiff"] = "[" * 100_000
    else:
        group = json.loads(metadata["megadiff"])["groups"][0]
        metadata["megadiff"] = json.dumps({"groups": [group | header]})
    odd = save(load(body) | tensors, metadata=metadata)

    client = ReplicaClient("http://127.0.0.1:1", "a")
    answers = [Answer(status=200, headers={}, body=answer) for answer in (body, odd)]
    monkeypatch.setattr(client, "_call", lambda *_, **__: answers.pop(0))
    assert len(client.draw([make_request()]).groups) == 1
    with pytest.raises(ReplicaError, match="has an unusable answer") as raised:
        client.draw([make_request()])
    assert raised.value.status is None


def test_bytes_that_are_no_group() -> None:
    for body in (b"", b"hello", encode_groups([make_group()])[:-5]):
        with pytest.raises(ValueError, match="is not safetensors"):
            decode_groups(body)
    with pytest.raises(ValueError, match="metadata"):
        decode_groups(save({"a": torch.zeros(1)}))
