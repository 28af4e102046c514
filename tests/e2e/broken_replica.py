"""`megadiff serve`, with a contract broken on purpose; the fault is read from a file at each use.

Faults: none, nudge, round, shift, noise, skip, flip.
"""

import sys
from pathlib import Path

import torch

from megadiff.cli.serve import main
from megadiff.models import rollout_base
from megadiff.models.qwen_image import rollout as qwen_rollout

FAULT_FILE = Path(sys.argv.pop(1))


def fault() -> str:
    return FAULT_FILE.read_text().strip()


def _round_latents(result):
    """round: the replica stores its latents in bfloat16 after it has taken log_prob from the float32 ones.
    nudge: its log_probs are off by as much as other kernels may round."""

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

    def broken(shape, identities):
        shift = 1 if fault() == "noise" else 0
        return initial_latents_rows(shape, [identity | {"seed": identity["seed"] + shift} for identity in identities])

    return broken


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
    rollout_base.BatchSampler.result = _round_latents(rollout_base.BatchSampler.result)
    rollout_base.initial_latents_rows = _shift_noise(rollout_base.initial_latents_rows)
    qwen_rollout.qwen_image_sigmas = _shift_schedule(qwen_rollout.qwen_image_sigmas)
    pipeline = qwen_rollout.QwenImageRolloutPipeline
    pipeline.load_weights = _damage_bucket(pipeline.load_weights)
    sys.exit(main(sys.argv[1:]))
