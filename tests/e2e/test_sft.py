"""Supervised runs as a user starts them: every layout, killed and resumed, evaluated on averaged
weights, exported.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from megadiff.cli.train import main
from megadiff.convert.convert import Options, convert
from megadiff.rollout.client.client import ReplicaClient
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.distributed.ranks import run_ranks
from tests.e2e.asking import ask_in, by_file
from tests.e2e.captioned import SETTINGS, trainer_of_images, write_images
from tests.e2e.conftest import ENVIRONMENT, ROOT, Result

AVERAGED = "algorithm.ema_decay=0.99"
HALF = 10  # steps: an evaluation and a checkpoint come with it
SAME = ("loss/flow_matching", "optim/grad_norm", "optim/lr")
MACHINE = ("time/", "perf/", "memory/")
SAMPLING = Sampling(height=64, width=64, num_inference_steps=3, sde_type="ode", sde_window_size=0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, tiny_model):
    return trainer_of_images(tmp_path_factory.mktemp("sft"), tiny_model)


@pytest.fixture(scope="module")
def shared(trainer, registry):
    """Settings of a run that is evaluated before, half-way and after on replicas that are there
    already.
    """
    replicas = ["rollout.mode=separate", f"rollout.registry={registry}"]
    evaluation = [
        "eval.every=10",
        f"eval.prompts={trainer.folder / 'held_out.txt'}",
        "eval.num_samples=4",
    ]
    return [*SETTINGS, f"data.images={trainer.folder / 'images'}", *replicas, *evaluation]


@pytest.fixture(scope="module")
def reference(trainer, shared):
    """Twenty steps on one process."""
    result = trainer.run(*shared, AVERAGED, name="reference")
    assert result.code == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def held(reference, registry):
    """Latents from the weights that the run's last evaluation gave to the replica, and the client
    of it.
    """
    address = json.loads((registry / "replica_0.json").read_text())
    client = ReplicaClient(address["url"], "replica_0")
    owner = ReplicaClient(address["url"], "replica_0", run=client.health()["run"])
    return sample(owner, 20), client


def sample(client, version):
    prompt = Prompt(text="a green wall", id="0" * 16)
    request = RolloutRequest(
        prompt=prompt,
        sampling=SAMPLING,
        sample_indices=(0, 1),
        seed=0,
        step=0,
        policy_version=version,
    )
    return client.generate(request).latents_GSLC[:, -1]


def _deterministic(row):
    return {key: value for key, value in row.items() if not key.startswith(MACHINE)}


def test_the_loss_falls_and_the_rate_warms_up(reference):
    _, *rows = reference.rows
    assert np.mean([row[SAME[0]] for row in rows[-3:]]) < 0.9 * np.mean(
        [row[SAME[0]] for row in rows[:3]]
    )
    assert [row["optim/lr"] for row in rows] == pytest.approx(
        [min(1, (n + 1) / 8) * 1e-3 for n in range(20)]
    )
    assert "step 20/20  loss 0." in reference.stderr and "ETA" in reference.stderr


def test_replicas_are_evaluated_with_the_averaged_weights_which_are_exported(
    reference, held, trainer, tmp_path
):
    latents, client = held
    checkpoint = reference.folder / "checkpoints" / "step_000020"
    pushed = {}
    for version, averaged in ((21, True), (22, False)):
        folder = tmp_path / str(version)
        options = Options(to="diffusers", dtype="float32", raw=not averaged)
        convert(checkpoint, folder, options, progress=lambda *_: nullcontext(lambda _: None))
        push(client, version, folder)
        pushed[averaged] = sample(client, version)
    assert torch.equal(pushed[True], latents)
    assert (pushed[False] - latents).abs().max() > 1e-3


def push(client, version, folder):
    weights = QwenImagePipeline.from_pretrained(folder).transformer.state_dict()
    client.weights_begin(version, folder_manifest(folder, ("transformer",), dtype="float32"))
    client.weights_bucket(
        encode_bucket([(f"transformer.{name}", tensor) for name, tensor in weights.items()])
    )
    client.weights_commit(version)
    client.release()  # the next run would wait until this one counts as gone


@pytest.fixture(scope="module")
def two_ranks(trainer, shared, held):
    """Half of the run's steps on two ranks: data-parallel, sequence-parallel without averaged
    weights, and tensor-parallel on the other engine.
    """
    runs = {
        "dp": [AVERAGED],
        "sp": ["algorithm.ema_decay=0"],
        "tp": [AVERAGED, "engine.backend=megatron"],
    }
    for name, overrides in runs.items():
        overrides += [f"parallel.{name}=2", f"train.num_steps={HALF}"]
        run_ranks(_main, 2, trainer.command(*shared, *overrides, name=name)[3:])
    return {name: Result(code=0, stderr="", folder=trainer.folder / name) for name in runs}


def _main(arguments):
    """What torchrun's ranks do, in processes that have their imports behind them."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    assert main(arguments) == 0


@pytest.mark.parametrize("layout", ["dp", "sp", "tp"])
def test_layout_does_not_matter(layout, two_ranks, reference):
    expected_rows = reference.rows[1 : HALF + 1]
    for row, expected in zip(two_ranks[layout].rows[1:], expected_rows, strict=True):
        assert [row[key] for key in SAME] == pytest.approx(
            [expected[key] for key in SAME], rel=1e-4
        ), row["step"]


def test_averaging_matters_to_evaluation_only(two_ranks, reference):
    dp, sp, tp = (two_ranks[name].rows[-1] for name in ("dp", "sp", "tp"))
    expected = reference.rows[HALF]
    assert expected["step"] == dp["step"] == HALF
    assert dp["eval/latent_spread"] == pytest.approx(expected["eval/latent_spread"], rel=1e-4)
    assert tp["eval/latent_spread"] == pytest.approx(expected["eval/latent_spread"], rel=1e-4)
    assert sp["eval/latent_spread"] != pytest.approx(expected["eval/latent_spread"], rel=1e-3)


def test_a_run_of_two_ranks_becomes_a_pipeline_of_its_averaged_weights(two_ranks, tmp_path):
    run, out = two_ranks["dp"].folder, tmp_path / "out"
    command = [
        sys.executable,
        str(ROOT / "tools" / "convert_ckpt.py"),
        str(run),
        str(out),
        "--dtype",
        "float32",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    source = ShardFolder(run / "checkpoints" / f"step_{HALF:06d}")
    pipeline = QwenImagePipeline.from_pretrained(out)
    for name, tensor in pipeline.transformer.state_dict().items():
        stored = Shard(
            local=torch.empty_like(tensor), offsets=(0,) * tensor.ndim, shape=tuple(tensor.shape)
        )
        source.read_into(f"average/transformer.{name}", stored)
        assert torch.equal(tensor, stored.local), name
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        "a red wall", height=64, width=64, num_inference_steps=2, true_cfg_scale=1.0
    ).images[0]
    assert image.size == (64, 64)


def test_killed_and_resumed_is_uninterrupted(trainer, shared, reference):
    """Bit for bit: losses, evaluations, and all that the last checkpoint holds, the averaged
    weights among it.
    """
    process = subprocess.Popen(
        trainer.command(*shared, AVERAGED, name="killed"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd=trainer.folder,
    )
    metrics = trainer.folder / "killed" / "metrics.jsonl"
    saved = trainer.folder / "killed" / "checkpoints" / "step_000010"  # written in the background
    _wait_for(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 13 and saved.exists()
    )  # with step 0: 12 steps
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert not (trainer.folder / "killed" / "checkpoints" / "step_000020").exists()

    resumed = trainer.run(*shared, AVERAGED, name="killed")
    assert (
        resumed.code == 0 and "resumed from" in resumed.stderr and "(step 10)" in resumed.stderr
    ), resumed.stderr
    assert [_deterministic(row) for row in resumed.rows] == [
        _deterministic(row) for row in reference.rows
    ]
    last = [
        each / "checkpoints" / "step_000020" / "rank_00000.safetensors"
        for each in (resumed.folder, reference.folder)
    ]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_stopped_and_resumed_is_uninterrupted(trainer, shared, reference):
    stop = trainer.folder / "stopped"
    asks = partial(ask_in, "images", partial(by_file, stop))
    stopped = trainer.run(*shared, AVERAGED, name="stopped", prepare=asks)
    assert stopped.code == 75, stopped.stderr
    assert json.loads((stop / "stopped").read_text())["step"] == 3
    assert (stop / "checkpoints" / "step_000003").is_dir()
    resumed = trainer.run(*shared, AVERAGED, "train.num_steps=5", "eval.every=0", name="stopped")
    assert resumed.code == 0, resumed.stderr
    rows = [[row[key] for key in SAME] for row in resumed.rows[1:]]
    assert rows == [[row[key] for key in SAME] for row in reference.rows[1:6]]


def test_the_report_tells_loss_and_evaluation(reference):
    page = (reference.folder / "report.html").read_text("utf-8")  # the run's own, at its end
    assert re.search(r"<h1>Loss fell from 1\.\d+ to 0\.\d+\.</h1>", page)
    for text in (
        "Flow-matching loss",
        "Learning rate",
        "waiting for images and noise",
        "a green wall",
    ):
        assert text in page


def test_a_full_disk_while_encoding(trainer):
    """A file-size limit stands for the full disk.

    What was there before stays, and half a cache does not.
    """
    cache = trainer.folder / "cache"
    before = sorted(cache.iterdir()) if cache.exists() else []
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))
    done = trainer.run(
        *SETTINGS, "data.images=examples.shapes.images:ShapesImages:20", name="full", prepare=limit
    )
    assert done.code == 1
    assert (
        "latents_00000_00000.safetensors could not be written" in done.stderr
        and "MiB are free" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert sorted(cache.iterdir()) == before


def test_other_images_do_not_continue_a_run(trainer, reference):
    """As many as before, one with another caption."""
    folder = trainer.folder / "others"
    write_images(folder)
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text("utf-8").replace("yellow", "black"), "utf-8")
    shutil.copytree(reference.folder, trainer.folder / "moved")
    result = trainer.run(
        *SETTINGS, AVERAGED, f"data.images={folder}", "train.num_steps=21", name="moved"
    )
    assert result.code == 1
    assert "the saved data position has digest=" in result.stderr
    assert "restore data.prompts, data.images or data.pairs" in result.stderr


def _wait_for(condition, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
