"""A group's log_probs, recomputed from its record with stock diffusers."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from megadiff.diffusion.guidance import true_cfg
from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys
from megadiff.diffusion.sde import SdeStep, log_prob, ode_step, step_mean
from megadiff.models.adapter import ModelAdapter
from megadiff.types import RolloutGroup, RolloutRequest


def float32_transformer(model: Path) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel.from_pretrained(
        model / "transformer", torch_dtype=torch.float32
    )


def recomputed_log_probs(transformer: nn.Module, group: RolloutGroup) -> Tensor:
    """[N, W] log_probs of the recorded steps. transformer: of diffusers."""
    sampling, grid = group.sampling, (1, group.sampling.height // 16, group.sampling.width // 16)
    latents_NSLC = group.latents_GSLC
    num_samples, num_states, *_ = latents_NSLC.shape
    sigmas = group.schedule[group.window_start :][:num_states]

    def velocity(prefix: str, latents_NLC: Tensor, sigma: Tensor) -> Tensor:
        return transformer(
            hidden_states=latents_NLC.to(transformer.dtype),
            timestep=sigma.expand(num_samples),
            encoder_hidden_states=group.conditioning[f"{prefix}prompt_embeds"].expand(
                num_samples, -1, -1
            ),
            encoder_hidden_states_mask=group.conditioning[f"{prefix}prompt_mask"].expand(
                num_samples, -1
            ),
            img_shapes=[[grid]] * num_samples,
            return_dict=False,
        )[0]

    columns = []
    for index in range(len(sigmas) - 1):
        latents_NLC, prev_sample_NLC = latents_NSLC[:, index], latents_NSLC[:, index + 1]
        with torch.no_grad():
            guided = velocity("", latents_NLC, sigmas[index])
            if sampling.true_cfg_scale > 1:
                guided = true_cfg(
                    guided,
                    velocity("negative_", latents_NLC, sigmas[index]),
                    sampling.true_cfg_scale,
                )
        sigma_N, sigma_next_N = (
            sigmas[index].expand(num_samples),
            sigmas[index + 1].expand(num_samples),
        )
        step = SdeStep(sampling, group.schedule, sigma_N, sigma_next_N)
        mean_NLC = step_mean(step, latents_NLC, guided)
        columns.append(log_prob(step, prev_sample_NLC, mean_NLC))
    return torch.stack(columns, dim=1)


def gap(model: Path, group: RolloutGroup, transformer: nn.Module | None = None) -> float:
    """The largest. transformer: in place of the folder's in float32."""
    recomputed_GW = recomputed_log_probs(transformer or float32_transformer(model), group)
    return (recomputed_GW - group.log_probs_GW).abs().max().item()


@torch.no_grad()
def trajectory_gap(
    adapter: ModelAdapter, transformer: nn.Module, request: RolloutRequest, group: RolloutGroup
) -> float:
    """The largest of the clean latents, drawn again from the noise on by the trainer's module.

    request: with sde_type "ode", whose group has the clean latents alone.
    """
    keys = sample_keys(
        group_key(seed=request.seed, step=request.step, prompt_id=request.prompt.id),
        request.sample_indices,
    )
    latents_NLC = initial_latents_rows(adapter.latents_shape(request.sampling), keys)
    conditioning = {
        name: tensor.expand(len(keys), *tensor.shape[1:])
        for name, tensor in group.conditioning.items()
    }
    schedule = adapter.schedule(request.sampling)
    for sigma, sigma_next in pairwise(schedule):
        velocity_NLC = adapter.velocity(
            transformer, latents_NLC, sigma.expand(len(keys)), conditioning, request.sampling
        )
        latents_NLC = ode_step(latents_NLC, velocity_NLC, sigma, sigma_next)
    return (latents_NLC - group.latents_GSLC[:, -1]).abs().max().item()


@torch.no_grad()
def adapter_gap(adapter: ModelAdapter, transformer: nn.Module, group: RolloutGroup) -> float:
    """The largest, by the adapter of any family. transformer: diffusers', in float32."""
    num_samples, num_states, *_ = group.latents_GSLC.shape
    sigmas = group.schedule[group.window_start :][:num_states]
    conditioning = {
        name: tensor.expand(num_samples, *tensor.shape[1:])
        for name, tensor in group.conditioning.items()
    }
    gaps = []
    for index in range(num_states - 1):
        sigma_N, sigma_next_N = sigmas[index : index + 2, None].expand(2, num_samples)
        latents_NLC, prev_sample_NLC = group.latents_GSLC[:, index : index + 2].unbind(1)
        velocity_NLC = adapter.velocity(
            transformer, latents_NLC, sigma_N, conditioning, group.sampling
        )
        step = SdeStep(group.sampling, group.schedule, sigma_N, sigma_next_N)
        found_N = log_prob(step, prev_sample_NLC, step_mean(step, latents_NLC, velocity_NLC))
        gaps.append((found_N - group.log_probs_GW[:, index]).abs().max().item())
    return max(gaps)
