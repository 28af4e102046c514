"""Z-Image as a user trains it, with one real replica: the gate and its own faults, both engines,
LoRA, and runs that go on under another layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from diffusers import ZImageTransformer2DModel

from examples.tiny_models.z_image import write_tiny_pipeline
from megadiff.models.registry import build_adapter
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.e2e.conftest import Result, Trainer, train_in_ranks
from tests.e2e.fault_table import gate_under
from tests.e2e.recompute import adapter_gap
from tests.e2e.replica import start
from tests.e2e.servers import start_replicas, stop

BROKEN = Path(__file__).with_name("broken_replica.py")
COMMON = ("rollout.mode=separate", "rollout.guidance_scale=4.5", "optim.lr=1e-3")
GAP = "parity/log_prob_gap_max"
UNLIKE_GAP = "parity/unlike_log_prob_gap_max"
FAULTS = {  # → what the gate must say of it
    "one_call": "of 4 (prompt '",
    "unmasked": "gap_max",
    "sign": "gap_max",
    "short": "parity/schedule_gap_max",
    "shift": "parity/schedule_gap_max",
    "timestep": "gap_max",
    "unguided": "gap_max",
    "stock_scale": "gap_max",
    "swapped": "gap_max",
}
LAYOUTS = {
    "veomni_sp2": ["parallel.sp=2"],
    "megatron_tp2": ["engine.backend=megatron", "parallel.tp=2"],
}


@dataclass(frozen=True)
class World:
    """A replica whose fault can be chosen, and a trainer."""

    trainer: Trainer
    fault_file: Path
    overrides: tuple[str, ...]

    def run(self, name: str, *overrides: str, num_processes: int = 1) -> Result:
        given = (*self.overrides, *overrides)
        return train_in_ranks(self.trainer, name, num_processes, *given)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("z_image")
    model = folder / "model"
    write_tiny_pipeline(model)
    fault_file = folder / "fault"
    fault_file.write_text("none")
    command = [str(BROKEN), str(fault_file), str(model), "--dtype", "float32", "--device", "cpu"]
    servers = start_replicas(
        1, folder=folder, command=[*command, "--weights", str(folder / "weights")]
    )
    places = (f"rollout.registry={folder / 'registry'}", f"sync.folder={folder / 'weights'}")
    yield World(Trainer(folder, model), fault_file, (*COMMON, *places))
    stop(servers)


def test_the_gate_finds_each_fault(world: World, tmp_path: Path) -> None:
    """With guidance, and texts that fill up to different multiples of 32 in one call."""
    command = world.trainer.command(*world.overrides, "rollout.batch_size=4")
    arguments = command[command.index("megadiff.cli.train") + 1 :]
    gaps, messages = gate_under(
        list(FAULTS), fault_file=world.fault_file, arguments=arguments, folder=tmp_path
    )
    assert gaps[GAP] <= 1e-7 and gaps[UNLIKE_GAP] <= 1e-7
    missed = {
        fault: messages[fault] for fault, said in FAULTS.items() if said not in messages[fault]
    }
    assert not missed


@pytest.fixture(scope="module")
def one_process(world: World) -> list[dict]:
    """The rows that every layout must have: three steps, each from pushed weights."""
    return world.run("one").rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(world: World, one_process: list[dict], layout: str) -> None:
    rows = world.run(layout, *LAYOUTS[layout], num_processes=2).rows
    assert len(rows) == 3
    for row, expected in zip(rows, one_process, strict=True):
        assert row["reward/mean"] == pytest.approx(expected["reward/mean"], rel=2e-4)
        assert row["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=2e-4)
        assert row["loss/policy"] == pytest.approx(expected["loss/policy"], rel=2e-4, abs=2e-7)


def test_lora_is_bound_in_the_fused_layers(world: World) -> None:
    """Each push is verified by the fingerprints of what the replica bound, w1 and w3 of w13 too;
    the run goes on under another layout.
    """
    lora = ("lora.rank=4", "lora.alpha=8", "checkpoint.every=1", "train.updates_per_step=1")
    rows = world.run("lora", *lora, "train.num_steps=2").rows
    assert rows[0][GAP] <= 1e-7
    # with one update a batch the trainer's log_probs are the replica's, of the LoRA it just bound
    assert max(row["policy/kl_old"] for row in rows) <= 1e-14
    more = world.run("lora", *lora, *LAYOUTS["megatron_tp2"], num_processes=2).rows
    assert [row["step"] for row in more if row["step"]] == [1, 2, 3]
    assert more[-1]["policy/kl_old"] <= 1e-13


def test_vllm_omni_0_26(tmp_path: Path) -> None:
    """The GPU host's version, whose compiled SiluAndMul does not load beside this torch."""
    overlay = os.environ.get("MEGADIFF_OVERLAY026", "")
    if not Path(overlay, "vllm_omni").is_dir():
        pytest.skip("MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26")
    model = tmp_path / "model"
    write_tiny_pipeline(model)
    adapter = build_adapter(model)
    transformer = ZImageTransformer2DModel.from_pretrained(model / "transformer")
    sampling = Sampling(height=64, width=64, num_inference_steps=8, guidance_scale=4.5)
    requests = [
        RolloutRequest(
            prompt=Prompt(text=text, id=letter * 16),
            sampling=sampling,
            sample_indices=(0, 1),
            seed=0,
            step=1,
        )
        for letter, text in (("a", "a red circle"), ("b", "a wide photograph of a lake " * 9))
    ]
    server = start(model, tmp_path, fresh=True, overlay=overlay)
    try:
        assert server.client.health()["vllm_omni"].startswith("0.26.")
        for group in server.client.generate_batch(requests):
            assert adapter_gap(adapter, transformer, group) <= 1e-7
    finally:
        server.end()
