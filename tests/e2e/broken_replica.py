"""`megadiff serve`, with a contract broken on purpose; the fault is read from a file at each use.

Faults of what a push brings or a group records: none, nudge, round, shift, noise, skip, flip.
Faults of the policy's forward: first_row, unmasked, swapped, timestep, unguided, call_norm.
"""

import sys
from pathlib import Path

import torch

from megadiff.cli.serve import main
from megadiff.models import batch_sampler
from megadiff.models.qwen_image import adapter as qwen_adapter
from megadiff.models.qwen_image import pipeline as qwen_rollout

FAULT_FILE = Path(sys.argv.pop(1))


def fault() -> str:
    return FAULT_FILE.read_text().strip()


def _round_latents(result):
    """round: the replica stores its latents in bfloat16 after it has taken log_prob from the
    float32 ones. nudge: its log_probs are off by as much as other kernels may round.
    """

    def broken(self, pixels):
        if fault() == "round":
            self._states_NSLC = self._states_NSLC.bfloat16().float()
        if fault() == "nudge":
            self._log_probs_NW += 4e-6
        return result(self, pixels)

    return broken


def _shift_schedule(sigmas):
    def broken(num_steps, **arguments):
        schedule = sigmas(num_steps, **arguments)
        if fault() == "shift":
            schedule[1:-1] *= 1.001
        return schedule

    return broken


def _shift_noise(initial_latents_rows):
    """Another random stream: log_probs agree all the same."""

    def broken(shape, keys):
        prefix = "1" if fault() == "noise" else ""  # the seed comes first
        return initial_latents_rows(shape, [f"{prefix}{key}" for key in keys])

    return broken


def _spoil_texts(spread):
    """first_row: all rows of a call have the first one's text length. unmasked: padding counts.
    swapped: the texts of the last two groups are exchanged. What is recorded stays right."""

    def broken(sampler, context, side, index_P):
        changed = spread(sampler, context, side, index_P)
        embeds = f"{side}prompt_embeds"
        mask = f"{side}prompt_embeds_mask"
        if changed[mask] is None:
            return changed
        if fault() == "first_row":
            changed[mask] = changed[mask][:1].expand_as(changed[mask])
        elif fault() == "unmasked":
            changed[mask] = None
        elif fault() == "swapped":
            count = len(sampler.requests)
            if count < 2:
                return changed
            order_P = torch.tensor([*range(count - 2), count - 1, count - 2])
            order_N = sampler.per_row(order_P) * (len(changed[mask]) // count)
            order_N += torch.arange(len(order_N)) % (len(order_N) // count)
            changed[embeds] = changed[embeds][order_N]
            changed[mask] = changed[mask][order_N]
        return changed

    return broken


def _cast_timestep(model_sigma):
    """timestep: sigma passes through bfloat16 on its way to the transformer."""

    def broken(self, latents, dtype):
        sigma = model_sigma(self, latents, dtype)
        return sigma.bfloat16().to(dtype) if fault() == "timestep" else sigma

    return broken


def _spoil_guidance(combine, normalize):
    """unguided: the negative branch is dropped.

    call_norm: the norm is taken over the whole call.
    """

    def broken_combine(self, positive, negative, *arguments, **options):
        if fault() == "unguided":
            return positive[0] if isinstance(positive, tuple) else positive
        return combine(self, positive, negative, *arguments, **options)

    def broken_normalize(self, noise_pred, comb_pred):
        if fault() == "call_norm":
            return comb_pred * (noise_pred.norm() / comb_pred.norm())
        return normalize(self, noise_pred, comb_pred)

    return broken_combine, broken_normalize


def _damage_bucket(load_weights):
    """One tensor of each push is skipped, or loaded with one bit flipped, and nobody is told."""

    def damaged(weights):
        for name, tensor in weights:
            if name != "transformer.proj_out.weight":
                yield name, tensor
            elif fault() != "skip":
                yield name, _flip(tensor) if fault() == "flip" else tensor

    return lambda self, weights: load_weights(self, damaged(weights))


def _flip(tensor):
    tensor = tensor.clone()
    tensor.view(torch.int32).view(-1)[17] ^= 1
    return tensor


if __name__ == "__main__":
    batch_sampler.BatchSampler.result = _round_latents(batch_sampler.BatchSampler.result)
    batch_sampler.initial_latents_rows = _shift_noise(batch_sampler.initial_latents_rows)
    qwen_adapter.qwen_image_sigmas = _shift_schedule(qwen_adapter.qwen_image_sigmas)
    pipeline = qwen_rollout.QwenImageRolloutPipeline
    pipeline.load_weights = _damage_bucket(pipeline.load_weights)
    qwen_rollout._spread = _spoil_texts(qwen_rollout._spread)
    pipeline.combine_cfg_noise, pipeline.cfg_normalize_function = _spoil_guidance(
        pipeline.combine_cfg_noise, pipeline.cfg_normalize_function
    )
    batch_sampler.BatchSampler.model_sigma = _cast_timestep(batch_sampler.BatchSampler.model_sigma)
    sys.exit(main(sys.argv[1:]))
