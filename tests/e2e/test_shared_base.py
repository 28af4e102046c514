"""A LoRA run whose replica maps the trainer's base: the same run, in one memory.

The replica dies in it and maps the base again, and a bit of the base that changes is found.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.parallel.collectives import AgreedError
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.bucket import encode_bucket
from megadiff.sync.shared_base import SharedBase
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.base import HttpTransport
from megadiff.sync.transports.shared_memory import FOLDER, PREFIX
from megadiff.tensors.manifest import folder_manifest
from megadiff.types import DTYPES, LoraSpec, Tensors
from tests.e2e.conftest import GATED
from tests.e2e.servers import start_replicas, stop
from tests.lora_tensors import linears, random_lora
from tests.meshes import one_rank_mesh

KEYS = (
    GATED,
    "lora.rank=4",
    "lora.alpha=8",
    "optim.lr=1e-3",
    "algorithm.kl_coef=0.04",
    "rollout.sleep=always",
    "sync.transport=shm",
)
SAME = ("loss/", "reward/", "policy/", "optim/", "parity/")
SPOILED = "transformer_blocks.1.attn.to_k.weight"


def spoil_run() -> None:
    """After update 1 the replica is killed; after update 3 a bit of the base is another.

    What maps the base is written down after each update.
    """
    import megadiff.train.loop as loop

    update = loop.update
    seen: list[dict] = []

    def spoiling(engine, *args, progress, **kwargs):
        figures = update(engine, *args, progress=progress, **kwargs)
        base = engine.shared_base
        seen.append({"trainer": os.getpid(), "num_bytes": base._flat.numel(), "maps": _maps()})
        Path("seen.json").write_text(json.dumps(seen))
        if progress.step == 0:
            (entry,) = Path().glob("*/replicas/node_0/replica_0.json")
            os.kill(json.loads(entry.read_text())["pid"], signal.SIGKILL)
        if progress.step == 2:
            base.tensors[SPOILED].view(torch.int32)[3, 2] ^= 1
        return figures

    loop.update = spoiling


def _maps() -> dict[int, list[dict]]:
    """Return process → its mappings of bases: file, rights, KiB that are there and KiB written."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (rows := list(_mappings(folder / "smaps"))):
            found[int(folder.name)] = rows
    return found


def _mappings(smaps: Path) -> Iterator[dict]:
    try:
        text = smaps.read_text()
    except OSError:  # it is gone, or another user's
        return
    row: dict = {}
    for line in text.splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # a mapping's first line: range, rights, …, file
            row = {"rights": fields[1], "file": fields[5] if len(fields) > 5 else ""}
        elif fields[0] in ("Rss:", "Private_Dirty:", "Anonymous:"):
            row[fields[0][:-1]] = int(fields[1])
        # Anonymous comes last of the three
        if fields[0] == "Anonymous:" and PREFIX in row["file"]:
            yield row


def test_the_replica_maps_the_trainers_base(trainer):
    apart = trainer.run(*KEYS, "lora.shared_base=never", name="apart")
    assert apart.code == 0, apart.stderr
    shared = trainer.run(*KEYS, name="shared", prepare=spoil_run)

    # the same run, although the replica died after the first step
    assert len(shared.rows) == len(apart.rows) == 3, shared.stderr
    for row, expected in zip(shared.rows, apart.rows, strict=True):
        keys = [key for key in expected if key.startswith(SAME)]
        assert len(keys) > 10
        assert {key: row[key] for key in keys} == {key: expected[key] for key in keys}
    events = (shared.folder / "events.jsonl").read_text()
    assert "replica_died" in events, events

    # the last push found the bit in the weights that the replica uses
    assert shared.code == 1
    assert "holds 1 of" in shared.stderr and "with other bits" in shared.stderr, shared.stderr
    assert f"transformer.{SPOILED} (sent" in shared.stderr

    _check_maps(json.loads((trainer.folder / "seen.json").read_text()))

    # the base never travelled; where it is apart, waking takes all of it each time
    assert all(row["sync/gib"] < apart.rows[0]["sync/gib"] / 10 for row in shared.rows)


def _check_maps(seen: list[dict]) -> None:
    """The trainer and one worker map the file, the worker without a page of its own."""
    workers = []
    for at_update in seen:
        trainer_pid, num_bytes = at_update["trainer"], at_update["num_bytes"]
        maps = {int(pid): rows for pid, rows in at_update["maps"].items()}
        (own,) = maps[trainer_pid]
        assert own["rights"] == "rw-s"
        theirs = {pid: rows for pid, rows in maps.items() if rows[0]["file"] == own["file"]}
        del theirs[trainer_pid]
        ((worker, (mapping,)),) = theirs.items()
        workers.append(worker)
        assert mapping["rights"] == "rw-p"
        assert mapping["Rss"] * 1024 >= num_bytes > 100_000
        assert mapping["Anonymous"] == 0, "a page was written to, and copied"
        assert not Path(FOLDER, own["file"]).exists()  # the run is over
    # another process after the kill
    assert workers[0] != workers[1] == workers[2]


class BaseSource:
    """An engine whose weights are a shared base."""

    lora: LoraSpec | None = None
    adapter: Tensors = {}

    def __init__(self, base: SharedBase) -> None:
        self.base = base
        self.changed = {"transformer"}

    def named_weights(self, bucket_bytes: int, components: object):
        yield [(f"transformer.{name}", tensor) for name, tensor in self.base.tensors.items()]

    def named_lora(self, bucket_bytes: int, components: object):
        yield list(self.adapter.items())

    def mark_pushed(self) -> None:
        self.changed = set()


FLOAT32 = ("--dtype", "float32")
FP8 = ("--dtype", "bfloat16", "--fp8")


# float32 of the installed one is in the run above
@pytest.mark.parametrize(("version", "flags"), [("0.26", FLOAT32), ("installed", FP8)])
def test_a_replica_of_either_vllm_omni_maps_a_base(version, flags, tiny_model, tmp_path):
    overlay = os.environ.get("MEGADIFF_OVERLAY026", "") if version == "0.26" else ""
    if version == "0.26" and not Path(overlay, "vllm_omni").is_dir():
        pytest.skip("MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26")
    command = ["-m", "megadiff.cli.serve", str(tiny_model), *flags]
    with _replica(tmp_path, command, overlay) as client:  # of its own weights
        expected = _image(client).json()["data"]
    with _replica(tmp_path, [*command, "--shared-base"], overlay) as client:
        if overlay:
            assert client.health()["vllm_omni"].startswith("0.26.")
        assert _map_and_sleep(client, tiny_model, dtype=flags[1]) == expected


@contextmanager
def _replica(folder: Path, command: list[str], overlay: str) -> Iterator[ReplicaClient]:
    servers = start_replicas(1, folder=folder, command=command, overlay=overlay)
    try:
        entry = json.loads((folder / "registry/replica_0.json").read_text())
        yield ReplicaClient(entry["url"], "replica_0", timeout_s=120)
    finally:
        stop(servers)


def _map_and_sleep(client: ReplicaClient, model: Path, *, dtype: str) -> list[dict]:
    """Return the image that it drew before and after it slept."""
    file = model / "transformer/diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(file).items()}
    base = SharedBase(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        dtype=DTYPES[dtype],
        served_names=SERVED_NAMES,
        device=torch.device("cpu"),
    )
    for name, tensor in tensors.items():
        base.tensors[name].copy_(tensor)
    manifest = folder_manifest(model, ("transformer",), dtype=dtype)
    source = BaseSource(base)
    sync = WeightSync(
        source,
        HttpTransport([client]),
        manifest,
        boxes={"replica_0": [{}]},
        bucket_bytes=1 << 30,
        cpu_group=one_rank_mesh().cpu_group,
        shared_base=base,
    )

    # it has no weights, and takes no copy of any
    assert client.health()["state"] == "asleep" and _image(client).status_code == 409
    client.weights_begin(0, manifest)
    with pytest.raises(ReplicaError, match="is of a base that this replica maps"):
        client.weights_bucket(
            encode_bucket([(f"transformer.{name}", tensor) for name, tensor in tensors.items()])
        )

    sync.push(1)
    drawn = _image(client)
    assert drawn.status_code == 200
    client.sleep()
    assert _image(client).status_code == 409
    sync.wake()
    assert sync.push(1)["sync/gib"] == 0
    assert _image(client).json()["data"] == drawn.json()["data"]

    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    source.lora = LoraSpec(rank=2, alpha=4.0, modules=linears(named))
    source.adapter = random_lora(named, source.lora)
    source.changed = {"transformer"}
    sync.push(1)
    with_lora = _image(client).json()["data"]
    assert with_lora != drawn.json()["data"]
    client.sleep()
    sync.wake()
    sync.push(1)
    assert _image(client).json()["data"] == with_lora

    base.tensors[SPOILED].view(torch.uint8)[3, 2] ^= 1
    sync.wake()
    with pytest.raises(AgreedError, match=f"with other bits.*transformer.{SPOILED}"):
        sync.push(2)
    assert _image(client).status_code == 409
    return drawn.json()["data"]


def _image(client: ReplicaClient) -> httpx.Response:
    body = {
        "prompt": "a red cat",
        "n": 1,
        "size": "64x64",
        "num_inference_steps": 2,
        "true_cfg_scale": 1.0,
        "seed": 42,
    }
    return httpx.post(f"{client.url}/v1/images/generations", json=body, timeout=60)
