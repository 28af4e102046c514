"""Declare the config keys of `rollout`: how samples are drawn, and how and where replicas run."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from megadiff.config.key import key

HEARTBEAT_S = 60.0


@dataclass
class RolloutConfig:
    """Say how samples are drawn, and how and where replicas run.

    Upper bounds are those of a replica, megadiff/rollout/limits.py.
    """

    height: int = key(
        MISSING,
        "Samples are this many pixels high.",
        heading="How a sample is drawn",
        at_least=1,
        at_most=4096,
    )
    width: int = key(MISSING, "Samples are this many pixels wide.", at_least=1, at_most=4096)
    num_frames: int = key(
        1, "Samples have this many frames; 1 is an image.", at_least=1, at_most=1024
    )
    images: bool = key(
        False,
        "Each prompt brings an `image` or `images`, to edit or to begin a video with.",
    )
    # The last step is never stochastic, so one alone would leave nothing to learn from.
    num_inference_steps: int = key(
        10, "A sample takes this many denoising steps.", at_least=2, at_most=1000
    )
    true_cfg_scale: float = key(
        1.0, "Qwen-Image is guided by this scale; 1 is no guidance.", at_least=0, at_most=100
    )
    guidance_scale: float = key(
        1.0,
        "All models but Qwen-Image are guided by this scale; 1 is no guidance.",
        at_least=0,
        at_most=100,
    )
    guidance_scale_2: float = key(
        0.0, "Wan's second component has it; 0 takes guidance_scale.", at_least=0, at_most=100
    )
    sde_type: str = key(
        "flow_sde",
        "Stochastic steps are of this kind.",
        choices=("flow_sde", "dance_sde", "flow_cps"),
    )
    # As in Flow-GRPO, arXiv 2505.05470.
    eta: float = key(0.7, "The noise of stochastic steps is scaled by this.", above=0, at_most=100)
    sde_window_size: int = key(
        2,
        "A sample has this many stochastic steps in a row; only these are trained.",
        at_least=0,
    )
    # Early steps decide what is in an image; late ones only its details.
    sde_window_range: list[int] = key(
        [0, 5],
        "Windows lie within [first, second). The last step of all never has noise.",
    )
    # MixGRPO, arXiv 2507.21802, moves it after 25 steps.
    sde_window_moves: int = key(
        0,
        "The window moves on by a step after this many training steps, then begins anew; 0 draws "
        "it at random.",
        at_least=0,
        at_most=1000,
    )
    component_windows: str = key(
        "any",
        "Windows lie anywhere in the range, or (balanced) in one component's steps by turns.",
        choices=("any", "balanced"),
    )
    same_noise: bool = key(
        False, "A group's samples share their initial noise, and the steps before their window."
    )
    # Evaluations are always by Euler, so that runs of other solvers compare.
    ode_solver: str = key(
        "euler",
        "Deterministic steps after the window (without one, all) are of this kind.",
        choices=("euler", "dpm2"),
    )

    batch_size: int = key(
        16,
        "One call of a replica draws this many samples: whole groups, at least one.",
        heading="How a replica runs",
        at_least=1,
        at_most=1024,
    )
    compile: bool = key(
        False, "Compile the replicas' blocks on GPUs, which takes a minute at the start."
    )
    fp8: bool = key(
        False, "Multiply matrices in FP8; this wants compile and algorithm.old_log_prob=auto."
    )
    tp: int = key(1, "This many GPUs share the weights of a replica.", at_least=1, at_most=1024)
    sleep: str = key(
        "auto",
        "Colocated replicas free their weights while the trainer works; auto: if a push has all.",
        choices=("auto", "always", "never"),
    )
    # A 20 B model takes minutes from a network disk.
    start_timeout_s: float = key(
        600.0, "A replica may take this many seconds to start.", above=0, at_most=10**6
    )
    request_timeout_s: float = key(
        1800.0, "An answer of a replica may take this many seconds.", above=0, at_most=10**6
    )

    # A busy replica answers all the same. Its engine counts from the second call of a shape on, as
    # the first may compile.
    heartbeat_s: float = key(
        HEARTBEAT_S,
        "A replica is lost when it, or its engine at work, shows no life for so many seconds.",
        above=0,
        at_most=10**6,
    )
    max_restarts: int = key(
        3,
        "A replica is started again at most so often in a row without a finished step.",
        at_least=0,
        at_most=1000,
    )

    mode: str = key(
        "colocated",
        "Replicas share the trainer's GPUs, or (separate) are started apart from it.",
        heading="Where replicas are",
        choices=("colocated", "separate"),
    )
    num_replicas: int = key(
        0,
        "The run begins with this many; 0 takes one for every tp GPUs, and one on a CPU.",
        at_least=0,
        at_most=1024,
    )
    min_replicas: int = key(
        1,
        "A step waits until this many serve (of each node, where they are colocated).",
        at_least=1,
        at_most=1024,
    )
    stage_config: str = key(
        "",
        "A stage configuration file of vllm-omni says how a replica runs, and whether the model "
        "thinks first; empty takes the family's own.",
    )
    registry: str = key(
        "", "Separate replicas announce themselves in this folder (`megadiff serve --registry`)."
    )
