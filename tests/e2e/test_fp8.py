"""A replica whose blocks multiply in FP8: its copies follow every push, take the place of what was
pushed and its log_probs are near bfloat16's.
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
