"""What benchmarks of a real replica share: its model folder, and the process itself."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from random_weights import write_random_pipeline

from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.processes import ReplicaProcess, environment_token
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.spec import ReplicaSpec

START_TIMEOUT_S = 900.0


def served_model(
    folder: Path, scratch: Path, *, device: str, layers: int, text_layers: int
) -> Path:
    """Return the folder, or one in scratch with its configs and random weights.

    Scratch is used where the folder has no weights, or other depths are asked for (0: as its
    configs say). 55 GB at Qwen-Image's full size.
    """
    if not (layers or text_layers) and any((folder / "transformer").glob("*.safetensors")):
        return folder
    write_random_pipeline(
        folder, scratch / "model", device=device, num_layers=layers, text_layers=text_layers
    )
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return scratch / "model"


def start_replica(
    model: Path,
    scratch: Path,
    stack: ExitStack,
    *,
    dtype: str,
    device: str,
    gpus: tuple[int, ...] = (),
    compile: bool = False,
    fp8: bool = False,
    tp: int = 1,
    weights: Path | None = None,
) -> tuple[ReplicaProcess, ReplicaClient]:
    """Start a replica, and return it once it answers; it is stopped when the stack closes.

    device: auto, cpu or cuda. It has the token of MEGADIFF_TOKEN, where that is set.
    """
    token = environment_token()
    spec = ReplicaSpec(
        model=model,
        name="replica",
        port=0,
        device=device,
        dtype=dtype,
        registry=scratch / "registry",
        weights=weights,
        tp=tp,
        parent_pid=os.getpid(),
        compile=compile,
        fp8=fp8,
    )
    process = ReplicaProcess(
        spec,
        log=scratch / "replica.log",
        num_threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        gpus=gpus if device == "cuda" else (),
        token=token,
    )
    stack.callback(process.stop)
    (entry,) = wait_until_announced(
        scratch / "registry",
        count=1,
        timeout_s=START_TIMEOUT_S,
        processes=[process],
        token=token,
    )
    return process, ReplicaClient(entry["url"], entry["name"], token=token, timeout_s=600)
