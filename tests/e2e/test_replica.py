"""A real replica, vllm-omni and all: its samples, its weights, its refusals. One server for the whole file."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from megadiff.models.qwen_image.tiny import write_tiny_pipeline
from megadiff.rollout.client import ReplicaClient, ReplicaError
from megadiff.rollout.wire import requests_to_json
from megadiff.types import LoraSpec, Prompt, RolloutRequest, Sampling
from megadiff.weights.bucket import encode_bucket
from megadiff.weights.fingerprint import fingerprint
from megadiff.weights.manifest import folder_manifest
from tests.e2e.recompute import gap
from tests.lora_tensors import expected_prints, linears, merged, push_lora, random_lora

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180
SAMPLING = Sampling(height=64, width=64, num_inference_steps=6, sde_window_range=(0, 5))
PROMPT = Prompt(text='a red cat, "hello"', id="ab" * 8, negative_text="bad", fields={"color": "red"})
REQUEST = RolloutRequest(prompt=PROMPT, sampling=SAMPLING, sample_indices=(0, 1, 2, 3), seed=3, step=1)


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen
    client: ReplicaClient
    registry: Path
    log: Path


def start(model: Path, folder: Path, *options: str, overlay: str = "") -> Server:
    registry, log = folder / "registry", folder / "replica.log"
    path = os.pathsep.join(filter(None, (overlay, str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megadiff.cli.serve", str(model), "--dtype", "float32", "--port", "0"),
                *("--name", "replica-7", "--registry", str(registry), "--parent-pid", str(os.getpid()), *options),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (registry / "replica-7.json").exists():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
    entry = json.loads((registry / "replica-7.json").read_text())
    assert entry["pid"] == process.pid
    return Server(process, ReplicaClient(entry["url"], entry["name"], timeout_s=120), registry, log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "pipeline"
    write_tiny_pipeline(folder, size="tiny", dtype="float32", seed=0)
    return folder


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, Tensor]:
    """The transformer's tensors on disk, under the names that a push uses."""
    files = sorted((model / "transformer").glob("*.safetensors"))
    return {f"transformer.{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(model, tmp_path_factory.mktemp("replica"), "--sleep-mode")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def client(server: Server, model: Path, weights: dict[str, Tensor]) -> Iterator[ReplicaClient]:
    """Hands the replica on ready, and holding the weights on disk as version 0."""
    yield server.client
    assert server.process.poll() is None, "the replica died"
    if server.client.health()["state"] != "ready" or server.client.health()["policy_version"] > 0:
        push(server.client, weights, version=0, model=model)


def push(client: ReplicaClient, weights: dict[str, Tensor], *, version: int, model: Path) -> dict[str, str]:
    client.weights_begin(version, folder_manifest(model, ("transformer",), dtype="float32"))
    items = list(weights.items())
    for first in range(0, len(items), 20):
        client.weights_bucket(encode_bucket(items[first : first + 20]))
    (worker,) = client.weights_commit(version)
    return worker["fingerprints"]


def image(client: ReplicaClient, **changes: object) -> bytes:
    body = {"prompt": "a red cat", "n": 1, "size": "64x64", "num_inference_steps": 4, "true_cfg_scale": 1.0, "seed": 42}
    response = httpx.post(f"{client.url}/v1/images/generations", json=body | changes, timeout=60)
    assert response.status_code == 200, response.text
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def test_group_is_complete(client: ReplicaClient) -> None:
    group = client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0)))
    assert (group.prompt, group.replica) == (PROMPT, "replica-7")
    assert group.policy_version == client.health()["policy_version"]
    assert group.schedule.shape == (7,) and group.schedule[0] == 1 and group.schedule[-1] == 0
    assert set(group.conditioning) == {"prompt_embeds", "prompt_mask", "negative_prompt_embeds", "negative_prompt_mask"}
    assert group.conditioning["prompt_mask"].dtype == torch.bool
    assert group.conditioning["prompt_embeds"].shape[:2] == group.conditioning["prompt_mask"].shape
    assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3]
    for trajectory in group.trajectories:
        assert trajectory.latents_SLC.shape == (3, 16, 64) and trajectory.latents_SLC.dtype == torch.float32
        assert trajectory.log_probs.shape == (2,) and trajectory.log_probs.dtype == torch.float64
        assert trajectory.pixels.shape == (1, 64, 64, 3) and trajectory.pixels.dtype == torch.uint8
        start = trajectory.window_start
        assert 0 <= start <= 3 and torch.equal(trajectory.sigmas, group.schedule[start : start + 3])
        assert torch.equal(trajectory.timesteps, 1000 * trajectory.sigmas[:2])


def test_sample_depends_on_its_identity_only(client: ReplicaClient) -> None:
    """Bit by bit with other neighbours, in another order, and with other groups running at the same moment. In a batch of
    another *size* the matrix kernels round differently: within 1e-6 of the latents' scale, and the same log_probs."""
    group = client.generate(REQUEST)
    other = replace(REQUEST, prompt=replace(PROMPT, text="a much longer prompt about a blue dog", id="cd" * 8))
    with ThreadPoolExecutor(5) as pool:
        requests = [REQUEST, replace(REQUEST, sample_indices=(9, 2, 8, 0)), other, replace(other, seed=4)]
        again, mixed, first, second = pool.map(client.generate, requests)
    for one, row, same, same_row in ((group, 3, again, 3), (group, 2, mixed, 1), (group, 0, mixed, 3)):
        left, right = one.trajectories[row], same.trajectories[same_row]
        assert torch.equal(left.latents_SLC, right.latents_SLC) and torch.equal(left.log_probs, right.log_probs)
        assert left.window_start == right.window_start
    for sample_indices in ((2,), (9, 2)):
        left = group.trajectories[2]
        right = client.generate(replace(REQUEST, sample_indices=sample_indices)).trajectories[-1]
        scale = left.latents_SLC.abs().max()
        assert (left.latents_SLC - right.latents_SLC).abs().max() <= 1e-6 * scale
        assert (left.log_probs - right.log_probs).abs().max() <= 1e-6
    differences = [
        (group.trajectories[0].latents_SLC - trajectory.latents_SLC).abs().max()
        for trajectory in (*group.trajectories[1:], first.trajectories[0], second.trajectories[0])
    ]
    assert min(differences) > 0.1
    assert not torch.equal(first.trajectories[0].latents_SLC, second.trajectories[0].latents_SLC)


@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "flow_cps"])
def test_log_probs_are_those_of_stock_diffusers(client: ReplicaClient, model: Path, sde_type: str) -> None:
    for step in range(2):  # two windows
        group = client.generate(replace(REQUEST, step=step, sampling=replace(SAMPLING, sde_type=sde_type)))
        assert gap(model, group) <= 1e-6


def test_log_probs_under_true_cfg(client: ReplicaClient, model: Path) -> None:
    group = client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0)))
    guided, unguided = gap(model, group), gap(model, replace(group, sampling=SAMPLING))
    assert guided <= 1e-4
    assert unguided > 10 * max(guided, 1e-6)  # the guidance matters to the figure above


def test_ode_pixels_are_the_decoded_final_latents(client: ReplicaClient, model: Path) -> None:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

    for sampling in (replace(SAMPLING, sde_type="ode"), replace(SAMPLING, sde_window_size=0)):
        group = client.generate(replace(REQUEST, sampling=sampling, sample_indices=(0, 1)))
        final_NLC = torch.cat([trajectory.latents_SLC for trajectory in group.trajectories])
        assert [trajectory.window_start for trajectory in group.trajectories] == [6, 6]
        assert all(trajectory.log_probs.shape == (0,) for trajectory in group.trajectories)
        vae = AutoencoderKLQwenImage.from_pretrained(model / "vae", torch_dtype=torch.float32)
        latents = QwenImagePipeline._unpack_latents(final_NLC, 64, 64, 8)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        with torch.no_grad():
            decoded = vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
        expected = ((decoded * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        pixels = torch.cat([trajectory.pixels for trajectory in group.trajectories])
        assert (pixels.int() - expected.int()).abs().max() <= 1  # of 255: rounding of one float32 ulp


def test_push_changes_the_policy_bit_by_bit(client: ReplicaClient, model: Path, weights: dict[str, Tensor]) -> None:
    before, before_group = image(client), client.generate(REQUEST)
    assert before[:4] == b"\x89PNG" and before == image(client)
    changed = {name: tensor * 1.1 for name, tensor in weights.items()}
    held = push(client, changed, version=1, model=model)
    assert held == {name: fingerprint(tensor) for name, tensor in changed.items()}
    assert image(client) != before
    group = client.generate(replace(REQUEST, policy_version=1))
    assert group.policy_version == 1 and group.trajectories[0].policy_version == 1
    assert not torch.equal(group.trajectories[0].latents_SLC, before_group.trajectories[0].latents_SLC)
    with pytest.raises(ReplicaError, match="policy_version 0 was asked for, this replica holds 1") as error:
        client.generate(replace(REQUEST, policy_version=0))
    assert error.value.status == 409

    push(client, weights, version=2, model=model)
    assert image(client) == before
    after = client.generate(REQUEST)
    assert torch.equal(after.trajectories[3].latents_SLC, before_group.trajectories[3].latents_SLC)


def test_a_flipped_bit_shows(client: ReplicaClient, model: Path, weights: dict[str, Tensor]) -> None:
    name = next(name for name in weights if name.endswith("attn.to_k.weight"))
    flipped = weights[name].clone()
    flipped.view(torch.int32)[0, 1] ^= 1
    held = push(client, weights | {name: flipped}, version=1, model=model)
    assert [other for other, tensor in weights.items() if held[other] != fingerprint(tensor)] == [name]


def test_a_push_that_skips_a_tensor_is_refused(client: ReplicaClient, model: Path, weights: dict[str, Tensor]) -> None:
    manifest = folder_manifest(model, ("transformer",), dtype="float32")
    name = "transformer.proj_out.weight"
    with pytest.raises(ReplicaError, match=f"1 missing: {name}"):
        client.weights_begin(1, {other: row for other, row in manifest.items() if other != name})
    client.weights_begin(1, manifest)
    client.weights_bucket(encode_bucket([(other, tensor) for other, tensor in weights.items() if other != name]))
    for call in (lambda: client.weights_commit(1), lambda: client.generate(REQUEST)):
        with pytest.raises(ReplicaError) as error:
            call()
        assert error.value.status in (400, 409)
    assert httpx.post(f"{client.url}/v1/images/generations", json={"prompt": "x"}).status_code == 409
    client.weights_bucket(encode_bucket([(name, weights[name])]))
    client.weights_commit(1)
    client.generate(REQUEST)


def test_bad_buckets(client: ReplicaClient, model: Path, weights: dict[str, Tensor]) -> None:
    name, tensor = "transformer.proj_out.weight", weights["transformer.proj_out.weight"]
    with pytest.raises(ReplicaError, match="no weight push is open"):
        client.weights_bucket(encode_bucket([(name, tensor)]))
    client.weights_begin(1, folder_manifest(model, ("transformer",), dtype="float32"))
    cases = [
        (encode_bucket([("transformer.unknown", tensor)]), "transformer.unknown"),
        (encode_bucket([(name, tensor[:-1])]), "proj_out.weight comes as"),
        (encode_bucket([(name, tensor.bfloat16())]), "bfloat16"),
        (encode_bucket([(name, tensor)])[:-10], "not a whole safetensors file"),
        (b"", "not a whole safetensors file"),
        (save({"a": torch.zeros(1, dtype=torch.int64)}), "a is I64"),
    ]
    for body, message in cases:
        response = httpx.post(f"{client.url}/rl/weights/bucket", content=body)
        assert response.status_code == 400 and message in response.json()["error"], response.text


def test_bad_requests_are_refused_and_the_replica_lives_on(client: ReplicaClient) -> None:
    (good,) = requests_to_json([REQUEST])
    bad_sampling = [{"height": 65}, {"width": 10**6}, {"sde_type": "x"}, {"sde_window_range": [0, 6]}, {"height": "64"}]
    bodies = [json.dumps([good | {"sampling": good["sampling"] | changes}]) for changes in bad_sampling]
    bad_values = ({"sample_indices": list(range(1025))}, {"seed": None}, {"x": 1})
    bodies += [json.dumps([good | changes]) for changes in bad_values]
    bodies += [json.dumps([good | {"prompt": good["prompt"] | {"text": text}}]) for text in ("x" * 2001, "\ud800")]
    bodies += [json.dumps(good), "", "{", "[]", "[1]", "null", "\x00", "[" * 100_000]
    for body in bodies:
        response = httpx.post(f"{client.url}/rl/generate", content=body.encode())
        assert 400 <= response.status_code < 500 and response.json()["error"], (body[:80], response.text)
    with pytest.raises(ReplicaError, match="too long") as error:  # more tokens than the text encoder takes
        client.generate(replace(REQUEST, prompt=replace(PROMPT, text="🐱" * 2000)))
    assert error.value.status == 400
    client.generate(replace(REQUEST, prompt=replace(PROMPT, text="猫 🐱 émoji " + "x" * 300)))


def test_sleep_and_wake(client: ReplicaClient) -> None:
    before = client.generate(REQUEST)
    client.sleep()
    assert client.health()["state"] == "asleep"
    with pytest.raises(ReplicaError, match="asleep"):
        client.generate(REQUEST)
    client.wake()
    after = client.generate(REQUEST)
    assert torch.equal(before.trajectories[0].latents_SLC, after.trajectories[0].latents_SLC)


def test_lora_outlives_sleep_and_gives_way_to_a_push_without(
    client: ReplicaClient, model: Path, weights: dict[str, Tensor]
) -> None:
    bound_lora_serves_and_sleeps(client, model, weights, version=5)
    push(client, weights, version=6, model=model)
    whole = {name: fingerprint(tensor) for name, tensor in weights.items()}
    assert push(client, weights, version=7, model=model) == whole


def bound_lora_serves_and_sleeps(
    client: ReplicaClient, model: Path, weights: dict[str, Tensor], *, version: int
) -> None:
    """Live, the adapter samples as the weights do that it merges to, through the RL route and the images API alike."""
    spec = LoraSpec(rank=3, alpha=5.0, modules=linears(weights))
    lora = random_lora(weights, spec)
    push(client, merged(weights, lora, spec), version=version, model=model)
    whole, whole_image = client.generate(REQUEST), image(client)
    answer = push_lora(client, weights, lora, spec, version=version + 1, model=model)
    assert answer["fingerprints"] == expected_prints(weights, lora, spec)
    assert answer["bound_modules"] == [f"transformer.{module}" for module in spec.modules]
    for _ in range(2):
        assert image_gap(image(client), whole_image) <= 1
        for live, other in zip(client.generate(REQUEST).trajectories, whole.trajectories, strict=True):
            assert (live.latents_SLC - other.latents_SLC).abs().max() <= 1e-5
            assert (live.log_probs - other.log_probs).abs().max() <= 1e-5
            assert (live.pixels.int() - other.pixels.int()).abs().max() <= 1
        client.sleep()
        client.wake()


def image_gap(one: bytes, other: bytes) -> int:
    """Of 255."""
    left, right = (np.asarray(Image.open(io.BytesIO(png)), dtype=int) for png in (one, other))
    return int(np.abs(left - right).max())


def test_health_metrics_and_a_plain_image_with_guidance(client: ReplicaClient) -> None:
    health = client.health()
    assert (health["name"], health["state"], health["in_flight"]) == ("replica-7", "ready", 0)
    assert httpx.get(f"{client.url}/metrics").text.startswith("# HELP")
    guided = image(client, true_cfg_scale=4.0, negative_prompt="bad")
    assert guided[:4] == b"\x89PNG" and guided != image(client)


def serve_and_fail(*arguments: object, **environment: str) -> tuple[int, str, float]:
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "megadiff.cli.serve", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stderr, time.monotonic() - start_s


def test_settings_that_cannot_work_end_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text, seconds = serve_and_fail(model, "--port", port)
    assert code == 2 and f"port {port} on 127.0.0.1 is in use" in text and seconds < 5
    code, text, _ = serve_and_fail(model, "--port", 0, "--host", "0.0.0.0", MEGADIFF_TOKEN="")
    assert code == 2 and "give --token" in text
    code, text, _ = serve_and_fail(tmp_path / "nowhere", "--port", 0)
    assert code == 2 and "does not exist" in text and "Traceback" not in text


def test_token_parent_and_sigterm(model: Path, tmp_path: Path) -> None:
    """Another address needs the token; SIGTERM ends it within seconds and takes its registry entry back."""
    server = start(model, tmp_path, "--host", "0.0.0.0", "--token", "secret")
    url = server.client.url.replace("0.0.0.0", "127.0.0.1")
    try:
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/rl/generate", "/v1/images/generations", "/metrics"):
                assert httpx.post(f"{url}{path}", headers=headers, json={}).status_code == 401
        client = ReplicaClient(url, "replica-7", token="secret")
        assert len(client.generate(REQUEST).trajectories) == 4
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert not list(server.registry.iterdir())
    finally:
        server.process.kill()
        server.process.wait()


def test_vllm_omni_0_26(model: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """The GPU host's version, laid over the installed one. Its worker is a process of its own, and must not be left."""
    import psutil

    overlay = os.environ.get("MEGADIFF_OVERLAY026", "")
    if not Path(overlay, "vllm_omni").is_dir():
        pytest.skip("MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26 (see docs: pip install --target)")
    server = start(model, tmp_path, "--sleep-mode", overlay=overlay)
    client, workers = server.client, []
    try:
        assert client.health()["vllm_omni"].startswith("0.26.")
        group = client.generate(REQUEST)
        assert gap(model, group) <= 1e-6
        assert gap(model, client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0)))) <= 1e-4
        longer = replace(
            REQUEST, prompt=replace(PROMPT, text="a much longer prompt", id="cd" * 8), sample_indices=(0, 1)
        )
        batched, other = client.generate_batch([REQUEST, longer])
        assert batched.conditioning["prompt_embeds"].shape == group.conditioning["prompt_embeds"].shape
        assert max(gap(model, batched), gap(model, other)) <= 1e-6
        before = image(client)
        changed = {name: tensor * 1.1 for name, tensor in weights.items()}
        held = push(client, changed, version=1, model=model)
        assert held == {name: fingerprint(tensor) for name, tensor in changed.items()}
        assert image(client) != before
        client.sleep()
        client.wake()
        with pytest.raises(ReplicaError, match=r"requests\[1\] .* too long"):
            client.generate_batch([REQUEST, replace(REQUEST, prompt=replace(PROMPT, text="🐱" * 2000))])
        assert client.generate(replace(REQUEST, policy_version=1)).policy_version == 1
        bound_lora_serves_and_sleeps(client, model, weights, version=2)
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert workers
    finally:
        server.process.kill()
        server.process.wait()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
