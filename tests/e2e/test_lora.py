"""Runs with LoRA as a user starts them: the same metrics in every layout and over every transport,
resumed, evaluated.
"""

from __future__ import annotations

import base64
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from megadiff.cli.evaluate import main as evaluate
from megadiff.convert.convert import Options, convert
from megadiff.rollout.client.client import ReplicaClient
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.manifest import folder_manifest
from tests.distributed.ranks import run_ranks
from tests.e2e.conftest import GATED, ROOT, Result
from tests.extra import cases

MEGATRON = "engine.backend=megatron"
RANK, ALPHA = 4, 8
LAYOUTS = {  # number of ranks, overrides; the transports are shared out among them
    "veomni_dp2": (2, ["parallel.dp=2", "sync.transport=shm"]),
    "veomni_sp2": (2, ["parallel.sp=2", "sync.transport=nccl"]),
    "megatron_tp1": (1, [MEGATRON, "sync.transport=disk"]),
    "megatron_tp2": (2, [MEGATRON, "parallel.tp=2"]),
    "megatron_tp2_dp2": (4, [MEGATRON, "parallel.tp=2", "parallel.dp=2", "sync.transport=shm"]),
}
SAME = ("reward/mean", "loss/policy", "optim/grad_norm", "policy/kl_ref")
MACHINE = ("time/", "perf/", "memory/")  # what a clock or the machine decides
WHOLE = (
    "train.num_steps=6",
    "checkpoint.every=3",
    "checkpoint.keep=2",
    "eval.every=6",
    "eval.num_samples=6",
    f"eval.prompts={ROOT / 'assets/prompts/colors.txt'}",
)


@pytest.fixture(scope="module")
def runs(in_ranks, registry):
    """Runs `megadiff train` with LoRA on this many ranks."""
    shared = [
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        f"sync.folder={registry.parent / 'weights'}",
        f"lora.rank={RANK}",
        f"lora.alpha={ALPHA}",
        "optim.lr=1e-3",
        "algorithm.kl_coef=0.04",
    ]
    return lambda name, num_ranks, *overrides: in_ranks(name, num_ranks, *shared, *overrides)


@pytest.fixture(scope="module")
def reference(runs):
    """Six steps on one rank; metrics, checkpoints of steps 3 and 6, an evaluation of step 6."""
    return runs("whole", 1, *WHOLE)


@pytest.mark.parametrize("name", cases(LAYOUTS, extra_ones=("megatron_tp2_dp2",)))
def test_every_layout_and_transport_gives_the_same_metrics(runs, reference, name):
    num_ranks, overrides = LAYOUTS[name]
    rows = runs(name, num_ranks, GATED, *overrides, "rollout.num_replicas=2").rows
    assert rows[0]["parity/log_prob_gap_max"] <= 1e-6
    for row, expected in zip(rows, _steps(reference)[:3], strict=True):
        for key in SAME:
            # loss/policy is a mean of terms of ± advantage that cancel to 1e-5 on policy: relative
            # to a thousandth of them
            scale = max(abs(expected[key]), 1e-3 if key == "loss/policy" else 0)
            assert abs(row[key] - expected[key]) <= 1e-4 * scale, (
                row["step"],
                key,
                row[key],
                expected[key],
            )


def test_only_the_adapter_travels_after_the_base(reference):
    sizes_byte = [round(row["sync/gib"] * 2**30) for row in _steps(reference)]
    adapter = sizes_byte[-1]
    assert sizes_byte[1:] == [adapter] * 5 and sizes_byte[0] > 20 * adapter


def test_the_replica_follows_the_adapter(runs):
    """One update a batch, guided: log_prob is the replica's to 1e-6 after updates too, which moved
    it by much more.
    """
    rows = runs(
        "guided", 1, "train.updates_per_step=1", "rollout.true_cfg_scale=4", "optim.lr=1e-2"
    ).rows
    gaps = [(2 * row["policy/kl_old"]) ** 0.5 for row in rows]
    assert max(gaps) <= 1e-6, gaps
    assert rows[0]["policy/kl_ref"] <= 1e-12 and rows[2]["policy/kl_ref"] >= 1e-6


def test_three_resume_three_is_six(runs, reference):
    folder = shutil.copytree(reference.folder, reference.folder.with_name("halves"))
    shutil.rmtree(folder / "checkpoints/step_000006")
    (folder / "checkpoints/latest").write_text("step_000003")
    rows = runs("halves", 1, *WHOLE).rows
    for row, expected in zip(rows, reference.rows, strict=True):
        if row["step"] == 4:  # the base travels to the replicas once more
            row, expected = (
                {key: value for key, value in one.items() if key != "sync/gib"}
                for one in (row, expected)
            )
        assert _deterministic(row) == _deterministic(expected)  # bit for bit


def test_checkpoints_hold_the_adapter_alone(reference, tiny_model):
    size = sum(
        file.stat().st_size
        for file in (reference.folder / "checkpoints/step_000006").rglob("*")
        if file.is_file()
    )
    model_size = (tiny_model / "transformer/diffusion_pytorch_model.safetensors").stat().st_size
    assert size < model_size / 5, (size, model_size)  # its weights and two moments, in float32


def test_live_adapter_and_merged_export_draw_the_same(reference, tmp_path):
    """What the run's own evaluation drew with the adapter, sample by sample, against a replica that
    loads the export.
    """
    convert(
        reference.folder,
        tmp_path / "merged",
        Options(to="merged"),
        progress=lambda *_: nullcontext(lambda _: None),
    )
    config = [
        str(reference.folder / "config.yaml"),
        f"run.dir={tmp_path}",
        "lora.rank=0",
        "lora.alpha=0",
    ]
    merged = [f"model.path={tmp_path / 'merged'}", "sync.transport=http"]
    run_ranks(
        _evaluate, 1, [str(tmp_path / "merged"), "--out", str(tmp_path / "out"), *config, *merged]
    )
    live = _samples(reference.folder / "evaluations/step_000006/evaluation.json")
    exported = _samples(tmp_path / "out/evaluation.json")
    start = _samples(reference.folder / "evaluations/step_000000/evaluation.json")
    assert live.keys() == exported.keys() and len(live) == 6
    assert (
        max(abs(reward - start[key]) for key, reward in live.items()) >= 5e-3
    )  # the adapter shows
    for key, reward in live.items():
        assert abs(reward - exported[key]) <= 1e-3, key  # a pixel may round to its neighbour


def test_a_run_starts_from_an_exported_lora(runs, reference, tmp_path):
    """Before its first step it draws what the run drew that the LoRA comes from, bit for bit."""
    convert(
        reference.folder,
        tmp_path / "lora",
        Options(to="peft"),
        progress=lambda *_: nullcontext(lambda _: None),
    )
    start = f"lora.start={tmp_path / 'lora'}"
    begun = runs("begun", 1, *WHOLE, start, "train.num_steps=0", "algorithm.kl_coef=0")
    drawn = _samples(begun.folder / "evaluations/step_000000/evaluation.json")
    assert drawn == _samples(reference.folder / "evaluations/step_000006/evaluation.json")


def test_replicas_follow_the_modules_that_are_trained(runs):
    """With one update a batch, log_probs of later steps are the replica's, too."""
    few = ["lora.targets=[attn.to_q,img_mlp.net.2]", "lora.exclude=[transformer_blocks.0.attn.*]"]
    rows = runs("few", 1, *few, "train.updates_per_step=1", "optim.lr=1e-2").rows
    assert max((2 * row["policy/kl_old"]) ** 0.5 for row in rows) <= 1e-6
    assert rows[2]["policy/kl_ref"] >= 1e-8


def test_an_openai_client_sees_the_policy(runs, registry, tiny_model):
    """The base, the adapter, the base again; a request with a LoRA of its own is refused, and the
    replica lives on.
    """
    entry = json.loads((registry / "replica_0.json").read_text())
    client = ReplicaClient(entry["url"], entry["name"])
    _push_base(client, tiny_model, version=1)
    before = _image(client.url)
    runs("moved", 1, "train.num_steps=2", "optim.lr=1e-2")
    after = _image(client.url)
    assert after != before and after == _image(client.url)
    own = _post(client.url, lora={"name": "mine", "path": str(tiny_model), "scale": 1.0})
    assert own.status_code == 400 and "without a LoRA of its own" in own.text
    assert _image(client.url) == after
    _push_base(client, tiny_model, version=9)
    assert _image(client.url) == before


def _push_base(client: ReplicaClient, model: Path, *, version: int) -> None:
    client.weights_begin(version, folder_manifest(model, ("transformer",), dtype="float32"))
    tensors = load_file(model / "transformer/diffusion_pytorch_model.safetensors")
    client.weights_bucket(
        encode_bucket([(f"transformer.{name}", tensor) for name, tensor in tensors.items()])
    )
    client.weights_commit(version)
    client.release()  # the next run would wait until this one counts as gone


def _evaluate(arguments: list[str]) -> None:
    assert evaluate(arguments) == 0


def _samples(record: Path) -> dict[tuple, float]:
    """(prompt, sample index) → reward."""
    samples = json.loads(record.read_text())["samples"]
    return {
        (sample["prompt_id"], sample["sample_index"]): sample["rewards"]["color"]
        for sample in samples
    }


def _steps(result: Result) -> list[dict]:
    """The rows of training steps, without that of the evaluation before them."""
    return [row for row in result.rows if row["step"]]


def _image(url: str) -> bytes:
    response = _post(url)
    assert response.status_code == 200, response.text
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def _post(url: str, **changes: object) -> httpx.Response:
    body = {
        "prompt": "a red cat",
        "n": 1,
        "size": "64x64",
        "num_inference_steps": 4,
        "true_cfg_scale": 1.0,
        "seed": 42,
    }
    return httpx.post(f"{url}/v1/images/generations", json=body | changes, timeout=60)


def _deterministic(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(MACHINE)}
