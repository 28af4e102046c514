"""A real replica, vllm-omni and all: its samples, its weights, its refusals.

One server for the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.wire import requests_to_json
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.lora_names import lora_manifest
from megadiff.tensors.manifest import folder_manifest
from megadiff.types import LoraSpec
from tests.e2e.pushes import folder_weights
from tests.e2e.recompute import gap
from tests.e2e.replica import (
    PROMPT,
    REQUEST,
    SAMPLING,
    Server,
    bound_lora_serves_and_sleeps,
    image,
    push,
    start,
)
from tests.lora_tensors import linears


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> dict[str, Tensor]:
    return folder_weights(tiny_model, ("transformer",))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tiny_model, tmp_path_factory.mktemp("replica"))
    yield server
    server.end()


@pytest.fixture
def client(server: Server, tiny_model: Path, weights: dict[str, Tensor]) -> Iterator[ReplicaClient]:
    """Hands the replica on ready, and holding the weights on disk as version 0."""
    yield server.client
    assert server.process.poll() is None, "the replica died"
    if server.client.health()["state"] != "ready" or server.client.health()["policy_version"] > 0:
        push(server.client, weights, version=0, model=tiny_model)


def test_group_is_complete(client: ReplicaClient) -> None:
    group = client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0)))
    assert (group.prompt, group.replica) == (PROMPT, "replica-7")
    assert group.policy_version == client.health()["policy_version"]
    assert group.schedule.shape == (7,) and group.schedule[0] == 1 and group.schedule[-1] == 0
    assert set(group.conditioning) == {
        "prompt_embeds",
        "prompt_mask",
        "negative_prompt_embeds",
        "negative_prompt_mask",
    }
    assert group.conditioning["prompt_mask"].dtype == torch.bool
    assert group.conditioning["prompt_embeds"].shape[:2] == group.conditioning["prompt_mask"].shape
    assert group.sample_indices == (0, 1, 2, 3)
    assert group.latents_GSLC.shape == (4, 3, 16, 64)
    assert group.latents_GSLC.dtype == torch.float32
    assert group.log_probs_GW.shape == (4, 2)
    assert group.log_probs_GW.dtype == torch.float64
    assert group.pixels_GFHWC.shape == (4, 1, 64, 64, 3)
    assert group.pixels_GFHWC.dtype == torch.uint8
    assert group.schedule.shape == (7,)
    assert 0 <= group.window_start <= 3


def test_sample_depends_on_its_identity_only(client: ReplicaClient) -> None:
    """Bit by bit with other neighbours, in another order, and with other groups running at the same
    moment. In a batch of another *size* the matrix kernels round differently: within 1e-6 of the
    latents' scale, and the same log_probs.
    """
    group = client.generate(REQUEST)
    other = replace(
        REQUEST, prompt=replace(PROMPT, text="a much longer prompt about a blue dog", id="cd" * 8)
    )
    with ThreadPoolExecutor(5) as pool:
        requests = [
            REQUEST,
            replace(REQUEST, sample_indices=(9, 2, 8, 0)),
            other,
            replace(other, seed=4),
        ]
        again, mixed, first, second = pool.map(client.generate, requests)
    for one, row, same, same_row in (
        (group, 3, again, 3),
        (group, 2, mixed, 1),
        (group, 0, mixed, 3),
    ):
        assert torch.equal(one.latents_GSLC[row], same.latents_GSLC[same_row])
        assert torch.equal(one.log_probs_GW[row], same.log_probs_GW[same_row])
        assert one.window_start == same.window_start
    latents_SLC = group.latents_GSLC[2]
    for sample_indices in ((2,), (9, 2)):
        right = client.generate(replace(REQUEST, sample_indices=sample_indices))
        gap_SLC = (latents_SLC - right.latents_GSLC[-1]).abs()
        assert gap_SLC.max() <= 1e-6 * latents_SLC.abs().max()
        assert (group.log_probs_GW[2] - right.log_probs_GW[-1]).abs().max() <= 1e-6
    others = (*group.latents_GSLC[1:], first.latents_GSLC[0], second.latents_GSLC[0])
    differences = [(group.latents_GSLC[0] - latents_SLC).abs().max() for latents_SLC in others]
    assert min(differences) > 0.1
    assert not torch.equal(first.latents_GSLC[0], second.latents_GSLC[0])


@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "flow_cps"])
def test_log_probs_are_those_of_stock_diffusers(
    client: ReplicaClient, tiny_model: Path, sde_type: str
) -> None:
    for step in range(2):  # two windows
        group = client.generate(
            replace(REQUEST, step=step, sampling=replace(SAMPLING, sde_type=sde_type))
        )
        assert gap(tiny_model, group) <= 1e-6


def test_log_probs_under_true_cfg(client: ReplicaClient, tiny_model: Path) -> None:
    group = client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0)))
    guided, unguided = gap(tiny_model, group), gap(tiny_model, replace(group, sampling=SAMPLING))
    assert guided <= 1e-4
    assert unguided > 10 * max(guided, 1e-6)  # the guidance matters to the figure above


def test_ode_pixels_are_the_decoded_final_latents(client: ReplicaClient, tiny_model: Path) -> None:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

    for sampling in (replace(SAMPLING, sde_type="ode"), replace(SAMPLING, sde_window_size=0)):
        group = client.generate(replace(REQUEST, sampling=sampling, sample_indices=(0, 1)))
        assert group.window_start == 6
        assert group.latents_GSLC.shape[:2] == (2, 1)
        assert group.log_probs_GW.shape == (2, 0)
        final_NLC = group.latents_GSLC[:, 0]
        vae = AutoencoderKLQwenImage.from_pretrained(tiny_model / "vae", torch_dtype=torch.float32)
        latents = QwenImagePipeline._unpack_latents(final_NLC, 64, 64, 8)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        with torch.no_grad():
            decoded = vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
        expected = (
            ((decoded * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        )
        pixels = group.pixels_GFHWC[:, 0]
        # of 255: rounding of one float32 ulp
        assert (pixels.int() - expected.int()).abs().max() <= 1


def test_push_changes_the_policy_bit_by_bit(
    client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    before, before_group = image(client), client.generate(REQUEST)
    assert before[:4] == b"\x89PNG" and before == image(client)
    changed = {name: tensor * 1.1 for name, tensor in weights.items()}
    held = push(client, changed, version=1, model=tiny_model)
    assert held == {name: fingerprint(tensor) for name, tensor in changed.items()}
    assert image(client) != before
    group = client.generate(replace(REQUEST, policy_version=1))
    assert group.policy_version == 1
    assert not torch.equal(group.latents_GSLC[0], before_group.latents_GSLC[0])
    with pytest.raises(
        ReplicaError, match="policy_version 0 was asked for, this replica holds 1"
    ) as error:
        client.generate(replace(REQUEST, policy_version=0))
    assert error.value.status == 409

    push(client, weights, version=2, model=tiny_model)
    assert image(client) == before
    after = client.generate(REQUEST)
    assert torch.equal(after.latents_GSLC, before_group.latents_GSLC)


def test_a_flipped_bit_shows(
    client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    name = next(name for name in weights if name.endswith("attn.to_k.weight"))
    flipped = weights[name].clone()
    flipped.view(torch.int32)[0, 1] ^= 1
    held = push(client, weights | {name: flipped}, version=1, model=tiny_model)
    assert [other for other, tensor in weights.items() if held[other] != fingerprint(tensor)] == [
        name
    ]


def test_a_push_that_skips_a_tensor_is_refused(
    client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    manifest = folder_manifest(tiny_model, ("transformer",), dtype="float32")
    name = "transformer.proj_out.weight"
    with pytest.raises(ReplicaError, match=f"1 missing: {name}"):
        client.weights_begin(1, {other: row for other, row in manifest.items() if other != name})
    client.weights_begin(1, manifest)
    client.weights_bucket(
        encode_bucket([(other, tensor) for other, tensor in weights.items() if other != name])
    )
    for call in (lambda: client.weights_commit(1), lambda: client.generate(REQUEST)):
        with pytest.raises(ReplicaError) as error:
            call()
        assert error.value.status in (400, 409)
    assert (
        httpx.post(f"{client.url}/v1/images/generations", json={"prompt": "x"}).status_code == 409
    )
    client.weights_bucket(encode_bucket([(name, weights[name])]))
    client.weights_commit(1)
    client.generate(REQUEST)


def test_bad_buckets(client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]) -> None:
    name, tensor = "transformer.proj_out.weight", weights["transformer.proj_out.weight"]
    with pytest.raises(ReplicaError, match="no weight push is open"):
        client.weights_bucket(encode_bucket([(name, tensor)]))
    client.weights_begin(1, folder_manifest(tiny_model, ("transformer",), dtype="float32"))
    cases = [
        (bytes(encode_bucket([("transformer.unknown", tensor)])), "transformer.unknown"),
        (bytes(encode_bucket([(name, tensor[:-1])])), "proj_out.weight comes as"),
        (bytes(encode_bucket([(name, tensor.bfloat16())])), "bfloat16"),
        (bytes(encode_bucket([(name, tensor)]))[:-10], "not a whole safetensors file"),
        (b"", "not a whole safetensors file"),
        (save({"a": torch.zeros(1, dtype=torch.int64)}), "a is I64"),
    ]
    for body, message in cases:
        response = httpx.post(f"{client.url}/rl/weights/bucket", content=body)
        assert response.status_code == 400 and message in response.json()["error"], response.text


def test_bad_requests_are_refused_and_the_replica_lives_on(client: ReplicaClient) -> None:
    (good,) = requests_to_json([REQUEST])
    bad_sampling = [
        {"height": 65},
        {"width": 10**6},
        {"sde_type": "x"},
        {"sde_window_range": [0, 6]},
        {"height": "64"},
    ]
    bodies = [
        json.dumps([good | {"sampling": good["sampling"] | changes}]) for changes in bad_sampling
    ]
    bad_values = ({"sample_indices": list(range(1025))}, {"seed": None}, {"x": 1})
    bodies += [json.dumps([good | changes]) for changes in bad_values]
    bodies += [
        json.dumps([good | {"prompt": good["prompt"] | {"text": text}}])
        for text in ("x" * 2001, "\ud800")
    ]
    bodies += [json.dumps(good), "", "{", "[]", "[1]", "null", "\x00", "[" * 100_000]
    for body in bodies:
        response = httpx.post(f"{client.url}/rl/generate", content=body.encode())
        assert 400 <= response.status_code < 500 and response.json()["error"], (
            body[:80],
            response.text,
        )
    with pytest.raises(
        ReplicaError, match="too long"
    ) as error:  # more tokens than the text encoder takes
        client.generate(replace(REQUEST, prompt=replace(PROMPT, text="🐱" * 2000)))
    assert error.value.status == 400
    client.generate(replace(REQUEST, prompt=replace(PROMPT, text="猫 🐱 émoji " + "x" * 300)))


def test_a_replica_asleep_holds_no_weights_until_a_push_brings_all(
    client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    push(client, weights, version=3, model=tiny_model)
    before = client.generate(REQUEST)
    client.sleep()
    assert client.health()["state"] == "asleep"
    for refused in (client.sleep, lambda: client.generate(REQUEST)):
        with pytest.raises(ReplicaError, match="asleep and holds no weights; push all of them"):
            refused()
    response = httpx.post(
        f"{client.url}/v1/images/generations", json={"prompt": "a cat", "size": "64x64"}
    )
    assert response.status_code == 409 and "asleep" in response.text
    spec = LoraSpec(rank=3, alpha=5.0, modules=linears(weights))
    with pytest.raises(ReplicaError, match="leaves out transformer.*push everything"):
        client.weights_begin(
            4,
            lora_manifest(spec, folder_manifest(tiny_model, ("transformer",), dtype="float32")),
            lora=spec,
        )
    held = push(client, weights, version=4, model=tiny_model)
    assert held == {name: fingerprint(tensor) for name, tensor in weights.items()}
    after = client.generate(REQUEST)
    assert torch.equal(before.latents_GSLC, after.latents_GSLC)


def test_lora_outlives_sleep_and_gives_way_to_a_push_without(
    client: ReplicaClient, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    bound_lora_serves_and_sleeps(client, tiny_model, weights, version=5)
    push(client, weights, version=8, model=tiny_model)
    whole = {name: fingerprint(tensor) for name, tensor in weights.items()}
    assert push(client, weights, version=9, model=tiny_model) == whole


def test_health_and_a_plain_image_with_guidance(client: ReplicaClient) -> None:
    health = client.health()
    assert (health["name"], health["state"], health["in_flight"]) == ("replica-7", "ready", 0)
    models = httpx.get(f"{client.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["replica-7"]
    guided = image(client, true_cfg_scale=4.0, negative_prompt="bad")
    assert guided[:4] == b"\x89PNG" and guided != image(client)
