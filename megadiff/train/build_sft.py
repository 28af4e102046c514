"""Build the parts of a supervised run. Replicas exist only where it evaluates."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.checkpoint.checkpoints import Checkpoints, base_weights
from megadiff.config.schema import Config
from megadiff.data.flow import FlowBatches
from megadiff.data.images import ImageSource
from megadiff.data.latents import LatentDataset, encode_dataset
from megadiff.engines import build_engine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.processes import stop_all
from megadiff.train.build import (
    build_evaluation,
    build_recorder,
    build_replicas,
    build_rescue,
    run_folder,
)
from megadiff.train.replicas import launch
from megadiff.train.sampling import sft_sampling
from megadiff.train.sft import SftRun
from megadiff.types import DTYPES

ENCODE_BATCH_TOKENS = 16_384  # a pass of the VAE: 1,024 images of 64×64, 16 of 512×512


def build_sft_run(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    source: ImageSource,
    scorer: Scorer | None,
    stack: ExitStack,
) -> SftRun:
    """Build a supervised run. Collective. What it starts is stopped when `stack` closes."""
    folder = run_folder(config)
    # Replicas start while data are encoded and the engine loads.
    processes = launch(config, mesh, folder) if config.eval.every else []
    stack.callback(stop_all, processes)
    dataset = _encoded(config, mesh, adapter, source)
    engine = build_engine(config, mesh, adapter)
    sampling = sft_sampling(config.rollout)
    batches = FlowBatches(
        dataset,
        images_per_step=config.train.prompts_per_step,
        draws_per_image=config.algorithm.group_size,
        caption_drop=config.algorithm.caption_drop,
        sampling=sampling,
        shift=partial(adapter.shift, sampling=sampling),
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        seed=config.seed,
        shuffle=config.data.shuffle,
        source=config.data.images,
    )
    stack.callback(batches.close)
    checkpoints = Checkpoints(folder, config, mesh, base=base_weights(config, adapter, mesh))
    load_data = partial(batches.load_state, accept_changes=config.checkpoint.accept_changes)
    progress = checkpoints.load(engine, load_data)
    evaluation = None
    if config.eval.every:
        replicas = build_replicas(config, mesh, adapter, engine, processes, stack)
        assert scorer, "validate() refuses an evaluation without a reward"
        evaluation = build_evaluation(
            config, mesh, adapter, engine, replicas, scorer, rest_after=True
        )
        replicas.rest()
    recorder = build_recorder(config, mesh, evaluation, progress.step, stack)
    return SftRun(
        config=config,
        mesh=mesh,
        algorithm=build_algorithm(config.algorithm),
        engine=engine,
        batches=batches,
        checkpoints=checkpoints,
        recorder=recorder,
        rescue=build_rescue(folder, mesh, engine, checkpoints, recorder, progress),
        progress=progress,
    )


def _encoded(
    config: Config, mesh: Mesh, adapter: ModelAdapter, source: ImageSource
) -> LatentDataset:
    """Return the data as latents and embeddings, from run.dir/cache where they are there."""
    sampling = sft_sampling(config.rollout)
    num_tokens, _ = adapter.latents_shape(sampling)
    return encode_dataset(
        source,
        adapter,
        folder=Path(config.run.dir) / "cache",
        height=sampling.height,
        width=sampling.width,
        max_chars=config.data.max_prompt_chars,
        dtype=DTYPES[config.model.dtype],
        device=mesh.device,
        mesh=mesh,
        batch=max(1, ENCODE_BATCH_TOKENS // num_tokens),
    )
