"""The records that flow through a step. Frozen, keyword-only, complete per stage.

Shape letters
  G   samples of a group
  P   prompts (groups)
  N   samples of this data-parallel rank
  T   inference steps
  W   stochastic steps of the window
  K   of those, the steps that are trained
  S   states around them, W + 1
  L   latent tokens
  C   latent channels
  B   rows of a microbatch
  R   rows of a batch: N · K of a TrainBatch, N of a FlowBatch
  FHWC   frames, height, width, colours: of pixels only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]  # of a tensor
Shapes = Mapping[str, Shape]  # by the tensors' names
Figures = dict[str, float]  # by their names, most of them keys of metrics
ImageSize = tuple[int, int]  # height and width in pixels
JsonObject = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompt source.

    id: 16 hex digits, a hash of (text, negative_text) and of how the row names its images. It is
    the same in every run and layout.
    images: the files of the images that the model is given. They are read where requests are made.
    fields: the row's other columns (JSON values), read by rewards.
    """

    text: str
    id: str
    negative_text: str = " "
    images: tuple[str, ...] = ()
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Say which modules of each trained component have LoRA: y = W x + (alpha / rank) · B (A x).

    modules: full diffusers module names, sorted, without the component
    (`transformer_blocks.0.attn.to_q`). A is the tensor `<component>.<module>.lora_A.weight`
    [rank, in], B is `<component>.<module>.lora_B.weight` [out, rank].
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The whole groups of one data-parallel rank for one step.

    repeats: for each group, how many groups of the same prompt come before it in the step, counted
    over all ranks.
    """

    prompts: tuple[Prompt, ...]
    repeats: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which samples are drawn. All but images are equal for all groups of a step.

    height, width: pixels. The other fields are as in the config's rollout section.
    images: (height, width) of each image that the request brings, as the VAE encodes it. In the
    settings of a run an image of the sample's own size stands for those of the data.
    guidance_scale_2: for the second component (Wan2.2's low-noise expert); 0 takes guidance_scale.
    sde_window_size: 0 makes every step an ODE step.
    sde_window_range: [low, high) in step indices.
    same_noise: a group's samples begin with one noise, and differ from the window's first step on.
    ode_solver: of steps after the window, and of all steps without one; those before it are Euler.
    """

    height: int
    width: int
    num_frames: int = 1
    images: tuple[ImageSize, ...] = ()

    num_inference_steps: int
    true_cfg_scale: float = 1.0
    guidance_scale: float = 1.0
    guidance_scale_2: float = 0.0

    sde_type: str = "flow_sde"
    eta: float = 0.7
    sde_window_size: int = 2
    sde_window_range: tuple[int, int] = (0, 5)
    same_noise: bool = False
    ode_solver: str = "euler"

    # Of the states as they are stored: log_probs are taken from these.
    latents_dtype: str = "float32"

    @property
    def size_text(self) -> str:
        """Write WIDTHxHEIGHT, of a video xFRAMES as well."""
        size = f"{self.width}x{self.height}"
        return f"{size}x{self.num_frames}" if self.num_frames > 1 else size


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One prompt group to be sampled.

    (seed, step, prompt.id, sample index, SDE step) is the identity of all its noise. With
    sampling.same_noise all samples have the initial noise of the first one.
    images: RGB, height · width · 3 bytes row by row, each of its size in sampling.images. They are
    in no identity, so prompts of equal text and other images need other ids.
    policy_version: the version that the replica must hold; None takes any.
    """

    prompt: Prompt
    sampling: Sampling
    sample_indices: tuple[int, ...]
    seed: int
    step: int
    images: tuple[bytes, ...] = ()
    policy_version: int | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The samples of one prompt as columns, row g of each being sample_indices[g].

    sample_indices: with the prompt's id, the identity of each sample.
    window_start: index in the schedule of the window's first step, T without a window.
    latents_GSLC: the states around the window's steps, in the declared storage dtype.
    log_probs_GW: float64, means over L · C.
    pixels_GFHWC: uint8, F = 1 for images.
    schedule: [T+1] float32 sigmas, 1 falling to 0.
    conditioning: name → [1, tokens, …], e.g. prompt_embeds [1, tokens, D], prompt_mask [1, tokens]
    bool, negative_* under guidance, and image_latents [1, tokens, C] float32, clean, where images
    are given.
    policy_version: the weights that sampled it. replica: the name of who sampled it.
    """

    prompt: Prompt
    sampling: Sampling
    sample_indices: tuple[int, ...]
    window_start: int
    latents_GSLC: Tensor
    # float64: ratios lie within 1 ± 1e-5, where float32's rounding would count.
    log_probs_GW: Tensor
    pixels_GFHWC: Tensor
    schedule: Tensor
    conditioning: Mapping[str, Tensor]
    policy_version: int
    replica: str

    @property
    def num_forwards(self) -> int:
        """Return how many velocities the replica computed, each of one sample and step."""
        num_samples = len(self.sample_indices)
        # samples of one noise are one state up to the window's first step, that one included
        num_shared = self.window_start + 1 if self.sampling.same_noise else 0
        return num_samples * self.sampling.num_inference_steps - (num_samples - 1) * num_shared

    @property
    def middle_frames_GHWC(self) -> Tensor:
        """Return the middle frame of each video, of an image itself."""
        return self.pixels_GFHWC[:, self.pixels_GFHWC.shape[1] // 2]


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Samples of this data-parallel rank, ready for `Engine.update`.

    Each row is a sample, in all tensors whose shape letters begin with N.

    latents_NSLC: the states around the window's steps.
    old_log_probs_NW: float64, of the policy that the ratio compares with. None takes those of the
    forward that trains, which is right while the policy is still that one.
    rollout_log_probs_NW: float64, of the replicas that drew the samples; they weigh the policy
    gradient. None where they are the old ones.
    window_start_N, group_index_N: int64. The latter is the sample's row of the conditioning.
    trained_steps_NK: int64, the steps of the window that are rows; all of them, or a part.
    advantages_N, weights_N: float32. A weight of 0 keeps a sample's row without its gradient.
    conditioning: name → [P, …], or a list of P where lengths differ without a mask.
    images_P: each group's Sampling.images; () where there are none.
    schedule: [T+1] float32. sampling: height, width, guidance, SDE.
    velocities_NKLC: of other policies than the trained one, by what Algorithm.needs calls them.
    denominator: global number of weighted rows; the loss sum is divided by it.
    """

    latents_NSLC: Tensor
    old_log_probs_NW: Tensor | None
    window_start_N: Tensor
    trained_steps_NK: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    group_index_N: Tensor
    conditioning: Mapping[str, Tensor | Sequence[Tensor]]
    schedule: Tensor
    sampling: Sampling
    denominator: float
    velocities_NKLC: Mapping[str, Tensor] = field(default_factory=dict)
    images_P: tuple[tuple[ImageSize, ...], ...] = ()
    rollout_log_probs_NW: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return self.latents_NSLC.shape[0]

    @property
    def num_window_steps(self) -> int:
        return self.latents_NSLC.shape[1] - 1

    @property
    def num_rows(self) -> int:
        """The number of trained (sample, window step) pairs."""
        return self.trained_steps_NK.numel()


@dataclass(frozen=True, kw_only=True)
class FlowBatch:
    """Clean samples of this data-parallel rank and the noise drawn for them, for flow matching.

    Each row is a draw of noise for a sample, so N counts a sample once for each of its draws.

    latents_NLC: clean, float32. noise_NLC: standard normal, float32. sigma_N: float32 in (0, 1].
    advantages_N: float32, 1 for given images. velocities_NLC: as TrainBatch.velocities_NKLC.
    denominator: global number of weighted rows. The other fields are as in TrainBatch.
    """

    latents_NLC: Tensor
    noise_NLC: Tensor
    sigma_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    group_index_N: Tensor
    conditioning: Mapping[str, Tensor | Sequence[Tensor]]
    sampling: Sampling
    denominator: float
    velocities_NLC: Mapping[str, Tensor] = field(default_factory=dict)
    images_P: tuple[tuple[ImageSize, ...], ...] = ()

    @property
    def num_rows(self) -> int:
        return self.latents_NLC.shape[0]


@dataclass(frozen=True, kw_only=True)
class MatchInputs:
    """The arguments of a matching loss for B draws of noise; float32. A loss is a sum over rows.

    velocity_BLC: the policy's at sigma_B, with gradient. target_BLC: noise − clean latents.
    velocities: other policies' there, [B, L, C] each, by what Algorithm.needs calls them.
    """

    velocity_BLC: Tensor
    target_BLC: Tensor
    sigma_B: Tensor
    advantage_B: Tensor
    weight_B: Tensor
    velocities: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The arguments of a loss for B (sample, window step) pairs. A loss is a sum over rows.

    float32, log_probs float64.
    latents_BLC: the state at sigma_B. prev_sample_BLC: the stored, less noisy one at sigma_next_B.
    velocity_BLC: the policy's, with gradient. velocities: as in MatchInputs.
    schedule: [T+1]. old_log_prob_B, rollout_log_prob_B: or None, as in TrainBatch.
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
    velocities: Mapping[str, Tensor] = field(default_factory=dict)
    rollout_log_prob_B: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A loss over a microbatch. The engine divides all sums by the batch's global denominator.

    loss_sum: weighted sum, a scalar with gradient.
    sums: metric name → weighted sum, a detached scalar. The loss is among them under its own name
    (`loss/policy`).
    """

    loss_sum: Tensor
    sums: Mapping[str, Tensor]


@dataclass
class Progress:
    """The state of a run beside its weights. The only mutable record.

    step: finished steps. prompts: the sampler's position, and in which prompts.
    recomputes: whether old log_probs are the trainer's.
    skipped: batches that were stepped over (optim.skip_nonfinite).
    base: path and fingerprint of the model folder whose weights the run needs beside the
    checkpoint's, under LoRA or as KL reference; empty where it needs none.
    """

    step: int = 0
    prompts: dict[str, int | str] = field(default_factory=dict)
    recomputes: bool = False
    skipped: int = 0
    base: dict[str, str] = field(default_factory=dict)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Two computations of one log_prob may differ by this much. Beyond it they compute different things.
LOG_PROB_ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3, "fp8": 5e-2}
