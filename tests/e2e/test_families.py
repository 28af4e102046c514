"""Every family as a user trains it, each with one real replica: the gate and the family's own
faults, both engines, LoRA, and runs that go on under another layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.tiny_models import bagel, qwen_image_edit, sd3, wan22, z_image
from megadiff.rollout.client.client import ReplicaClient
from tests.e2e.conftest import GATED, Result, Trainer, train_in_ranks
from tests.e2e.fault_table import gate_under
from tests.e2e.servers import start_replicas, stop
from tests.extra import cases

BROKEN = Path(__file__).with_name("broken_replica.py")
GAP = "parity/log_prob_gap_max"
UNLIKE_GAP = "parity/unlike_log_prob_gap_max"
SCHEDULE = "parity/schedule_gap_max"
EMBEDDING = "parity/embedding_gap_max"
ANY = "gap_max"
FINE = "algorithm.clip_range=1e-6"  # the gate allows half of it: roundings to bfloat16 are found
VEOMNI = ("parallel.sp=2",)
MEGATRON = ("engine.backend=megatron", "parallel.tp=2")
SIZES = ((64, 64), (96, 48), (48, 96))  # of the images that are given, height and width
# of every family: points missing or moved, half of the guidance dropped, and the last two prompts'
# texts exchanged
COMMON_FAULTS = {
    "short": SCHEDULE,
    "shift": SCHEDULE,
    "unguided": ANY,
    "swapped": ANY,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's run needs.

    layout: of two ranks, for the runs that are compared with one rank's; the gradients of every
    layout are compared in tests/distributed/test_family_layouts.py.
    faults: beside COMMON_FAULTS → what the gate must say of each. num_images: of every data row,
    in these sizes.
    has_runs: False for a model that trains by the same code as another here.
    """

    write: Callable[[Path], None]
    layout: tuple[str, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ("rollout.guidance_scale=4.5",)
    num_images: int = 0
    sizes: tuple[tuple[int, int], ...] = SIZES
    has_runs: bool = True


EDIT_FAULTS = {
    "timestep": ANY,
    "first_row": ANY,
    "unmasked": ANY,
    "no_pictures": EMBEDDING,
    "no_references": ANY,
    "other_references": ANY,
}
FAMILIES = {
    "sd35": Family(
        write=sd3.write_tiny_pipeline,
        layout=VEOMNI,
        faults={"once": SCHEDULE, "timestep": ANY, "latents": ANY, "pooled": ANY},
    ),
    "z_image": Family(
        write=z_image.write_tiny_pipeline,
        layout=MEGATRON,
        faults={
            "timestep": ANY,
            "one_call": ANY,
            "unmasked": ANY,
            "sign": ANY,
            "stock_scale": ANY,
        },
    ),
    "bagel": Family(
        write=bagel.write_tiny_bagel,
        layout=VEOMNI,
        faults={
            "thousand": ANY,
            "first_row": ANY,
            "unmasked": ANY,
            "call_norm": ANY,
            "positions": ANY,
        },
    ),
    "wan21": Family(
        write=partial(wan22.write_tiny_pipeline, kind="t2v_1_3b"),
        layout=MEGATRON,
        faults={"timestep": ANY},
        overrides=("rollout.guidance_scale=4.5", "rollout.num_frames=5"),
    ),
    "wan22_i2v": Family(
        write=partial(wan22.write_tiny_pipeline, kind="i2v_a14b"),
        layout=VEOMNI,
        faults={
            "timestep": ANY,
            "no_references": ANY,
            "other_references": ANY,
            "no_mask": ANY,
        },
        overrides=(
            "rollout.guidance_scale=4.5",
            "rollout.guidance_scale_2=2.0",
            "rollout.num_frames=5",
            "rollout.images=true",
        ),
        num_images=1,
        sizes=((64, 64),),
    ),
    "edit_2509": Family(
        write=partial(qwen_image_edit.write_tiny_pipeline, kind="2509"),
        layout=MEGATRON,
        faults=EDIT_FAULTS,
        overrides=("rollout.true_cfg_scale=4.0", "rollout.images=true"),
        num_images=1,
        has_runs=False,
    ),
    "edit_2511": Family(
        write=partial(qwen_image_edit.write_tiny_pipeline, kind="2511"),
        layout=MEGATRON,
        faults={**EDIT_FAULTS, "same_time": ANY},
        overrides=("rollout.true_cfg_scale=4.0", "rollout.images=true"),
        num_images=2,
    ),
}


@dataclass(frozen=True)
class World:
    """A replica whose fault can be chosen, and a trainer."""

    family: Family
    trainer: Trainer
    fault_file: Path
    overrides: tuple[str, ...]

    def arguments(self, *overrides: str) -> list[str]:
        """Return those of `megadiff train`, for the gate alone: with texts of several lengths."""
        one_group = ("rollout.batch_size=4", "algorithm.group_size=4")
        command = self.trainer.command(*self.overrides, *one_group, FINE, GATED, *overrides)
        return command[command.index("megadiff.cli.train") + 1 :]

    def run(self, name: str, *overrides: str, num_processes: int = 1) -> Result:
        given = (*self.overrides, *overrides)
        return train_in_ranks(self.trainer, name, num_processes, *given)


RUNS = [name for name, family in FAMILIES.items() if family.has_runs]
LIKE_OTHERS = ("wan21", "wan22_i2v", "edit_2511")  # their runs; their gates are tried
ON_0_28 = ("wan21", "z_image", "edit_2511", "bagel")


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = folder / "model"
    family.write(model)
    fault_file = folder / "fault"
    fault_file.write_text("none")
    command = [str(BROKEN), str(fault_file), str(model), "--dtype", "float32", "--device", "cpu"]
    servers = start_replicas(
        1, folder=folder, command=[*command, "--weights", str(folder / "weights")]
    )
    overrides = [
        "rollout.mode=separate",
        "optim.lr=1e-3",
        f"rollout.registry={folder / 'registry'}",
        f"sync.folder={folder / 'weights'}",
        *family.overrides,
    ]
    if family.num_images:
        overrides.append(f"data.prompts={write_rows(folder, family)}")
    yield World(family, Trainer(folder, model), fault_file, tuple(overrides))
    stop(servers)


def write_rows(folder: Path, family: Family) -> Path:
    """Write four prompts of unlike length; the images of two of them have other sizes."""
    rng = np.random.default_rng(0)
    rows = []
    texts = (
        "make it red",
        "make the blue star left of the circle green",
        "red",
        "a darker blue, please",
    )
    for index, text in enumerate(texts):
        names = []
        for place in range(family.num_images):
            height, width = family.sizes[(index // 2 + place) % len(family.sizes)]
            pixels = rng.integers(0, 256, (4, 4, 3), np.uint8)
            names.append(f"{index}_{place}.png")
            Image.fromarray(pixels).resize((width, height)).save(folder / names[-1])
        rows.append({"prompt": text, "images": names})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("world", cases(FAMILIES, extra_ones=("edit_2509", "wan21")), indirect=True)
def test_the_gate_finds_each_fault(world: World, tmp_path: Path) -> None:
    """With guidance, and texts of several lengths in one call."""
    faults = {**COMMON_FAULTS, **world.family.faults}
    gaps, messages = gate_under(
        list(faults), fault_file=world.fault_file, arguments=world.arguments(), folder=tmp_path
    )
    assert gaps[GAP] <= 1e-7 and gaps[UNLIKE_GAP] <= 1e-7, gaps
    missed = {
        fault: messages[fault] for fault, said in faults.items() if said not in messages[fault]
    }
    assert not missed


@pytest.mark.parametrize("world", cases(RUNS, extra_ones=ON_0_28), indirect=True)
def test_the_gate_passes_on_the_gpu_hosts_vllm_omni(world: World, tmp_path: Path) -> None:
    """Weights are pushed to a replica of 0.26, which samples with guidance."""
    overlay = os.environ.get("MEGADIFF_OVERLAY026", "")
    if not Path(overlay, "vllm_omni").is_dir():
        pytest.skip("MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26")
    command = ["-m", "megadiff.cli.serve", str(world.trainer.model), "--dtype", "float32"]
    servers = start_replicas(
        1, folder=tmp_path, command=[*command, "--weights", str(tmp_path)], overlay=overlay
    )
    try:
        (entry,) = (tmp_path / "registry").glob("*.json")
        client = ReplicaClient(json.loads(entry.read_text())["url"], "replica_0", timeout_s=120)
        assert client.health()["vllm_omni"].startswith("0.26.")
        places = (f"rollout.registry={tmp_path / 'registry'}", f"sync.folder={tmp_path}")
        gaps, _ = gate_under(
            [],
            fault_file=world.fault_file,
            arguments=world.arguments(*places),
            folder=tmp_path,
        )
    finally:
        stop(servers)
    assert gaps[GAP] <= 1e-7 and gaps[UNLIKE_GAP] <= 1e-7, gaps


@pytest.mark.parametrize("world", cases(RUNS, extra_ones=LIKE_OTHERS), indirect=True)
def test_layout_does_not_matter(world: World) -> None:
    """Three steps, each from pushed weights: whole, and split in two. The gate has its own test."""
    expected_rows = world.run("one").rows
    assert len(expected_rows) == 3
    rows = world.run("two", *world.family.layout, num_processes=2).rows
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["reward/mean"] == pytest.approx(expected["reward/mean"], rel=2e-4)
        assert row["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=2e-4)
        assert row["loss/policy"] == pytest.approx(expected["loss/policy"], rel=2e-4, abs=2e-7)


@pytest.mark.parametrize("world", cases(RUNS, extra_ones=LIKE_OTHERS), indirect=True)
def test_lora_is_bound_in_every_layer(world: World) -> None:
    """Each push is verified by the fingerprints of what the replica bound, fused layers too; the
    run goes on under another layout.
    """
    lora = ("lora.rank=4", "lora.alpha=8", "checkpoint.every=1", "train.updates_per_step=1")
    rows = world.run("lora", GATED, *lora, "train.num_steps=2").rows
    assert rows[0][GAP] <= 1e-7
    # with one update a batch the trainer's log_probs are the replica's, of the LoRA it just bound
    assert max(row["policy/kl_old"] for row in rows) <= 1e-14
    more = world.run("lora", *lora, *MEGATRON, num_processes=2).rows
    assert [row["step"] for row in more if row["step"]] == [1, 2, 3]
    assert more[-1]["policy/kl_old"] <= 1e-13
