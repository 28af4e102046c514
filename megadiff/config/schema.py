"""Every config key, with its type and its one default. Imports no torch. What the user must give is MISSING."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class RunConfig:
    dir: str = "runs"
    name: str = MISSING
    device: str = "auto"  # auto | cpu | cuda


@dataclass
class ModelConfig:
    path: str = MISSING  # a diffusers pipeline folder
    dtype: str = "bfloat16"  # of the replicas' weights, and of what is synced
    float32_streams: bool = False  # bfloat16 Qwen-Image: residual streams and velocity in float32


@dataclass
class DataConfig:
    prompts: str = ""  # RL: .txt, .jsonl or .parquet
    images: str = ""  # sft: a folder, .parquet, .tar or module:Class, see docs/sft.md
    max_prompt_chars: int = 2000
    shuffle: bool = True


@dataclass
class TrainConfig:
    num_steps: int = MISSING
    prompts_per_step: int = (
        MISSING  # global (sft: captioned images); × algorithm.group_size samples a step
    )
    updates_per_step: int = 1  # optimizer steps per rollout batch
    microbatch_size: int = 8  # (sample, window step) pairs per forward and rank
    components: list[str] = field(
        default_factory=list
    )  # of the model, e.g. [transformer_2]; empty: all
    expert_balance: str = (
        "share"  # share: an expert's gradient counts by its pairs | equal: each by its own mean
    )


@dataclass
class AlgorithmConfig:
    name: str = "flow_grpo"  # flow_grpo | sft
    group_size: int = 1  # RL: images per prompt; sft: noise draws per image
    clip_range: float = 1e-4
    adv_clip_max: float = 5.0
    kl_coef: float = 0.0
    global_std: bool = True
    old_log_prob: str = (
        "rollout"  # rollout: the replicas' | recompute: the trainer's | auto: by the parity gap
    )
    caption_drop: float = 0.1  # sft: share of captions replaced by the empty one, which CFG needs
    ema_decay: float = 0.0  # sft: of averaged weights, which are evaluated and exported; 0: none


@dataclass
class RolloutConfig:
    height: int = MISSING
    width: int = MISSING
    num_frames: int = 1
    first_frame: bool = (
        False  # image to video: a video's first frame is its prompt's `image`, the others are drawn
    )
    num_inference_steps: int = 10
    true_cfg_scale: float = 1.0
    guidance_scale: float = 1.0
    guidance_scale_2: float = 0.0  # of the second expert; 0: guidance_scale
    sde_type: str = "flow_sde"
    eta: float = 0.7
    sde_window_size: int = 2
    sde_window_range: list[int] = field(default_factory=lambda: [0, 5])
    expert_windows: str = (
        "any"  # any: anywhere in the range | balanced: within one expert's steps, experts by turns
    )
    batch_size: int = 16  # samples per engine call of a replica: whole groups, and at least one
    num_replicas: int = 0  # 0: one per tp GPUs of the trainer, one on CPU
    compile: bool = (
        False  # GPU: torch.compile of the replicas' blocks: a quarter faster, a minute at the start
    )
    fp8: bool = False  # matrix products of the replicas' blocks in FP8; wants compile and algorithm.old_log_prob=auto
    tp: int = 1  # workers (GPUs) of a replica that share its transformer's weights
    mode: str = "colocated"  # colocated | separate
    registry: str = ""  # separate: the folder in which `megadiff serve --registry` announces itself
    sleep: str = "auto"  # auto | always | never: colocated replicas free their weights while the trainer works
    start_timeout_s: float = 600.0
    request_timeout_s: float = 1800.0


@dataclass
class RewardConfig:
    type: str = MISSING
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineConfig:
    backend: str = "veomni"  # veomni | megatron
    dtype: str = "bfloat16"  # of the forward and backward; master weights are float32
    activation_memory_budget: float = (
        0.0  # share of a block's activations that is kept; the rest is computed again
    )
    compile: bool = (
        False  # veomni: torch.compile of the blocks: a minute at the first microbatch of each kind
    )
    fp8: str = (
        "none"  # megatron: none | hybrid, for the blocks' matrix products, by Transformer Engine
    )
    offload_idle: bool = True  # several experts on GPUs: the optimizer state of those that do not work is on the host


@dataclass
class LoraConfig:
    rank: int = 0  # 0: all weights are trained; else low-rank adapters of the plan's lora_targets, over frozen weights
    alpha: float = 0.0  # the adapters' output is multiplied by alpha / rank; 0: alpha = rank


@dataclass
class OptimConfig:
    lr: float = MISSING
    component_lr: dict[str, float] = field(
        default_factory=dict
    )  # component → its own, e.g. {transformer_2: 1e-5}
    weight_decay: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    skip_nonfinite: int = (
        0  # batches with a nan or infinite gradient that a run steps over; one more ends it
    )
    warmup_steps: int = 0  # the learning rate rises linearly over this many optimizer steps


@dataclass
class ParallelConfig:
    dp: int = 0  # 0: what the world leaves
    dp_replicate: int = 1  # HSDP: replicas of the sharded model; dp = dp_replicate × shards
    sp: int = 1  # Ulysses
    tp: int = 1  # megatron
    sequence_parallel: bool = True  # megatron: split tokens over tp as well


@dataclass
class SyncConfig:
    transport: str = "auto"  # http | shm | nccl | disk; auto: between GPUs shm where it can, else nccl; http elsewhere
    bucket_mib: int = 1024  # two of them are alive at a time
    folder: str = (
        ""  # disk: shared by all hosts, of this run alone; empty: weights/ in the run's folder
    )


@dataclass
class CheckpointConfig:
    every: int = 50  # 0: only at the end
    keep: int = 2
    resume: str = "auto"  # auto | never | a checkpoint folder
    accept_changes: bool = False  # resume with other data or another base than it had


@dataclass
class EvalConfig:
    every: int = 0  # also before the first step and after the last; 0: never
    prompts: str = ""
    num_samples: int = (
        0  # over all prompts, the same number for every `task` of theirs; 0: one a prompt
    )
    num_inference_steps: int = 0  # 0: as in rollout


@dataclass
class ParityConfig:
    mode: str = "refuse"  # refuse | warn | off


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: dict[str, RewardConfig] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    track: list[str] = field(default_factory=lambda: ["tensorboard"])
    sample_every: int = 10  # steps between saved sample images
