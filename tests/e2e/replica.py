"""One replica with its log, and what the tests ask of it."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from torch import Tensor

from megadiff.rollout.client.client import ReplicaClient
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.manifest import folder_manifest
from megadiff.types import LoraSpec, Prompt, RolloutRequest, Sampling
from tests.e2e.servers import Forked, environment, wait_for_announcements
from tests.lora_tensors import expected_prints, linears, merged, push_lora, random_lora

SAMPLING = Sampling(height=64, width=64, num_inference_steps=6, sde_window_range=(0, 5))
PROMPT = Prompt(
    text='a red cat, "hello"', id="ab" * 8, negative_text="bad", fields={"color": "red"}
)
REQUEST = RolloutRequest(
    prompt=PROMPT, sampling=SAMPLING, sample_indices=(0, 1, 2, 3), seed=3, step=1
)


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen | Forked
    client: ReplicaClient
    registry: Path
    log: Path

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


def start(
    model: Path, folder: Path, *options: str, fresh: bool = False, overlay: str = ""
) -> Server:
    """A replica named replica-7.

    fresh: in a new interpreter, as a user starts it, where `overlay` comes before all that is
    installed; else forked.
    """
    registry, log = folder / "registry", folder / "replica.log"
    command = ["-m", "megadiff.cli.serve", str(model), "--dtype=float32", "--port=0"]
    command += ["--name=replica-7", f"--registry={registry}", f"--parent-pid={os.getpid()}"]
    command += options
    process = _fresh(command, log, overlay) if fresh else Forked(command, log=log)
    wait_for_announcements(registry, {log: process})
    entry = json.loads((registry / "replica-7.json").read_text())
    assert entry["pid"] == process.pid
    return Server(process, ReplicaClient(entry["url"], entry["name"], timeout_s=120), registry, log)


def _fresh(command: list[str], log: Path, overlay: str) -> subprocess.Popen:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment(overlay),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def push(
    client: ReplicaClient, weights: dict[str, Tensor], *, version: int, model: Path
) -> dict[str, str]:
    client.weights_begin(version, folder_manifest(model, ("transformer",), dtype="float32"))
    items = list(weights.items())
    for first in range(0, len(items), 20):
        client.weights_bucket(encode_bucket(items[first : first + 20]))
    (worker,) = client.weights_commit(version)
    return worker["fingerprints"]


def image(client: ReplicaClient, **changes: object) -> bytes:
    body = {
        "prompt": "a red cat",
        "n": 1,
        "size": "64x64",
        "num_inference_steps": 4,
        "true_cfg_scale": 1.0,
        "seed": 42,
    }
    response = httpx.post(f"{client.url}/v1/images/generations", json=body | changes, timeout=60)
    assert response.status_code == 200, response.text
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def bound_lora_serves_and_sleeps(
    client: ReplicaClient, model: Path, weights: dict[str, Tensor], *, version: int
) -> None:
    """Live, the adapter samples as the weights do that it merges to, through the RL route and the
    images API alike; also when the base weights were freed and came back with it.
    """
    spec = LoraSpec(rank=3, alpha=5.0, modules=linears(weights))
    lora = random_lora(weights, spec)
    push(client, merged(weights, lora, spec), version=version, model=model)
    whole, whole_image = client.generate(REQUEST), image(client)
    for turn in range(2):
        answer = push_lora(client, weights, lora, spec, version=version + 1 + turn, model=model)
        assert answer["fingerprints"] == expected_prints(weights, lora, spec)
        assert answer["bound_modules"] == [f"transformer.{module}" for module in spec.modules]
        assert image_gap(image(client), whole_image) <= 1
        live = client.generate(REQUEST)
        assert (live.latents_GSLC - whole.latents_GSLC).abs().max() <= 1e-5
        assert (live.log_probs_GW - whole.log_probs_GW).abs().max() <= 1e-5
        assert (live.pixels_GFHWC.int() - whole.pixels_GFHWC.int()).abs().max() <= 1
        client.sleep()


def image_gap(one: bytes, other: bytes) -> int:
    """Of 255."""
    left, right = (np.asarray(Image.open(io.BytesIO(png)), dtype=int) for png in (one, other))
    return int(np.abs(left - right).max())
