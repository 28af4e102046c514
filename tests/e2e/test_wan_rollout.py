"""Wan's groups as vllm-omni draws them, against stock diffusers: log_probs of both experts, text, pixels, weights."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.models.rollout_base import CONDITIONING_PREFIX
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.packing import unpack
from megadiff.models.wan22.tiny import KINDS, write_tiny_pipeline
from megadiff.weights.fingerprint import fingerprints
from tests.e2e.conftest import ENVIRONMENT
from tests.e2e.wan_sampling import REQUESTS, SAMPLINGS, TEXTS

GROUP_OF_ROW = [place for place, request in enumerate(REQUESTS) for _ in request.sample_indices]
GAP = {"plain": 1e-5, "guided": 1e-4}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """kind → (model folder, folder of what vllm-omni drew)."""
    folders, processes = {}, []
    for kind in KINDS:
        model, out = (tmp_path_factory.mktemp(kind) / name for name in ("model", "out"))
        write_tiny_pipeline(model, kind=kind)
        out.mkdir()
        command = [sys.executable, "-m", "tests.e2e.wan_sampling", str(model), str(out)]
        log = (out / "log").open("wb")
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT))
        folders[kind] = model, out
    for process, (_, out) in zip(processes, folders.values(), strict=True):
        assert process.wait(400) == 0, (out / "log").read_text()[-3000:]
    return folders


@pytest.mark.parametrize("name", GAP)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_diffusers(drawn, kind: str, name: str) -> None:
    model, out = drawn[kind]
    adapter, result = WanAdapter(model), load_file(out / f"{name}.safetensors")
    transformers = _transformers(adapter)
    recomputed_NW, used = _log_probs(adapter, transformers, name, result)
    assert (recomputed_NW - result["log_probs"]).abs().max() <= GAP[name]
    assert used == set(adapter.components)
    if len(transformers) == 2:  # the other expert would be noticed at every step
        swapped = dict(zip(transformers, reversed(transformers.values()), strict=True))
        wrong_NW, _ = _log_probs(adapter, swapped, name, result)
        assert (wrong_NW - result["log_probs"]).abs().max(dim=0).values.min() > 10 * GAP[name]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_encoded_as_by_the_adapter(drawn, kind: str) -> None:
    model, out = drawn[kind]
    conditioning = _conditioning(load_file(out / "guided.safetensors"))
    for side, texts in (("", TEXTS), ("negative_", [request.prompt.negative_text for request in REQUESTS])):
        embeds_PTD, mask_PT = WanAdapter(model).encode_prompt(texts)
        assert torch.equal(conditioning[f"{side}prompt_mask"], mask_PT)
        assert (conditioning[f"{side}prompt_embeds"] - embeds_PTD).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_pixels_are_the_decoded_latents(drawn, kind: str) -> None:
    model, out = drawn[kind]
    result, adapter = load_file(out / "ode.safetensors"), WanAdapter(model)
    vae = AutoencoderKLWan.from_pretrained(model / "vae")
    mean, std = (torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    latents = unpack(result["latents"][:, 0], adapter.checkpoint.grid(SAMPLINGS["ode"]))
    frames = ((vae.decode(latents * std + mean).sample.clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 4, 1)
    assert result["pixels"].shape == (len(GROUP_OF_ROW), 5, 64, 96, 3)
    assert (frames - result["pixels"].float()).abs().max() <= 0.51  # rounded
    assert result["pixels"].float().std() > 5


def test_the_held_weights_are_the_files(drawn) -> None:
    """Under diffusers' names, out of what vllm-omni fuses and renames; both experts."""
    model, out = drawn["t2v_a14b"]
    tensors = {
        f"{component}.{name}": tensor
        for component in ("transformer", "transformer_2")
        for name, tensor in load_file(model / component / "diffusion_pytorch_model.safetensors").items()
    }
    assert json.loads((out / "held.json").read_text()) == fingerprints(tensors)


def test_a_text_too_long_is_refused_not_cut(drawn) -> None:
    for _, out in drawn.values():
        assert "the prompt is too long, 602 tokens, the model takes 512" in (out / "refusal.txt").read_text()


def _transformers(adapter: WanAdapter) -> dict[str, WanTransformer3DModel]:
    return {name: WanTransformer3DModel.from_pretrained(adapter.model_folder / name) for name in adapter.components}


def _conditioning(result: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(CONDITIONING_PREFIX): value
        for name, value in result.items()
        if name.startswith(CONDITIONING_PREFIX)
    }


@torch.no_grad()
def _log_probs(
    adapter: WanAdapter, transformers: Mapping[str, WanTransformer3DModel], name: str, result: Mapping[str, Tensor]
) -> tuple[Tensor, set[str]]:
    """([N, W] of the recorded steps, the experts in charge of them)."""
    sampling = SAMPLINGS[name]
    if name == "guided" and len(adapter.components) == 2:
        sampling = dataclasses.replace(sampling, guidance_scale_2=2.0)
    assert torch.equal(result["schedule"], adapter.schedule(sampling))
    conditioning = {key: value[GROUP_OF_ROW] for key, value in _conditioning(result).items()}
    columns, used, num_rows = [], set(), len(GROUP_OF_ROW)
    for offset in range(sampling.sde_window_size):  # the window is all of its range: one start for every group
        step = sampling.sde_window_range[0] + offset
        sigma, sigma_next = result["schedule"][step], result["schedule"][step + 1]
        component = adapter.component_of(float(sigma))
        used.add(component)
        latents_NLC, prev_sample_NLC = result["latents"][:, offset], result["latents"][:, offset + 1]
        sigma_N, sigma_next_N = sigma.expand(num_rows), sigma_next.expand(num_rows)
        velocity_NLC = adapter.velocity(
            transformers[component], latents_NLC, sigma_N, conditioning, sampling, component=component
        )
        shared = {"schedule": result["schedule"], "eta": sampling.eta}
        mean_NLC = sde.step_mean(sampling.sde_type, latents_NLC, velocity_NLC, sigma_N, sigma_next_N, **shared)
        columns.append(sde.log_prob(sampling.sde_type, prev_sample_NLC, mean_NLC, sigma_N, sigma_next_N, **shared))
    return torch.stack(columns, dim=1), used
