"""The records that flow through a step. Frozen, keyword-only, complete per stage.

Shape letters: G samples of a group, P prompts (groups), N samples of this data-parallel rank, W stochastic steps of
the window, T inference steps, L latent tokens, C latent channels, B a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompt source.

    text: what the model is asked for. id: 16 hex digits, a hash of (text, negative_text) and of how the row names its
    image, so that it is the same in every run and layout. image: the file that is the video's first frame, "" without one;
    it is read where requests are made. fields: the row's other columns (JSON values), read by rewards.
    """

    text: str
    id: str
    negative_text: str = " "
    image: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """A low-rank adapter of each trained component: y = W x + (alpha / rank) · B (A x) in each module of `modules`.

    modules: full diffusers module names, sorted, without the component (`transformer_blocks.0.attn.to_q`). A is the
    tensor `<component>.<module>.lora_A.weight` [rank, in], B `<component>.<module>.lora_B.weight` [out, rank].
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The whole groups of one data-parallel rank for one step. repeats: how many groups of the step, over all ranks, have the
    same prompt and come before."""

    prompts: tuple[Prompt, ...]
    repeats: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How samples are drawn; equal for all groups of a run. height, width in pixels; sde_window_range is [low, high)
    in step indices; the other fields are as in the config's rollout section. window_size 0 means a pure ODE rollout.
    first_frame: it is given by the request; what is drawn, recorded and trained are the other frames' latents.
    guidance_scale_2: of a model's second component (Wan2.2's low-noise expert); 0: guidance_scale."""

    height: int
    width: int
    num_frames: int = 1
    first_frame: bool = False
    num_inference_steps: int
    true_cfg_scale: float = 1.0
    guidance_scale: float = 1.0
    guidance_scale_2: float = 0.0
    sde_type: str = "flow_sde"
    eta: float = 0.7
    sde_window_size: int = 2
    sde_window_range: tuple[int, int] = (0, 5)
    latents_dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One prompt group to be sampled. (seed, step, prompt.id, sample index, SDE step) is the identity of all its noise.

    first_frame: RGB, height · width · 3 bytes row by row, where the sampling has one; else empty. It is in no identity, so
    prompts of equal text with other images need other ids. policy_version: the version the replica must hold, or None to
    take any.
    """

    prompt: Prompt
    sampling: Sampling
    sample_indices: tuple[int, ...]
    seed: int
    step: int
    first_frame: bytes = b""
    policy_version: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample: its stochastic window and its pixels.

    latents_SLC: [W+1, L, C] in the declared storage dtype, the states before, between and after the window's steps.
    sigmas: [W+1] float32. timesteps: [W] float32, 1000·sigma. log_probs: [W] float64, mean over L·C.
    window_start: index of the window's first step in the schedule. pixels: [F, H, W, 3] uint8, F = 1 for an image.
    prompt_id, sample_index: its identity. policy_version: weights that sampled it.
    """

    latents_SLC: Tensor
    sigmas: Tensor
    timesteps: Tensor
    log_probs: Tensor
    window_start: int
    pixels: Tensor
    prompt_id: str
    sample_index: int
    policy_version: int


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The samples of one prompt, with what they share.

    schedule: [T+1] float32 sigmas, 1 falling to 0. conditioning: name → tensor with a leading axis of 1, e.g.
    prompt_embeds [1, tokens, D], prompt_mask [1, tokens] bool, negative_* when guidance is on, and first_frame
    [1, tokens, C] float32, the clean latents of a given first frame.
    replica: name of the replica that sampled it.
    """

    prompt: Prompt
    sampling: Sampling
    schedule: Tensor
    conditioning: Mapping[str, Tensor]
    trajectories: tuple[Trajectory, ...]
    policy_version: int
    replica: str


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Samples of this data-parallel rank, ready for `Engine.update`.

    latents_NSLC: [N, W+1, L, C]. old_log_probs_NW: float64, of the policy that updates are relative to; None: those of the
    forward that trains, right while the policy is still that one. window_start_N: int64. advantages_N, weights_N: float32; a
    weight of 0 keeps a sample's place without its gradient. conditioning: name → [P, …], row group_index_N[n] belongs to
    sample n. ref_means_NWLC: the reference policy's step means, only with a KL term. rollout_log_probs_NW: float64, of the
    replicas that drew the samples, by which the policy gradient is weighed; None where they are the old ones. sampling:
    height, width, guidance, SDE.
    schedule: [T+1] float32. denominator: global number of weighted (sample, step) pairs that the loss sum is divided by.
    """

    latents_NSLC: Tensor
    old_log_probs_NW: Tensor | None
    window_start_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    group_index_N: Tensor
    conditioning: Mapping[str, Tensor]
    schedule: Tensor
    sampling: Sampling
    denominator: float
    ref_means_NWLC: Tensor | None = None
    rollout_log_probs_NW: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return self.latents_NSLC.shape[0]

    @property
    def num_window_steps(self) -> int:
        return self.latents_NSLC.shape[1] - 1

    @property
    def num_rows(self) -> int:
        """(sample, window step) pairs."""
        return self.num_samples * self.num_window_steps


@dataclass(frozen=True, kw_only=True)
class FlowBatch:
    """Clean samples of this data-parallel rank with the noise drawn for them: what flow matching trains on.

    latents_NLC: clean, noise_NLC: standard normal, both float32. sigma_N: float32 in (0, 1]. weights_N, conditioning,
    group_index_N, sampling and denominator (global weighted samples) as in TrainBatch.
    """

    latents_NLC: Tensor
    noise_NLC: Tensor
    sigma_N: Tensor
    weights_N: Tensor
    group_index_N: Tensor
    conditioning: Mapping[str, Tensor]
    sampling: Sampling
    denominator: float

    @property
    def num_rows(self) -> int:
        return self.latents_NLC.shape[0]


@dataclass(frozen=True, kw_only=True)
class FlowInputs:
    """What a flow-matching loss sees of B samples; float32. velocity_BLC: the policy's at sigma_B, with gradient.
    target_BLC: noise − clean latents."""

    velocity_BLC: Tensor
    target_BLC: Tensor
    sigma_B: Tensor
    weight_B: Tensor


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What a loss sees of B (sample, window step) pairs; float32, log_probs float64. A loss is a sum over rows.

    latents_BLC, prev_sample_BLC: the state at sigma_B and the stored, less noisy one at sigma_next_B.
    velocity_BLC: the policy's, with gradient. schedule: [T+1]. ref_mean_BLC: the reference policy's mean or None.
    old_log_prob_B, rollout_log_prob_B: or None, as in TrainBatch.
    """

    latents_BLC: Tensor
    prev_sample_BLC: Tensor
    velocity_BLC: Tensor
    sigma_B: Tensor
    sigma_next_B: Tensor
    old_log_prob_B: Tensor | None
    advantage_B: Tensor
    weight_B: Tensor
    schedule: Tensor
    sampling: Sampling
    ref_mean_BLC: Tensor | None = None
    rollout_log_prob_B: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """loss_sum: weighted sum over the microbatch (a scalar with gradient). sums: metric name → detached scalar, the
    weighted sum over the microbatch, the loss under its own name among them (`loss/policy`); the engine divides all by
    the batch's global denominator."""

    loss_sum: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """log_probs_NW: float64. means_NWLC: float32 means of p(prev_sample | latents)."""

    log_probs_NW: Tensor
    means_NWLC: Tensor


@dataclass
class Progress:
    """Where a run stands; the only mutable record.

    step: finished steps. prompts: the sampler's position, and of which prompts. recomputes: whether
    old log_probs are the trainer's. skipped: batches that were stepped over (optim.skip_nonfinite).
    base: path and fingerprint of the model folder whose weights
    the run needs beside the checkpoint's, under LoRA or as KL reference; empty where it needs none.
    """

    step: int = 0
    prompts: dict[str, int | str] = field(default_factory=dict)
    recomputes: bool = False
    skipped: int = 0
    base: dict[str, str] = field(default_factory=dict)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How far two computations of one log_prob may be apart; beyond, they compute different things.
LOG_PROB_ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3, "fp8": 5e-2}
