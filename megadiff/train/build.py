"""From a config to the parts of a run. What the user can get wrong is found before anything heavy starts."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from megadiff.algorithms import build_algorithm
from megadiff.config.load import save_config, to_dict
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.data.prompts import load_prompts
from megadiff.data.sampler import PromptSampler
from megadiff.diffusion.schedule import check_window
from megadiff.engines import build_engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.observe.progress import ProgressBar
from megadiff.observe.trackers import Trackers, build_trackers
from megadiff.parallel.collectives import broadcast_json, raise_together
from megadiff.parallel.mesh import Layout, Mesh, resolve_layout
from megadiff.rewards.score import Scorer
from megadiff.rollout.client import ReplicaClient
from megadiff.rollout.fleet import Fleet, launch_replicas, registered_replicas, wait_until_healthy
from megadiff.rollout.processes import ReplicaSpec
from megadiff.train.checkpoint import Checkpoints
from megadiff.train.evaluate import evaluate
from megadiff.train.loop import Run
from megadiff.train.record import Recorder
from megadiff.train.rollout import sampling_of
from megadiff.types import Prompt
from megadiff.weights.manifest import folder_manifest
from megadiff.weights.sync import HttpSync

logger = logging.getLogger(__name__)


def check(config: Config, *, world_size: int) -> tuple[Layout, ModelAdapter, list[Prompt]]:
    """Everything that can be refused without a process group or a GPU. Raises ValueError (ConfigError)."""
    parallel = config.parallel
    layout = resolve_layout(
        dp=parallel.dp, sp=parallel.sp, tp=parallel.tp, dp_replicate=parallel.dp_replicate, world_size=world_size
    )
    validate(config, dp=layout.dp)
    sampling = sampling_of(config.rollout)
    check_window(
        sampling.num_inference_steps, window_size=sampling.sde_window_size, window_range=sampling.sde_window_range
    )
    model = Path(config.model.path)
    check_model_folder(model)
    adapter = build_adapter(model)
    adapter.validate(sampling)
    prompts = load_prompts(Path(config.data.prompts), max_chars=config.data.max_prompt_chars)
    asked = [*prompts, *eval_prompts(config)]
    adapter.check_prompts(asked)
    with closing(Scorer(config.reward, num_workers=1)) as scorer:
        scorer.validate(asked)
    return layout, adapter, prompts


def eval_prompts(config: Config) -> list[Prompt]:
    """The prompts of eval.prompts, none where eval.every is 0."""
    if not config.eval.every:
        return []
    return load_prompts(Path(config.eval.prompts), max_chars=config.data.max_prompt_chars)


def run_folder(config: Config) -> Path:
    """runs/<name>."""
    return Path(config.run.dir) / config.run.name


def lock(folder: Path, stack: ExitStack) -> None:
    """Refuses a second run in the same folder; the lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((folder / ".lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{folder} is in use by another run; give this one another run.name") from error


def build_run(
    config: Config, mesh: Mesh, adapter: ModelAdapter, prompts: list[Prompt], stack: ExitStack, *, record: bool = True
) -> Run:
    """Collective. Replicas start while the engine loads; whatever is started is stopped when `stack` closes.

    record=False leaves the run's folder as it is (but for the replicas' logs).
    """
    folder = run_folder(config)
    fleet = stack.enter_context(build_fleet(config, mesh, folder))
    engine = build_engine(config, mesh, adapter)
    sampler = PromptSampler(
        prompts,
        prompts_per_step=config.train.prompts_per_step,
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    checkpoints = Checkpoints(folder, config, mesh)
    progress = checkpoints.load(engine, sampler.load_state)
    _agree(mesh, partial(wait_until_healthy, fleet, timeout_s=config.rollout.start_timeout_s))
    manifest = folder_manifest(adapter.model_folder, adapter.components, dtype=config.model.dtype)
    scorer = Scorer(config.reward)
    stack.callback(scorer.close)
    sync = HttpSync(
        engine, fleet.replicas, manifest, bucket_bytes=config.sync.bucket_mib * 2**20, cpu_group=mesh.cpu_group
    )
    trackers, bar = _recording(config, mesh, folder, progress.step, stack) if record else (Trackers(()), None)
    recorder = Recorder(trackers, bar, config, mesh, _evaluation(config, mesh, fleet, scorer))
    return Run(
        config=config, mesh=mesh, adapter=adapter, algorithm=build_algorithm(config.algorithm), engine=engine,
        fleet=fleet, sync=sync, scorer=scorer, prompts=sampler, checkpoints=checkpoints, recorder=recorder,
        progress=progress,
    )  # fmt: skip


def build_fleet(config: Config, mesh: Mesh, folder: Path) -> Fleet:
    """Collective. Rank 0 launches the replicas (colocated) or looks them up (separate); all ranks get clients."""
    rollout, fleet, error, found = config.rollout, None, None, []
    if mesh.rank == 0:
        try:
            if rollout.mode == "colocated":
                specs = replica_specs(config, mesh.device.type, folder)
                fleet = launch_replicas(specs, request_timeout_s=rollout.request_timeout_s)
                found = [
                    {"name": process.spec.name, "url": process.url, "log": str(process.spec.log)}
                    for process in fleet.processes
                ]
            else:
                found = registered_replicas(
                    Path(rollout.registry), count=rollout.num_replicas, timeout_s=rollout.start_timeout_s
                )
        except Exception as failure:  # told to every rank before anything is raised
            error = failure
    raise_together(error, mesh.cpu_group)
    if fleet:
        broadcast_json(found, source=0, group=mesh.cpu_group)
        return fleet
    found = broadcast_json(found, source=0, group=mesh.cpu_group)
    token = os.environ.get("MEGADIFF_TOKEN")
    clients = [
        ReplicaClient(one["url"], one["name"], token=token, timeout_s=rollout.request_timeout_s) for one in found
    ]
    logs = {one["name"]: Path(one["log"]) for one in found if "log" in one}
    return Fleet(clients, logs=logs, rank=mesh.rank)


def replica_specs(config: Config, device: str, folder: Path) -> list[ReplicaSpec]:
    """One spec per replica: GPUs in turn; on CPU the cores are divided among the replicas."""
    count, cores = config.rollout.num_replicas, len(os.sched_getaffinity(0))
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    return [
        ReplicaSpec(
            name=f"replica_{index}",
            model=Path(config.model.path),
            dtype=config.model.dtype,
            device=device,
            gpu_index=index % num_gpus if num_gpus else None,
            log=folder / "logs" / f"replica_{index}.log",
            num_threads=max(1, cores // count),
        )
        for index in range(count)
    ]


def _agree(mesh: Mesh, action) -> None:
    error = None
    if mesh.rank == 0:
        try:
            action()
        except Exception as failure:  # told to every rank before anything is raised
            error = failure
    raise_together(error, mesh.cpu_group)


def _recording(
    config: Config, mesh: Mesh, folder: Path, step: int, stack: ExitStack
) -> tuple[Trackers, ProgressBar | None]:
    if mesh.rank != 0:
        return Trackers(()), None
    save_config(config, folder / "config.yaml")
    trackers = build_trackers(config.track, folder, to_dict(config), resume_step=step)
    bar = ProgressBar(config.train.num_steps, start_step=step)
    return stack.enter_context(trackers), stack.enter_context(bar)


def _evaluation(config: Config, mesh: Mesh, fleet: Fleet, scorer: Scorer):
    if not config.eval.every:
        return None
    prompts, rollout = eval_prompts(config), config.rollout
    steps = config.eval.num_inference_steps or rollout.num_inference_steps
    sampling = sampling_of(type(rollout)(**{**vars(rollout), "num_inference_steps": steps}))
    return lambda step: evaluate(
        fleet, scorer, prompts, sampling=sampling, samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.seed, policy_version=step, mesh=mesh,
    )  # fmt: skip
