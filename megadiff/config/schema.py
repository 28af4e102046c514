"""Declare every config key: its type, its one default, its bounds and a sentence for the docs.

megadiff/config/validate.py refuses what the bounds exclude, megadiff/config/docs.py prints the
sentences. This file imports neither torch nor anything of megadiff but its config.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from megadiff.config.algorithm import AlgorithmConfig
from megadiff.config.key import key
from megadiff.config.rewards import NAMED_SECTIONS, JudgeConfig, RewardConfig
from megadiff.config.rollout import RolloutConfig

MAX_LORA_RANK = 512  # of vLLM's MaxLoRARanks; ranks between its steps are fine


@dataclass
class RunConfig:
    """Name the run's folder and its device."""

    dir: str = key("runs", "Folders of runs are written into this folder.")
    name: str = key(MISSING, "The run and its folder have this name.")
    device: str = key(
        "auto", "Train on this device; auto prefers cuda.", choices=("auto", "cpu", "cuda")
    )


@dataclass
class ModelConfig:
    """Name the model and the precision of its replicas."""

    path: str = key(MISSING, "The model is in this folder, a diffusers pipeline.")
    family: str = key(
        "", "The model's family is module:Class; by default a registered one recognises it."
    )
    dtype: str = key(
        "bfloat16", "Replicas hold weights in this dtype.", choices=("float32", "bfloat16")
    )
    float32_streams: bool = key(
        False, "Keep the residual streams and velocity of a bfloat16 Qwen-Image in float32."
    )


@dataclass
class DataConfig:
    """Name what to train on: prompts (RL), captioned images (SFT) or pairs (offline DPO)."""

    prompts: str = key(
        "", "RL reads its prompts from this file: a .txt with a prompt a line, .jsonl or .parquet."
    )
    images: str = key(
        "", "SFT reads a folder with metadata.jsonl, a .parquet, a .tar or module:Class."
    )
    pairs: str = key(
        "", "offline_dpo reads chosen and rejected images: metadata.jsonl's folder or a .parquet."
    )
    # A replica takes no longer ones, megadiff/rollout/limits.py.
    max_prompt_chars: int = key(2000, "Longer prompts are refused.", at_least=1, at_most=2000)
    shuffle: bool = key(True, "Draw a new order of the data for every epoch.")


@dataclass
class TrainConfig:
    """Set the number and size of the steps. Batch sizes are global."""

    num_steps: int = key(MISSING, "The run ends after this many steps.", at_least=0)
    prompts_per_step: int = key(
        MISSING,
        "A step has this many prompts (captioned images, pairs) over all ranks.",
        at_least=1,
    )
    updates_per_step: int = key(
        1, "A batch of samples is trained on in this many optimizer steps.", at_least=1
    )
    microbatch_size: int = key(
        8,
        "A rank's forward takes this many rows: a sample at a step or noise level.",
        at_least=1,
    )
    staleness: int = key(
        0,
        "With 1, samples are drawn while the step before trains (rollout.mode=separate).",
        at_least=0,
        at_most=1,
    )
    components: list[str] = key(
        [], "Only these components learn, such as [transformer_2]; empty trains all."
    )
    component_weighting: str = key(
        "share",
        "Components weigh in the loss by their (sample, step) pairs (share), or alike (equal).",
        choices=("share", "equal"),
    )


@dataclass
class EngineConfig:
    """Choose the training engine and what it trades for memory."""

    backend: str = key("veomni", "This engine trains.", choices=("veomni", "megatron"))
    dtype: str = key(
        "bfloat16",
        "Forward and backward are in this dtype, masters in float32.",
        choices=("float32", "bfloat16"),
    )
    activation_memory_budget: float = key(
        0.0, "A block keeps this part of its activations.", at_least=0, at_most=1
    )
    compile: bool = key(
        False, "Compile the blocks, which takes a minute at the first microbatch of each kind."
    )
    fp8: str = key(
        "none",
        "Blocks multiply in FP8, scaled by whole tensors or, with veomni, by rows.",
        choices=("none", "tensorwise", "rowwise"),
    )
    offload: str = key(
        "auto",
        "Optimizer state waits in host memory between updates; auto: where replicas would not fit "
        "beside it, and that of idle components.",
        choices=("auto", "always", "never"),
    )


@dataclass
class LoraConfig:
    """Train low-rank adapters over frozen weights instead of all weights."""

    rank: int = key(
        0, "Train adapters of this rank; 0 trains all weights.", at_least=0, at_most=MAX_LORA_RANK
    )
    alpha: float = key(
        0.0, "The adapters' output is multiplied by alpha / rank; 0 takes the rank.", at_least=0
    )
    targets: list[str] = key(
        [], "Only linears whose names end in these have LoRA, as [to_q, to_out.0]; empty takes all."
    )
    exclude: list[str] = key([], "Linears whose names end in these have none, as [blocks.0.*].")
    start: str = key(
        "", "Start from this LoRA: a folder or file of peft or diffusers, or of `megadiff convert`."
    )
    shared_base: str = key(
        "auto",
        "Trainer and colocated replica hold the frozen base once on a GPU, where they can.",
        choices=("auto", "never"),
    )


@dataclass
class OptimConfig:
    """Set AdamW's constants. Upper bounds are what float32 survives."""

    lr: float = key(MISSING, "AdamW has this learning rate.", above=0, at_most=10)
    component_lr: dict[str, float] = key(
        {}, "A component may have its own, as {transformer_2: 1e-5}.", above=0, at_most=10
    )
    weight_decay: float = key(
        1e-4,
        "Weights of layers decay by this; biases, norms and tables do not.",
        at_least=0,
        at_most=1000,
    )
    # at 1 the bias correction 1 − beta^t divides by 0
    beta1: float = key(0.9, "The first moment decays by this.", at_least=0, below=1)
    beta2: float = key(0.999, "The second moment decays by this.", at_least=0, below=1)
    # a smaller eps is 0 beside float32 gradients, and 0/0 is the first update
    eps: float = key(
        1e-8, "AdamW adds this to the root of the second moment.", at_least=1e-30, at_most=1
    )
    max_grad_norm: float = key(1.0, "The gradient is clipped to this norm.", above=0)
    skip_nonfinite: int = key(
        0, "A run steps over this many batches with a nan or infinite gradient.", at_least=0
    )
    warmup_steps: int = key(
        0, "The learning rate rises linearly over this many optimizer steps.", at_least=0
    )
    schedule: str = key(
        "constant",
        "After the warm-up the rate stays, or falls to 0 over the run's updates of all components.",
        choices=("constant", "cosine", "linear"),
    )


@dataclass
class ParallelConfig:
    """Lay the trainer's ranks out."""

    dp: int = key(0, "Prompts are split over this many ranks; 0 takes what sp and tp leave.")
    dp_replicate: int = key(
        1, "veomni keeps this many copies of the sharded model (HSDP); it divides dp."
    )
    sp: int = key(1, "This many ranks share a sample's tokens (Ulysses).")
    tp: int = key(1, "megatron splits layers over this many ranks.")
    sequence_parallel: bool = key(True, "megatron splits tokens over tp as well.")


@dataclass
class SyncConfig:
    """Choose how weights travel to the replicas."""

    transport: str = key(
        "auto",
        "Weights travel this way; auto takes shm or nccl between GPUs, and http elsewhere.",
        choices=("auto", "http", "shm", "nccl", "disk"),
    )
    bucket_mib: int = key(
        1024, "Two buckets of this many MiB are alive at a time.", at_least=1, at_most=4096
    )
    folder: str = key("", "Transport disk writes here; empty takes weights/ in the run's folder.")


@dataclass
class CheckpointConfig:
    """Say when checkpoints are written, and how a run resumes."""

    every: int = key(
        50, "A checkpoint is written every so many steps; 0 writes only the last.", at_least=0
    )
    every_min: float = key(
        0.0,
        "A checkpoint is also due when the last is this many minutes old; 0 is off.",
        at_least=0,
    )
    keep: int = key(2, "This many checkpoints are kept, the newest ones.", at_least=1)
    resume: str = key(
        "auto", "Resume from the newest checkpoint (auto), from none (never), or from this folder."
    )
    accept_changes: bool = key(
        False, "Resume although data or base weights differ from the checkpoint's."
    )


@dataclass
class EvalConfig:
    """Evaluate on held-out prompts and fixed noise."""

    every: int = key(
        0, "Evaluate every so many steps, first and last included; 0 never does.", at_least=0
    )
    prompts: str = key("", "Held-out prompts are in this file.")
    num_samples: int = key(
        0, "All prompts together get this many; 0 is one each.", at_least=0, at_most=10**6
    )
    num_inference_steps: int = key(
        0, "A sample takes this many; 0 takes rollout's number.", at_least=0, at_most=1000
    )


@dataclass
class ParityConfig:
    """Say what happens when trainer and replicas disagree before step 1."""

    mode: str = key(
        "refuse",
        "Where trainer and replicas disagree before step 1: refuse, warn, or do not check (off).",
        choices=("refuse", "warn", "off"),
    )


@dataclass
class ObserveConfig:
    """Say what is looked at more closely than the figures of every step."""

    profile_steps: list[int] = key(
        [],
        "These steps are traced with torch's profiler, into profile/ of the run's folder.",
        at_least=1,
    )


@dataclass
class Config:
    """Set what belongs to no section."""

    seed: int = key(0, "All randomness of a run comes from this number.")
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: dict[str, RewardConfig] = field(default_factory=dict)
    judge: dict[str, JudgeConfig] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    track: list[str] = key(
        ["tensorboard"], "Metrics go to these trackers as well as to metrics.jsonl."
    )
    sample_every: int = key(
        10,
        "Sample images are saved every so many steps, at the first and the last; 0 saves none.",
        at_least=0,
    )


# Section → its class, of a named one that of each name; "" → the keys of no section.
SECTIONS: dict[str, Any] = {"": Config}
# key() declares keys only, so a section has no metadata.
SECTIONS |= {
    section.name: section.default_factory for section in fields(Config) if not section.metadata
}
SECTIONS |= NAMED_SECTIONS
# (section, key) → the key's declaration.
FIELDS = {
    (section, declared.name): declared
    for section, kind in SECTIONS.items()
    for declared in fields(kind)
    if declared.metadata
}
