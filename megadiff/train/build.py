"""Build the parts of a run from its config.

What the user can get wrong is found before anything heavy starts.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.checkpoint.checkpoints import Checkpoints, base_weights
from megadiff.config.load import save_config, to_dict
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.data.images import ImageSource, open_images
from megadiff.data.prompts import load_prompts
from megadiff.data.sampler import PromptSampler
from megadiff.diffusion.schedule import check_window
from megadiff.engines import build_engine
from megadiff.engines.base import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.observe.device_memory import DeviceMemory
from megadiff.observe.evaluation import evaluation_folder, write_evaluation
from megadiff.observe.progress import ProgressBar
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import Trackers, build_trackers, check_trackers
from megadiff.parallel.collectives import agreed, broadcast_json, gather_json
from megadiff.parallel.mesh import Layout, Mesh, check_heads, resolve_layout
from megadiff.process.identity import device_name, host_name
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import ReplicaProcess, stop_all
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.choose import build_transport
from megadiff.tensors.boxes import boxes_from_json
from megadiff.tensors.manifest import folder_manifest
from megadiff.train.board import FOLDER, Board
from megadiff.train.components import check_components
from megadiff.train.evaluate import eval_metrics, eval_sampling, evaluate, groups_in_a_call, spread
from megadiff.train.loop import Run
from megadiff.train.probe import own_size
from megadiff.train.record import Recorder, used_bytes
from megadiff.train.replicas import (
    RunReplicas,
    check_placement,
    connect,
    launch,
    weights_folder,
)
from megadiff.train.rescue import Rescue
from megadiff.train.sampling import check_call, first_frame_size, sampling_of
from megadiff.types import Progress, Prompt, Sampling

logger = logging.getLogger(__name__)


def check(
    config: Config, *, world_size: int, stack: ExitStack
) -> tuple[Layout, ModelAdapter, list[Prompt] | ImageSource, Scorer | None]:
    """Check all that needs neither a process group nor a GPU. Raises ValueError (ConfigError).

    The third value is what the run trains on: prompts, or for supervised training captioned images.
    The scorer, None without rewards, has them constructed once for the run. `stack` closes it.
    """
    parallel = config.parallel
    layout = resolve_layout(
        dp=parallel.dp,
        sp=parallel.sp,
        tp=parallel.tp,
        dp_replicate=parallel.dp_replicate,
        world_size=world_size,
    )
    validate(config, dp=layout.dp)
    check_trackers(config.track)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (resume and Path(resume).is_dir()):
        raise ValueError(
            f"checkpoint.resume={resume} is no folder; give a checkpoint's, auto or never"
        )
    check_placement(config, world_size=world_size)
    sampling = sampling_of(config.rollout)
    on_policy = build_algorithm(config.algorithm).on_policy
    if on_policy:
        check_window(
            sampling.num_inference_steps,
            window_size=sampling.sde_window_size,
            window_range=sampling.sde_window_range,
        )
    model = Path(config.model.path)
    try:
        check_model_folder(model)
    except ValueError as error:
        raise ValueError(f"model.path={config.model.path}: {error}") from error
    adapter = build_adapter(model)
    adapter.validate(sampling)
    if config.model.float32_streams:
        adapter.check_float32_streams()
    for warning in check_components(config, adapter, on_policy=on_policy):
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s", warning)
    check_heads(adapter.num_heads, sp=layout.sp, tp=layout.tp)
    if adapter.num_heads % config.rollout.tp:
        raise ValueError(
            f"rollout.tp={config.rollout.tp} does not divide the model's {adapter.num_heads} "
            f"attention heads; set rollout.tp to a divisor of {adapter.num_heads}"
        )
    prompts = read_prompts(config, config.data.prompts) if on_policy else []
    asked = [*prompts, *eval_prompts(config)]
    adapter.check_prompts(asked)
    scorer = None
    if config.reward:
        scorer = stack.enter_context(closing(Scorer(config.reward)))
        scorer.validate(asked)
    _check_calls(config, sampling, dp=layout.dp, on_policy=on_policy)
    if not on_policy:
        return layout, adapter, open_images(config.data.images, seed=config.seed), scorer
    return layout, adapter, prompts, scorer


def _check_calls(config: Config, sampling: Sampling, *, dp: int, on_policy: bool) -> None:
    """Raise ValueError where a call would bring more first frames than a replica takes."""
    batch_size = config.rollout.batch_size
    rank_groups = config.train.prompts_per_step // dp
    if on_policy:
        call_groups = min(rank_groups, batch_size // config.algorithm.group_size)
        check_call(sampling, call_groups, what="a step")
    if on_policy and config.parity.mode != "off":
        check_call(sampling, min(rank_groups, own_size(config)[0]), what="the parity gate")
    plan = spread(eval_prompts(config), config.eval.num_samples) if config.eval.every else []
    for rank in range(min(dp, len(plan))):
        most = groups_in_a_call(plan[rank::dp], eval_sampling(config), batch_size=batch_size)
        check_call(sampling, most, what="an evaluation")


def read_prompts(config: Config, path: str) -> list[Prompt]:
    """Load prompts by the config's limits and, where it asks for first frames, their size."""
    size = first_frame_size(sampling_of(config.rollout))
    return load_prompts(path, max_chars=config.data.max_prompt_chars, first_frame_size=size)


def eval_prompts(config: Config) -> list[Prompt]:
    """Return the prompts of eval.prompts, none where eval.every is 0.

    Raises ValueError when eval.num_samples cannot cover their tasks.
    """
    if not config.eval.every:
        return []
    prompts = read_prompts(config, config.eval.prompts)
    spread(prompts, config.eval.num_samples)
    return prompts


def run_folder(config: Config) -> Path:
    """Return runs/<name>."""
    return Path(config.run.dir) / config.run.name


def collective_timeout_s(config: Config) -> float:
    """Return how long a rank may wait for the others."""
    # For the slowest rank's rollout, or for replicas that start.
    return max(config.rollout.start_timeout_s, config.rollout.request_timeout_s) + 600


def build_run(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    prompts: list[Prompt],
    scorer: Scorer,
    stack: ExitStack,
) -> Run:
    """Build an RL run. Collective. What it starts is stopped when `stack` closes."""
    folder = run_folder(config)
    processes = launch(config, mesh, folder)  # they load while the engine does
    stack.callback(stop_all, processes)
    start_s = time.monotonic()
    engine = build_engine(config, mesh, adapter)
    logger.info("engine %s loaded after %.1f s", config.engine.backend, time.monotonic() - start_s)
    sampler = PromptSampler(
        prompts,
        prompts_per_step=config.train.prompts_per_step,
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        seed=config.seed,
        shuffle=config.data.shuffle,
        source=config.data.prompts,
    )
    checkpoints = Checkpoints(folder, config, mesh, base=base_weights(config, adapter, mesh))
    load_data = partial(sampler.load_state, accept_changes=config.checkpoint.accept_changes)
    progress = checkpoints.load(engine, load_data)
    replicas = build_replicas(config, mesh, adapter, engine, processes, stack)
    evaluation = None
    if config.eval.every:
        # The next step samples from the version that was evaluated.
        evaluation = build_evaluation(
            config, mesh, adapter, engine, replicas, scorer, rest_after=False
        )
    recorder = build_recorder(config, mesh, evaluation, progress.step, stack)
    return Run(
        config=config,
        mesh=mesh,
        adapter=adapter,
        algorithm=build_algorithm(config.algorithm),
        engine=engine,
        replicas=replicas,
        scorer=scorer,
        prompts=sampler,
        checkpoints=checkpoints,
        recorder=recorder,
        rescue=build_rescue(folder, mesh, engine, checkpoints, recorder, progress),
        progress=progress,
    )


def build_replicas(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    engine: Engine,
    processes: Sequence[ReplicaProcess],
    stack: ExitStack,
) -> RunReplicas:
    """Wait for the run's replicas and make the sync to them. Collective.

    Raises AgreedError for replicas that end, differ from the run, or that no transport can serve.
    """
    fleet = stack.enter_context(connect(config, mesh, run_folder(config), processes))
    sync = stack.enter_context(closing(build_sync(config, mesh, adapter, engine, fleet)))
    return RunReplicas(fleet, sync, config, mesh)


def build_rescue(
    folder: Path,
    mesh: Mesh,
    engine: Engine,
    checkpoints: Checkpoints,
    recorder: Recorder,
    progress: Progress,
) -> Rescue:
    """Lay out what the ranks tell each other by. Collective; it does not listen yet."""
    attempt = broadcast_json(secrets.token_hex(4), source=0, group=mesh.cpu_group)
    board = Board(folder / f"{FOLDER}{attempt}", rank=mesh.rank, world_size=mesh.world_size)
    agreed(board.lay_out, mesh.cpu_group, here=mesh.rank == 0)
    recorded = recorder.recorded_step if mesh.rank == 0 else None
    return Rescue(engine, checkpoints, board, progress, recorded=recorded)


def build_sync(
    config: Config, mesh: Mesh, adapter: ModelAdapter, engine: Engine, fleet: Fleet
) -> WeightSync:
    """Return the weight sync from this engine to all replicas. Collective.

    Raises AgreedError for devices that the transport cannot serve.
    """
    manifest = folder_manifest(adapter.model_folder, adapter.components, dtype=config.model.dtype)
    targets = fleet.weight_targets()
    first_workers = agreed(
        lambda: {target.name: target.weights_places() for target in targets},
        mesh.cpu_group,
        here=mesh.rank == 0,
    )
    workers = broadcast_json(first_workers, source=0, group=mesh.cpu_group)
    ranks = gather_json({"host": host_name(), "device": device_name(mesh.device)}, mesh.cpu_group)
    transport = agreed(
        lambda: build_transport(
            config.sync.transport,
            targets,
            workers,
            ranks=ranks,
            rank=mesh.rank,
            device=mesh.device,
            folder=weights_folder(config, run_folder(config)),
        ),
        mesh.cpu_group,
    )
    boxes = {}
    for name, replica_workers in workers.items():
        boxes[name] = [boxes_from_json(worker["boxes"]) for worker in replica_workers]
    return WeightSync(
        engine,
        transport,
        manifest,
        boxes=boxes,
        bucket_bytes=config.sync.bucket_mib * 2**20,
        cpu_group=mesh.cpu_group,
    )


def build_recorder(
    config: Config,
    mesh: Mesh,
    evaluation: Callable[[int], dict[str, float]] | None,
    step: int,
    stack: ExitStack,
) -> Recorder:
    """Return what records the run from step `step` on. Collective.

    Rank 0 writes the run's folder, the others nowhere. All watch their GPU's memory.
    """
    recording = agreed(
        lambda: _recording(config, run_folder(config), step, stack),
        mesh.cpu_group,
        here=mesh.rank == 0,
    )
    trackers, bar = recording if recording else (Trackers(()), None)
    timers = Timers()
    memory = None
    if mesh.device.type == "cuda":
        memory = stack.enter_context(DeviceMemory(timers, partial(used_bytes, mesh.device)))
    return Recorder(trackers, bar, config, mesh, evaluation, timers=timers, memory=memory)


def _recording(
    config: Config, folder: Path, step: int, stack: ExitStack
) -> tuple[Trackers, ProgressBar]:
    save_config(config, folder / "config.yaml")
    trackers = build_trackers(config.track, folder, to_dict(config), resume_step=step)
    bar = ProgressBar(config.train.num_steps, start_step=step)
    return stack.enter_context(trackers), stack.enter_context(bar)


def build_evaluation(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    engine: Engine,
    replicas: RunReplicas,
    scorer: Scorer,
    *,
    rest_after: bool,
) -> Callable[[int], dict[str, float]]:
    """Return what evaluates the weights after a step: step → eval/* metrics. It is collective.

    Where there is a running average of the weights, that is evaluated. The record is in the run's
    evaluations/. rest_after: whether the trainer needs the GPUs as soon as that is written.
    """
    plan = spread(eval_prompts(config), config.eval.num_samples)
    folder = run_folder(config)

    def evaluate_step(step: int) -> dict[str, float]:
        with engine.averaged():
            replicas.wake(step)
        outcome = evaluate(
            replicas.fleet,
            scorer,
            plan,
            sampling=eval_sampling(config),
            seed=config.seed,
            batch_size=config.rollout.batch_size,
            policy_version=step,
            mesh=mesh,
            model=str(folder),
        )
        target = evaluation_folder(folder, step)
        agreed(
            lambda: write_evaluation(
                target, outcome.evaluation, outcome.images, frames_per_s=adapter.frames_per_s
            ),
            mesh.cpu_group,
            here=mesh.rank == 0,
        )
        if rest_after:
            replicas.rest()
        return eval_metrics(outcome.evaluation, scorer.weights)

    return evaluate_step
