"""Several groups in one engine call of a real replica: the same records as one by one, whatever is
in the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.wire import requests_to_json
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.model_files import weight_files
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling
from tests.e2e.recompute import gap
from tests.e2e.waiting_calls import assert_waiting_calls_draw_alike

SAMPLING = Sampling(height=64, width=64, num_inference_steps=6, sde_window_range=(0, 5))
TEXTS = (
    "a red cat",
    "a much longer prompt about a blue dog",
    "a red cat",
    "猫",
    "two green squares left of a circle",
)


def requests(
    sampling: Sampling = SAMPLING, sizes: Sequence[int] = (3, 1, 2, 4, 2)
) -> list[RolloutRequest]:
    """Groups of unequal sizes, prompts of unequal lengths (one comes twice), and several
    windows.
    """
    return [
        RolloutRequest(
            prompt=Prompt(text=text, id=f"{place:016x}", negative_text="bad " * (place % 3)),
            sampling=sampling,
            sample_indices=tuple(range(place, place + size)),
            seed=3,
            step=place % 2,
        )
        for place, (text, size) in enumerate(zip(TEXTS, sizes, strict=True))
    ]


@pytest.fixture(scope="module")
def clients(registry: Path, tiny_model: Path) -> Iterator[list[ReplicaClient]]:
    """Of both replicas, which hold the weights on disk: other tests' trainers left theirs there."""
    found = [json.loads(path.read_text()) for path in sorted(registry.glob("*.json"))]
    clients = [ReplicaClient(entry["url"], entry["name"], timeout_s=120) for entry in found]
    manifest = folder_manifest(tiny_model, ("transformer",), dtype="float32")
    (file,) = weight_files(tiny_model / "transformer")
    tensors = [(f"transformer.{name}", tensor) for name, tensor in load_file(file).items()]
    for client in clients:
        client.weights_begin(0, manifest)
        client.weights_bucket(encode_bucket(tensors))
        client.weights_commit(0)
    yield clients
    for client in clients:
        client.release()
        client.close()


def test_calls_that_wait_draw_what_they_draw_alone(clients: list[ReplicaClient]) -> None:
    assert_waiting_calls_draw_alike(
        clients[0], [requests()[place : place + 2] for place in range(4)]
    )


def assert_close(one: RolloutGroup, other: RolloutGroup, *, tolerance: float = 1e-5) -> None:
    assert one.prompt == other.prompt and one.conditioning.keys() == other.conditioning.keys()
    for name, tensor in one.conditioning.items():
        expected = other.conditioning[name].float()
        assert tensor.shape == expected.shape
        assert (tensor.float() - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert one.sample_indices == other.sample_indices
    assert one.window_start == other.window_start
    assert torch.equal(one.schedule, other.schedule)
    assert (one.latents_GSLC - other.latents_GSLC).abs().max() <= tolerance
    assert one.log_probs_GW.shape == other.log_probs_GW.shape
    assert ((one.log_probs_GW - other.log_probs_GW).abs() <= tolerance).all()
    assert (one.pixels_GFHWC.int() - other.pixels_GFHWC.int()).abs().max() <= 1


@pytest.mark.parametrize("sde_type", ["flow_sde", "flow_cps", "ode"])
def test_batched_is_serial(clients: list[ReplicaClient], tiny_model: Path, sde_type: str) -> None:
    asked = requests(replace(SAMPLING, sde_type=sde_type))
    groups = clients[0].draw(asked).groups
    for group, request in zip(groups, asked, strict=True):
        assert_close(group, clients[0].generate(request))
    if sde_type != "ode":
        # or the windows are not mixed
        assert len({group.window_start for group in groups}) > 1
        assert max(gap(tiny_model, group) for group in groups) <= 1e-6


def test_one_noise_is_computed_once(clients: list[ReplicaClient], tiny_model: Path) -> None:
    """A group is one state until its window, and each sample what it would be by itself."""
    asked = requests(replace(SAMPLING, same_noise=True, true_cfg_scale=4.0, ode_solver="dpm2"))
    groups = clients[0].draw(asked).groups
    assert len({group.window_start for group in groups}) > 1
    for group, request in zip(groups, asked, strict=True):
        begins_GLC = group.latents_GSLC[:, 0]
        assert torch.equal(begins_GLC, begins_GLC[:1].expand_as(begins_GLC))
        assert gap(tiny_model, group) <= 1e-4
        # without it the first sample is the same, computed among as many rows as there are samples
        first = replace(request, sample_indices=request.sample_indices[:1])
        own = replace(request.sampling, same_noise=False)
        alone = clients[0].generate(replace(first, sampling=own))
        first_SLC = group.latents_GSLC[0]
        assert (first_SLC - alone.latents_GSLC[0]).abs().max() <= 1e-4
        assert (group.log_probs_GW[0] - alone.log_probs_GW[0]).abs().max() <= 1e-4
        assert (group.pixels_GFHWC[0].int() - alone.pixels_GFHWC[0].int()).abs().max() <= 1
    several = [group for group in groups if len(group.sample_indices) > 1]
    for group in several:
        assert not torch.equal(group.latents_GSLC[0, 1], group.latents_GSLC[1, 1])


def test_true_cfg(clients: list[ReplicaClient], tiny_model: Path) -> None:
    """Each group is guided by its own negative prompt: `bad` changes the figure by far more than
    the tolerance.
    """
    asked = requests(replace(SAMPLING, true_cfg_scale=4.0))
    groups = clients[0].draw(asked).groups
    for group, request in zip(groups, asked, strict=True):
        assert_close(group, clients[0].generate(request), tolerance=1e-4)
        assert gap(tiny_model, group) <= 1e-4
    swapped = replace(groups[1], conditioning=groups[1].conditioning | _negative(groups[2]))
    assert gap(tiny_model, swapped) > 10 * max(gap(tiny_model, groups[1]), 1e-6)


def _negative(group: RolloutGroup) -> dict[str, torch.Tensor]:
    return {
        name: tensor for name, tensor in group.conditioning.items() if name.startswith("negative_")
    }


def test_a_batch_is_the_same_bit_by_bit_on_every_replica(clients: list[ReplicaClient]) -> None:
    one, other = (client.draw(requests()).groups for client in clients)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.latents_GSLC, right.latents_GSLC)
        assert torch.equal(left.log_probs_GW, right.log_probs_GW)
        assert torch.equal(left.pixels_GFHWC, right.pixels_GFHWC)


def test_a_fleet_samples_the_same_bits_again(clients: list[ReplicaClient]) -> None:
    def sample() -> list[RolloutGroup]:
        fleet = Fleet(clients, batch_size=8)
        found = dict(fleet.generate(requests()))
        return [found[index] for index in range(5)]

    for left, right, request in zip(sample(), sample(), requests(), strict=True):
        assert left.prompt.id == request.prompt.id
        assert torch.equal(left.latents_GSLC, right.latents_GSLC)


def test_batches_that_are_refused(clients: list[ReplicaClient]) -> None:
    client, good = clients[0], requests()
    odd = replace(good[1], sampling=replace(SAMPLING, num_inference_steps=7))
    version = replace(good[1], policy_version=77)
    long = replace(good[1], prompt=replace(good[1].prompt, text="🐱" * 2000))
    many = [replace(one, sample_indices=tuple(range(300))) for one in good]
    cases = [
        (
            [good[0], odd],
            400,
            r"requests\[1\] has num_inference_steps=7, requests\[0\] has num_inference_steps=6",
        ),
        (
            [good[0], replace(good[1], sample_indices=(1, 1))],
            400,
            r"requests\[1\] \(prompt 0000000000000001\).*twice",
        ),
        (
            [good[0], good[2], long],
            400,
            r"requests\[2\] \(prompt 0000000000000001\): the prompt is too long",
        ),
        ([good[0], version], 409, "policy_version 77 was asked for"),
        (many, 400, "5 requests ask for 1500 samples, a call takes 1024"),
        ([], 400, "empty"),
    ]
    for asked, status, message in cases:
        with pytest.raises(ReplicaError, match=message) as error:
            client.draw(asked)
        assert error.value.status == status
    body = requests_to_json(good)
    del body[3]["seed"]
    response = httpx.post(f"{client.url}/rl/generate", json=body)
    assert (
        response.status_code == 400
        and response.json()["error"] == "requests[3]: request lacks seed"
    )
    assert len(client.draw(good).groups) == 5
