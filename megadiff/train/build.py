"""Build the parts of a run from its config, which check() has passed."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.checkpoint.base_weights import base_weights
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.checkpoint.retention import remove_leftovers
from megadiff.config.load import to_dict
from megadiff.config.schema import Config
from megadiff.data.flow import FlowBatches
from megadiff.data.images import ImageSource
from megadiff.data.latents import encode_dataset
from megadiff.data.sampler import PromptSampler
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.device_memory import DeviceMemory
from megadiff.observe.evaluation import evaluation_folder, write_evaluation
from megadiff.observe.events import Events
from megadiff.observe.power import power_meter
from megadiff.observe.profile import StepProfile
from megadiff.observe.progress import ProgressBar
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import Trackers, build_trackers, has_figures
from megadiff.parallel.collectives import agreed, broadcast_json, read_once
from megadiff.parallel.mesh import Mesh
from megadiff.process.garbage import FirstRounds
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.processes import ReplicaProcess
from megadiff.train.batch_files import SavedSamples
from megadiff.train.batches import BatchSource
from megadiff.train.board import FOLDER, Board
from megadiff.train.build_sync import build_sync
from megadiff.train.check import eval_prompts
from megadiff.train.connect import connect
from megadiff.train.evaluate import eval_metrics, evaluate, spread
from megadiff.train.judges import Judges, launch_judges
from megadiff.train.loop import Run
from megadiff.train.record import Recorder, used_bytes
from megadiff.train.replica_traces import traced_replicas
from megadiff.train.replicas import launch
from megadiff.train.rescue import Rescue
from megadiff.train.resumed import record_config, tell_begin
from megadiff.train.rows import rows_per_group
from megadiff.train.run import RunParts, run_folder
from megadiff.train.run_replicas import RunReplicas
from megadiff.train.sampling import open_rewards, sampling_of, sft_sampling
from megadiff.train.sft import SftRun
from megadiff.types import DTYPES, Progress, Prompt

logger = logging.getLogger(__name__)
Evaluate = Callable[[int], dict[str, float]]  # a step → its eval/* metrics; collective
COMPILING_STEPS = 2  # of a process; later ones compile little or nothing
ENCODE_BATCH_TOKENS = 16_384  # a pass of the VAE: 1,024 images of 64×64, 16 of 512×512


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
    events = Events(run_folder(config), node=mesh.node)
    # Servers load while the engine does, and stop whatever happens from here on.
    judges = launch_judges(config, mesh, run_folder(config), stack)
    processes = launch(config, mesh, adapter, run_folder(config), stack)
    start_s = time.monotonic()
    engine = build_engine(config, mesh, adapter)
    stack.callback(engine.close)
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

    saved = SavedSamples()
    checkpoints, progress = resume(engine, sampler, partial(saved.load, config=config, mesh=mesh))
    replicas = build_replicas(engine, processes, judges, events, stack)
    judges.wait()
    open_rewards(scorer, judges.urls, sampling_of(config.rollout), mesh=mesh)
    # The next step samples from the weights that were evaluated, and replicas stay awake for it.
    # After an average it pushes under the same version: on disk a part may not replace a whole
    # one, so replicas that sleep start from nothing again.
    rest_after = config.algorithm.ema_decay > 0 or config.algorithm.lagging_decay > 0
    timers = Timers()
    batches = BatchSource(engine, replicas, scorer, sampler, timers=timers, report=events.write)
    batches.restore(progress.step, saved.samples)
    checkpoints.beside = batches
    evaluation = build_evaluation(
        engine, replicas, scorer, rest_after=rest_after, settle=batches.settle
    )
    parts = build_parts(engine, checkpoints, progress, evaluation, events, stack, timers=timers)
    if processes:  # the node's, which end with this rank
        parts.recorder.profile.beside = partial(traced_replicas, replicas.fleet)
    return Run(**vars(parts), replicas=replicas, prompts=sampler, batches=batches)


def build_sft_run(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    source: ImageSource,
    scorer: Scorer | None,
    stack: ExitStack,
) -> SftRun:
    """Build a supervised run. Collective. What it starts is stopped when `stack` closes."""
    events = Events(run_folder(config), node=mesh.node)
    # Servers start while data are encoded and the engine loads.
    if config.eval.every:
        judges = launch_judges(config, mesh, run_folder(config), stack)
        processes = launch(config, mesh, adapter, run_folder(config), stack)

    sampling = sft_sampling(config.rollout)
    num_tokens, _ = adapter.latents_shape(sampling)
    dataset = encode_dataset(
        source,
        adapter,
        folder=Path(config.run.dir) / "cache",  # of all runs: images are encoded once
        height=sampling.height,
        width=sampling.width,
        max_chars=config.data.max_prompt_chars,
        dtype=DTYPES[config.model.dtype],
        device=mesh.device,
        mesh=mesh,
        batch=max(1, ENCODE_BATCH_TOKENS // num_tokens),
    )

    # after that: VAE and text encoder need the memory that the engine takes
    engine = build_engine(config, mesh, adapter)
    stack.callback(engine.close)
    algorithm = build_algorithm(config.algorithm)
    batches = FlowBatches(
        dataset,
        items_per_step=config.train.prompts_per_step,
        draws_per_item=rows_per_group(config, algorithm) // source.images_per_item,
        caption_drop=config.algorithm.caption_drop,
        sampling=sampling,
        shift=partial(adapter.shift, sampling=sampling),
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        seed=config.seed,
        shuffle=config.data.shuffle,
        source=source.name,
        images_per_item=source.images_per_item,
    )
    stack.callback(batches.close)

    checkpoints, progress = resume(engine, batches)
    evaluation = None
    if config.eval.every:
        replicas = build_replicas(engine, processes, judges, events, stack)
        assert scorer, "validate() refuses an evaluation without a reward"
        judges.wait()
        open_rewards(scorer, judges.urls, sampling_of(config.rollout), mesh=mesh)
        evaluation = build_evaluation(engine, replicas, scorer, rest_after=True)
        replicas.rest()

    parts = build_parts(engine, checkpoints, progress, evaluation, events, stack, timers=Timers())
    return SftRun(**vars(parts), batches=batches)


def resume(
    engine: Engine,
    data: PromptSampler | FlowBatches,
    load_beside: Callable[[Path], None] = lambda folder: None,
) -> tuple[Checkpoints, Progress]:
    """Continue engine and data from the newest checkpoint, where there is one. Collective."""
    config = engine.config
    base = base_weights(config, engine.adapter, engine.mesh)
    checkpoints = Checkpoints(run_folder(config), config, engine.mesh, base=base)
    if engine.mesh.rank == 0:
        # Before a rescue can begin: it would take files of an earlier one for its own.
        remove_leftovers(checkpoints.folder)
    load_data = partial(data.load_state, accept_changes=config.checkpoint.accept_changes)
    return checkpoints, checkpoints.load(engine, load_data, load_beside)


def build_parts(
    engine: Engine,
    checkpoints: Checkpoints,
    progress: Progress,
    evaluation: Evaluate | None,
    events: Events,
    stack: ExitStack,
    *,
    timers: Timers,
) -> RunParts:
    """Build what records and rescues the run from where `progress` is. Collective.

    timers: of the loop's stages.
    """
    recorder = _build_recorder(engine, evaluation, progress.step, stack, timers)
    events.step = progress.step + 1
    if engine.mesh.rank == 0:
        resumed_from = checkpoints.resumed_from
        tell_begin(engine.config, resumed_from, step=progress.step, events=events)
    return RunParts(
        engine=engine,
        algorithm=build_algorithm(engine.config.algorithm),
        checkpoints=checkpoints,
        recorder=recorder,
        rescue=_build_rescue(engine, checkpoints, recorder, progress, events),
        progress=progress,
        compiling=FirstRounds(COMPILING_STEPS if engine.config.engine.compile else 0),
        events=events,
    )


def build_replicas(
    engine: Engine,
    processes: Sequence[ReplicaProcess],
    judges: Judges,
    events: Events,
    stack: ExitStack,
) -> RunReplicas:
    """Wait for the run's replicas and make the sync to them. Collective.

    Raises AgreedError for replicas that end, differ from the run, or that no transport can serve.
    """
    config = engine.config
    connection = connect(
        config, engine.mesh, run_folder(config), processes, stack, report=events.write
    )
    samples_lagging = build_algorithm(config.algorithm).samples_lagging
    replicas = RunReplicas(
        connection,
        config,
        engine.mesh,
        judges,
        build_sync=partial(build_sync, engine),
        sampled_policy=engine.lagging if samples_lagging else nullcontext,
        offload=engine.offload,
        report=events.write,
    )

    return stack.enter_context(closing(replicas))


def _build_rescue(
    engine: Engine,
    checkpoints: Checkpoints,
    recorder: Recorder,
    progress: Progress,
    events: Events,
) -> Rescue:
    """Lay out what the ranks tell each other by. Collective; it does not listen yet."""
    mesh = engine.mesh
    attempt = broadcast_json(secrets.token_hex(4), source=0, group=mesh.cpu_group)
    folder = run_folder(engine.config) / f"{FOLDER}{attempt}"
    # each attempt has a folder of its own: ranks left over from another write elsewhere
    board = Board(folder, rank=mesh.rank, world_size=mesh.world_size)
    agreed(board.lay_out, mesh.cpu_group, here=mesh.rank == 0)

    return Rescue(
        engine,
        checkpoints,
        board,
        progress,
        recorded=lambda: recorder.recorded_step,
        events=events,
    )


def _build_recorder(
    engine: Engine, evaluation: Evaluate | None, step: int, stack: ExitStack, timers: Timers
) -> Recorder:
    """Return what records the run from step `step` on. Collective.

    Rank 0 writes the run's folder, the others nowhere. All watch their GPU's memory.
    """
    config = engine.config
    mesh = engine.mesh
    folder = run_folder(config)
    group = mesh.cpu_group
    # First: trackers begin their files.
    is_new = read_once(lambda: not has_figures(folder), source=0, group=group, world=group)
    recording = agreed(
        lambda: _recording(config, step, stack, is_new=is_new), group, here=mesh.rank == 0
    )
    trackers, bar = recording if recording else (Trackers(()), None)
    memory = None
    if mesh.device.type == "cuda":
        memory = stack.enter_context(DeviceMemory(timers, partial(used_bytes, mesh.device)))
    profile = StepProfile(
        folder,
        config.observe.profile_steps,
        timers=timers,
        rank=mesh.rank,
        device_type=mesh.device.type,
    )

    return Recorder(
        trackers=trackers,
        progress_bar=bar,
        config=config,
        mesh=mesh,
        evaluate=evaluation,
        timers=timers,
        profile=profile,
        memory=memory,
        power=power_meter(mesh.device),
        is_new_folder=is_new,
    )


def _recording(
    config: Config, step: int, stack: ExitStack, *, is_new: bool
) -> tuple[Trackers, ProgressBar]:
    folder = run_folder(config)
    record_config(config, folder, step=step)
    # In a new folder the checkpoint's own step is still to be logged: its evaluation.
    logged_step = max(0, step - 1) if is_new else step
    trackers = build_trackers(config.track, folder, to_dict(config), resume_step=logged_step)
    bar = ProgressBar(config.train.num_steps, start_step=step)
    return stack.enter_context(trackers), stack.enter_context(bar)


def build_evaluation(
    engine: Engine,
    replicas: RunReplicas,
    scorer: Scorer,
    *,
    rest_after: bool,
    settle: Callable[[], None] = lambda: None,
) -> Evaluate | None:
    """Return what evaluates the weights after a step, None where eval.every is 0.

    Where there is a running average of the weights, that is evaluated. The record is in the run's
    evaluations/. rest_after: whether the trainer needs the GPUs as soon as that is written.
    settle: waits for samples in flight, which the replicas draw with other weights. Collective.
    """
    config = engine.config
    mesh = engine.mesh
    if not config.eval.every:
        return None
    plan = spread(eval_prompts(config, engine.adapter), config.eval.num_samples)
    folder = run_folder(config)

    def evaluate_step(step: int) -> dict[str, float]:
        settle()
        # only while it is sent: the policy is back in the engine when samples are drawn
        with engine.averaged():
            replicas.wake(step)

        outcome = evaluate(
            replicas.fleet,
            # replicas that come back in the middle get the same weights as the others had
            partial(replicas.finish, weights=engine.averaged),
            scorer,
            plan,
            config,
            adapter=engine.adapter,
            policy_version=step,
            mesh=mesh,
            model=str(folder),
        )

        target = evaluation_folder(folder, step)
        frames_per_s = engine.adapter.frames_per_s
        agreed(
            lambda: write_evaluation(
                target, outcome.evaluation, outcome.images, frames_per_s=frames_per_s
            ),
            mesh.cpu_group,
            here=mesh.rank == 0,
        )

        if rest_after:
            replicas.rest()
        return eval_metrics(outcome.evaluation)

    return evaluate_step
