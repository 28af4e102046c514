"""A replica whose blocks multiply in FP8: its copies follow every push, hold its LoRA, take the
place of what was pushed, and its log_probs are near bfloat16's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.lora_names import lora_manifest
from megadiff.tensors.manifest import folder_manifest
from megadiff.types import LoraSpec
from tests.e2e.pushes import Tensors, folder_weights
from tests.e2e.recompute import gap
from tests.e2e.replica import REQUEST, start
from tests.lora_tensors import expected_prints, linears, merged, push_lora, random_lora


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path, in_place: bool):
    server = start(
        tiny_model, tmp_path, "--fp8", *["--fp8-in-place"] * in_place, "--dtype", "bfloat16"
    )
    yield server.client
    server.end()


def _push(client: ReplicaClient, weights: Tensors, *, version: int, model: Path) -> None:
    client.weights_begin(version, folder_manifest(model, ("transformer",), dtype="bfloat16"))
    client.weights_bucket(encode_bucket(list(weights.items())))
    (worker,) = client.weights_commit(version)
    assert worker["fingerprints"] == {name: fingerprint(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("in_place", [False, True])
def test_the_copies_follow_pushes_and_sleep(
    client: ReplicaClient, tiny_model: Path, in_place: bool
) -> None:
    weights = {
        name: t.bfloat16() for name, t in folder_weights(tiny_model, ("transformer",)).items()
    }
    loaded = client.generate(REQUEST)
    float32 = {
        name: t.float() if t.is_floating_point() else t for name, t in loaded.conditioning.items()
    }
    assert 1e-3 < gap(tiny_model, replace(loaded, conditioning=float32)) < 2e-2
    changed = {
        name: tensor * 1.5 if ".attn.to_q." in name else tensor for name, tensor in weights.items()
    }
    states = []
    for version, pushed in enumerate([weights, changed, weights]):
        _push(client, pushed, version=version, model=tiny_model)
        states.append(client.generate(REQUEST).latents_GSLC)
        client.sleep()
    assert torch.equal(states[0], loaded.latents_GSLC)
    assert torch.equal(states[0], states[2])
    # the only weights that changed are those that FP8 copies
    assert not torch.equal(states[0], states[1])
    _push(client, weights, version=3, model=tiny_model)
    spec = LoraSpec(rank=2, alpha=4.0, modules=("transformer_blocks.0.attn.to_q",))
    base = folder_manifest(tiny_model, ("transformer",), dtype="bfloat16")
    if not in_place:
        client.weights_begin(4, lora_manifest(spec, base), lora=spec)
        return
    with pytest.raises(
        ReplicaError, match="leaves out transformer, which this replica does not hold"
    ):
        client.weights_begin(4, lora_manifest(spec, base), lora=spec)
    assert torch.equal(client.generate(REQUEST).latents_GSLC, states[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_the_copies_hold_the_lora(client: ReplicaClient, tiny_model: Path, in_place: bool) -> None:
    """Two LoRAs, the second without a part of some packed layers, draw what their sums with the
    base draw.
    """
    loaded = folder_weights(tiny_model, ("transformer",))
    # multiples of 1/64, LoRA's products of 1/32: their sums are exact in bfloat16
    weights = _multiples(loaded, 1 / 64)
    modules = linears(weights)
    specs = [LoraSpec(rank=2, alpha=4.0, modules=some) for some in (modules, modules[::2])]
    loras = [_multiples(random_lora(weights, spec), 1 / 8) for spec in specs]

    drawn = []
    for version, (spec, lora) in enumerate(zip(specs, loras, strict=True)):
        _push(client, merged(weights, lora, spec), version=2 * version, model=tiny_model)
        expected = client.generate(REQUEST).latents_GSLC
        answer = push_lora(
            client, weights, lora, spec, version=2 * version + 1, model=tiny_model, dtype="bfloat16"
        )
        assert answer["fingerprints"] == expected_prints(weights, lora, spec)
        drawn.append(client.generate(REQUEST).latents_GSLC)
        assert torch.equal(drawn[-1], expected)
    assert not torch.equal(*drawn)

    _push(client, weights, version=5, model=tiny_model)  # without LoRA
    alone = client.generate(REQUEST).latents_GSLC
    assert not any(torch.equal(alone, other) for other in drawn)
    client.sleep()
    _push(client, weights, version=6, model=tiny_model)
    assert torch.equal(client.generate(REQUEST).latents_GSLC, alone)


@pytest.mark.parametrize("in_place", [False])
def test_the_copies_follow_a_lora_that_travels_alone(
    client: ReplicaClient, tiny_model: Path
) -> None:
    """As in every step: values change under an equal spec. At the end there is no LoRA."""
    loaded = folder_weights(tiny_model, ("transformer",))
    weights = _multiples(loaded, 1 / 64)
    spec = LoraSpec(rank=2, alpha=4.0, modules=linears(weights))
    lora = _multiples(random_lora(weights, spec), 1 / 8)
    half = {name: t / 2 if "lora_B" in name else t for name, t in lora.items()}
    base = folder_manifest(tiny_model, ("transformer",), dtype="bfloat16")

    _push(client, weights, version=0, model=tiny_model)
    alone = client.generate(REQUEST).latents_GSLC
    for version, values in enumerate((lora, half), start=1):
        client.weights_begin(version, lora_manifest(spec, base), lora=spec)
        client.weights_bucket(encode_bucket(list(values.items())))
        client.weights_commit(version)
    drawn = client.generate(REQUEST).latents_GSLC

    client.weights_begin(3, {}, lora=None)
    client.weights_commit(3)
    assert torch.equal(client.generate(REQUEST).latents_GSLC, alone)

    _push(client, merged(weights, half, spec), version=4, model=tiny_model)
    assert torch.equal(client.generate(REQUEST).latents_GSLC, drawn)


def _multiples(tensors: Tensors, unit: float) -> Tensors:
    """Return them in bfloat16, rounded to multiples of a unit, from -1 to 1."""
    return {
        name: ((tensor / unit).round() * unit).clamp(-1, 1).bfloat16()
        for name, tensor in tensors.items()
    }
