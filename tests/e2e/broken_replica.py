"""`megadiff serve`, with a contract broken on purpose; the fault is read from a file at each use.

Faults of what a push brings or a group records: none, nudge, round, shift, noise, skip, flip.
Faults of the policy's forward: first_row, unmasked, swapped, timestep, thousand, unguided,
call_norm; where they apply short, once, stock_scale, sign, one_call, pooled, latents, positions,
no_pictures, no_references, other_references, no_mask, same_time.
"""

import sys
from pathlib import Path

import torch
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from megadiff.cli.serve import main
from megadiff.diffusion.guidance import plain_cfg
from megadiff.models import batch_sampler, guided_family, image_family, pipeline_base
from megadiff.models.bagel import adapter as bagel_adapter
from megadiff.models.bagel import pipeline as bagel_pipeline
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.qwen_image import adapter as qwen_adapter
from megadiff.models.qwen_image_edit import pipeline as edit_pipeline
from megadiff.models.sd3 import adapter as sd3_adapter
from megadiff.models.wan22 import image_to_video
from megadiff.models.z_image import adapter as z_image_adapter
from megadiff.models.z_image import pipeline as z_image_pipeline

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
        if fault() == "short":  # N points are N − 1 steps, and one from 0 to 0
            schedule = torch.cat([sigmas(num_steps - 1, **arguments), schedule[-1:]])
        return schedule

    return broken


def _shift_noise(initial_latents_rows):
    """Another random stream: log_probs agree all the same."""

    def broken(shape, keys):
        prefix = "1" if fault() == "noise" else ""  # the seed comes first
        return initial_latents_rows(shape, [f"{prefix}{key}" for key in keys])

    return broken


def _spoil_texts(denoise):
    """first_row: all rows of a call have the first one's text length. unmasked: padding counts.
    swapped: the texts of the last two groups are exchanged. pooled: the pooled vector is dropped.
    no_references: the given images are dropped. other_references: their latents are reversed.
    What is recorded stays right.

    Of any family: tensors of conditioning are exchanged or their masks changed by name."""

    def broken(self, sampler, conditioning, latents_NLC):
        changed = dict(conditioning)
        count = len(sampler.requests)
        for name, value_N in conditioning.items():
            if name.endswith("_mask") and fault() == "first_row":
                changed[name] = value_N[:1].expand_as(value_N)
            elif name.endswith("_mask") and fault() == "unmasked":
                changed[name] = torch.ones_like(value_N)
            elif "pooled" in name and fault() == "pooled":
                changed[name] = torch.zeros_like(value_N)
            elif name == IMAGE_LATENTS and fault() == "no_references":
                changed[name] = torch.zeros_like(value_N)
            elif name == IMAGE_LATENTS and fault() == "other_references":
                changed[name] = value_N.flip(1)
            elif fault() == "swapped" and count > 1:
                order_P = torch.tensor([*range(count - 2), count - 1, count - 2])
                order_N = sampler.per_row(order_P) * (len(value_N) // count)
                order_N += torch.arange(len(order_N)) % (len(order_N) // count)
                changed[name] = value_N[order_N]
        return denoise(self, sampler, changed, latents_NLC)

    return broken


def _spoil_positions(velocity):
    """positions: every row's image stands behind the longest text of the call."""

    def broken(self, hidden_states, timestep, context_ids, prompt_mask, position_ids):
        if fault() != "positions":
            return velocity(self, hidden_states, timestep, context_ids, prompt_mask, position_ids)
        longest = int(prompt_mask.sum(dim=1).max())
        language_model = self.language_model.forward

        def moved(*args, packed_query_position_ids, **kwargs):
            positions = torch.full_like(packed_query_position_ids, longest)
            return language_model(*args, packed_query_position_ids=positions, **kwargs)

        self.language_model.forward = moved
        try:
            return velocity(self, hidden_states, timestep, context_ids, prompt_mask, position_ids)
        finally:
            del self.language_model.forward

    return broken


def _drop_pictures(encode):
    """no_pictures: the text encoder sees grey in place of each given image."""

    def broken(self, texts, images=()):
        if fault() == "no_pictures":
            images = [tuple(torch.full_like(each, 128) for each in row) for row in images]
        return encode(self, texts, images)

    return broken


def _one_time(transformer_call):
    """same_time: the given images are modulated at the drawn one's time."""

    def broken(self, component):
        for module in self.transformer.modules():
            if getattr(module, "zero_cond_t", False) or hasattr(module, "has_own_time"):
                module.has_own_time = True
                module.zero_cond_t = fault() != "same_time"
        return transformer_call(self, component)

    return broken


def _without_mask(model_input):
    """no_mask: the channels that mark the given frame are 0."""

    def broken(self, *args):
        video_BCFHW, timestep = model_input(self, *args)
        if fault() == "no_mask":
            video_BCFHW[:, self.channels : self.channels + 4] = 0
        return video_BCFHW, timestep

    return broken


def _clamped(clamped_cfg):
    """unguided, call_norm: as _spoil_guidance, of BAGEL's own function."""

    def broken(positive_BLC, negative_BLC, scale):
        if fault() == "unguided":
            return positive_BLC
        if fault() == "call_norm":
            whole = positive_BLC[None].flatten(1, 2), negative_BLC[None].flatten(1, 2)
            return clamped_cfg(*whole, scale).view_as(positive_BLC)
        return clamped_cfg(positive_BLC, negative_BLC, scale)

    return broken


def _cast_timestep(sigma_rows):
    """timestep: sigma passes through bfloat16 on its way to the transformer. thousand: times 1000,
    as other families have it.
    """

    def broken(self, num_rows):
        sigma_B = sigma_rows(self, num_rows)
        if fault() == "thousand":
            return 1000 * sigma_B
        return sigma_B.bfloat16().float() if fault() == "timestep" else sigma_B

    return broken


def _spoil_guidance(guide):
    """unguided: the negative branch is dropped.

    call_norm: the norm is taken over the whole call. stock_scale: the scale counts from 0.
    """

    def broken(self, positive_BLC, negative_BLC, scale, sigma_B):
        if fault() == "unguided":
            return positive_BLC
        if fault() == "call_norm":
            combined_BLC = plain_cfg(positive_BLC, negative_BLC, scale)
            return combined_BLC * (positive_BLC.norm() / combined_BLC.norm())
        if fault() == "stock_scale":
            scale += 1
        return guide(self, positive_BLC, negative_BLC, scale, sigma_B)

    return broken


def _spoil_sign(one_pass):
    """sign: the model's output is taken as it is."""

    def broken(self, *args):
        velocity_BCHW = one_pass(self, *args)
        return -velocity_BCHW if fault() == "sign" else velocity_BCHW

    return broken


def _cast_latents(packed_pass):
    """latents: they pass through bfloat16 on their way to the transformer."""

    def broken(self, transformer, latents_BLC, *args):
        if fault() == "latents":
            latents_BLC = latents_BLC.bfloat16().to(latents_BLC.dtype)
        return packed_pass(self, transformer, latents_BLC, *args)

    return broken


def _shift_once(last_sigma):
    """once: the schedule's end is not shifted before the schedule is."""

    def broken(self, num_steps):
        return 1e-3 if fault() == "once" else last_sigma(self, num_steps)

    return broken


def _in_one_call(by_filled_length):
    """one_call: as vllm-omni's own pipeline, which has no mask and one table of positions."""

    def broken(forward, *, x, t, cap_feats, **kwargs):
        if fault() == "one_call":
            return forward(x, t, cap_feats)[:1]
        return by_filled_length(forward, x=x, t=t, cap_feats=cap_feats, **kwargs)

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
    batch_sampler.BatchSampler.result = _round_latents(batch_sampler.BatchSampler.result)
    batch_sampler.initial_latents_rows = _shift_noise(batch_sampler.initial_latents_rows)
    qwen_adapter.qwen_image_sigmas = _shift_schedule(qwen_adapter.qwen_image_sigmas)
    pipeline = pipeline_base.RolloutPipelineMixin
    pipeline._denoise = _spoil_texts(pipeline._denoise)
    stock = QwenImagePipeline
    stock.load_weights = _damage_bucket(stock.load_weights)
    adapter = qwen_adapter.QwenImageAdapter
    adapter.guide = _spoil_guidance(adapter.guide)
    batch_sampler.BatchSampler.sigma_rows = _cast_timestep(batch_sampler.BatchSampler.sigma_rows)
    guided_family.static_sigmas = _shift_schedule(guided_family.static_sigmas)
    guided = guided_family.GuidedFamily
    guided.guide = _spoil_guidance(guided.guide)
    image = image_family.ImageFamily
    image.packed_pass = _cast_latents(image.packed_pass)
    sd3 = sd3_adapter.SD3Adapter
    sd3.last_sigma = _shift_once(sd3.last_sigma)
    bagel_adapter.clamped_cfg = _clamped(bagel_adapter.clamped_cfg)
    bagel = bagel_pipeline.BagelRolloutPipeline
    bagel._velocity = _spoil_positions(bagel._velocity)
    from_image = image_to_video.WanImageToVideoAdapter
    from_image.model_input = _without_mask(from_image.model_input)
    edit = edit_pipeline.QwenImageEditRolloutPipeline
    edit.encode = _drop_pictures(edit.encode)
    edit.transformer_call = _one_time(edit.transformer_call)
    z_image = z_image_adapter.ZImageAdapter
    z_image.one_pass = _spoil_sign(z_image.one_pass)
    z_image_pipeline.by_filled_length = _in_one_call(z_image_pipeline.by_filled_length)
    sys.exit(main(sys.argv[1:]))
