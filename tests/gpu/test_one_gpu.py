"""What only a GPU can show: offload, sleep, the whole path on the device."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megadiff.rollout.client.client import ReplicaClient
from megadiff.types import LoraSpec, Prompt, RolloutRequest, Sampling
from tests.distributed.engines import LOSS, build, mine, only
from tests.distributed.ranks import run_ranks
from tests.e2e.pushes import folder_weights
from tests.e2e.replica import push
from tests.e2e.waiting_calls import assert_waiting_calls_draw_alike
from tests.lora_tensors import expected_prints, linears, push_lora, random_lora

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_offload_and_onload_change_nothing(backend, rank, tiny_model):
    run_ranks(_offload_worker, 1, tiny_model, backend, rank, start_method="spawn")


def _offload_worker(pipeline, backend, rank):
    engine = build(
        pipeline, {}, dtype="bfloat16", backend=backend, device="cuda", lora=(rank, 2.0 * rank)
    )
    batch = mine(engine)
    engine.update(batch, LOSS)
    before = {key: piece.clone() for key, _, piece in only(engine)._state()}
    velocities = engine.velocities(batch)
    used = torch.cuda.memory_allocated()
    only(engine).offload()
    assert torch.cuda.memory_allocated() < used
    assert torch.equal(engine.velocities(batch), velocities)
    only(engine).onload()
    for key, _, piece in only(engine)._state():
        assert torch.equal(piece, before[key]), key
    assert engine.update(batch, LOSS)["optim/grad_norm"] > 0


@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_offload_changes_no_bit(backend, tiny_model):
    run_ranks(_offloading_worker, 1, tiny_model, backend, start_method="spawn")


def _offloading_worker(pipeline, backend):
    """Copies run beside forward, backward and other kernels; host memory is page-locked once."""
    seen = []
    for offload in ("never", "always"):
        engine = build(
            pipeline,
            {},
            dtype="bfloat16",
            backend=backend,
            device="cuda",
            average_decay=0.5,
            offload=offload,
        )
        batch = mine(engine)
        figures = []
        for _ in range(4):
            engine.offload()
            figures += [engine.velocities(batch).sum().item()]
            figures += [engine.update(batch, LOSS), engine.update(batch, LOSS)]
            engine.offload(waits=False)
        engine.offload()
        copies = only(engine)._on_host
        state = {key: copies.current(key, tensor).cpu() for key, _, tensor in only(engine)._state()}
        seen.append((figures, state))
        assert copies.on_device == (offload == "never")
    (figures, state), (other_figures, other_state) = seen
    assert figures == other_figures
    assert all(torch.equal(tensor, other_state[key]) for key, tensor in state.items())


@contextmanager
def serving(tiny_model, folder, *options):
    """A client of a replica on the GPU."""
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "megadiff.cli.serve", str(tiny_model)]
        command += ["--dtype=float32", "--port=0", "--name=gpu", f"--registry={folder}"]
        command += [f"--parent-pid={os.getpid()}", *options]
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
    deadline = time.monotonic() + 180
    while not (folder / "gpu.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[
            -3000:
        ]
        time.sleep(0.2)
    yield ReplicaClient(json.loads((folder / "gpu.json").read_text())["url"], "gpu", timeout_s=300)
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def replica(tiny_model, tmp_path_factory):
    with serving(tiny_model, tmp_path_factory.mktemp("replica")) as client:
        yield client


REQUEST = RolloutRequest(
    prompt=Prompt(text="a red picture", id="0" * 16),
    sampling=Sampling(height=64, width=64, num_inference_steps=6, sde_window_range=(0, 5)),
    sample_indices=(0, 1, 2, 3),
    seed=0,
    step=0,
)


def test_a_replica_frees_its_weights_until_a_push_brings_them(replica, tiny_model):
    before = replica.generate(REQUEST)
    weights = folder_weights(tiny_model, ("transformer",))
    for version in (1, 2):
        free, _ = torch.cuda.mem_get_info()
        replica.sleep()
        assert torch.cuda.mem_get_info()[0] > free
        push(replica, weights, version=version, model=tiny_model)
    after = replica.generate(REQUEST)
    assert torch.equal(before.latents_GSLC, after.latents_GSLC)
    assert torch.equal(before.pixels_GFHWC, after.pixels_GFHWC)


def test_a_compiled_replica_draws_what_an_eager_one_draws(replica, tiny_model, tmp_path):
    """Calls of the size that it has kernels for, of others, and of texts of other lengths."""
    texts = ["a red picture", "a red picture of a blue circle", "red"]
    with serving(tiny_model, tmp_path, "--compile") as compiled:
        for indices in ((0, 1, 2, 3), (0, 1), (4, 5, 6), (0, 1, 2, 3, 4), (7,), (0, 1, 2, 3)):
            for number, text in enumerate(texts):
                prompt = Prompt(text=text, id=str(number) * 16)
                request = replace(REQUEST, prompt=prompt, sample_indices=indices)
                eager, other = replica.generate(request), compiled.generate(request)
                torch.testing.assert_close(
                    other.latents_GSLC, eager.latents_GSLC, rtol=1e-3, atol=1e-3
                )


def test_texts_encoded_beside_a_call_are_those_encoded_alone(replica):
    """Texts and noise of a waiting call come from a stream of their own, from memory of its own.

    The texts differ in length, so memory is given back and taken again between the streams.
    """
    texts = ["a red picture", "a red picture of a blue circle", "red", "two green stars"]
    calls = []
    for number in range(24):
        prompt = Prompt(text=texts[number % len(texts)], id=f"{number:016x}")
        calls.append([replace(REQUEST, prompt=prompt)])
    assert_waiting_calls_draw_alike(replica, calls)


def test_lora_outlives_sleep(replica, tiny_model):
    """Base and adapter come with the push that wakes the replica, which then samples the same
    bits.
    """
    file = tiny_model / "transformer" / "diffusion_pytorch_model.safetensors"
    base = {f"transformer.{name}": tensor for name, tensor in load_file(file).items()}
    spec = LoraSpec(rank=3, alpha=5.0, modules=linears(base))
    plain = replica.generate(REQUEST)
    for version in (1, 2):
        lora = random_lora(base, spec, seed=version)
        answer = push_lora(replica, base, lora, spec, version=version, model=tiny_model)
        assert answer["fingerprints"] == expected_prints(base, lora, spec)
        before = replica.generate(REQUEST)
        replica.sleep()
        push_lora(replica, base, lora, spec, version=version + 2, model=tiny_model)
        after = replica.generate(REQUEST)
        assert torch.equal(before.latents_GSLC, after.latents_GSLC)
        differs_GSLC = before.latents_GSLC != plain.latents_GSLC
        assert differs_GSLC.flatten(1).any(1).all()


def test_noise_has_the_same_identity_as_on_a_cpu(replica):
    """Window from step 0: the stored first state is the CPU generator's noise, bit for bit."""
    from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys

    sampling = replace(REQUEST.sampling, sde_window_range=(0, 2))
    group = replica.generate(replace(REQUEST, sampling=sampling))
    for index, latents_SLC in zip(group.sample_indices, group.latents_GSLC, strict=True):
        key = group_key(seed=0, step=0, prompt_id="0" * 16)
        (noise,) = initial_latents_rows((16, 64), sample_keys(key, [index]))
        assert torch.equal(latents_SLC[0], noise)


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "transformer_engine_fp8"])
def test_the_trainer_on_the_gpu(fp8, tiny_model, tmp_path):
    """Two steps of the quickstart on cuda, beside a replica: the parity gate passes, and the run
    learns from finite numbers.
    """
    engine = []
    if fp8:
        if not importlib.util.find_spec("transformer_engine"):
            pytest.skip("Transformer Engine is not installed")
        dtypes = ["model.dtype=bfloat16", "engine.dtype=bfloat16"]
        engine = ["engine.backend=megatron", "engine.fp8=tensorwise", *dtypes]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megadiff.cli.train",
            str(ROOT / "configs" / "quickstart.yaml"),
            f"model.path={tiny_model}",
            f"run.dir={tmp_path}",
            "run.device=cuda",
            "train.num_steps=2",
            "track=[]",
            "rollout.num_replicas=1",
            "eval.every=0",
            *engine,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()
    ]
    if not fp8:
        assert rows[0]["parity/log_prob_gap_max"] < 5e-5
    assert rows[0]["memory/parity_gib"] > 0 and rows[0]["memory/train_gib"] > 0
    assert all(row["optim/grad_norm"] > 0 for row in rows)
