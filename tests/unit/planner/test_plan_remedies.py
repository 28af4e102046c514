"""What `megadiff plan` advises is allowed and complete; what a run would refuse, it refuses too."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.models.registry import build_adapter
from megadiff.planner import remedies
from megadiff.planner.engine_memory import GIB
from megadiff.planner.remedies import more_machines
from megadiff.planner.work import Machine
from megadiff.train.dry_run import node_lines
from tests.unit.planner.recipe import EAGER, MODEL, RECIPE, ROOT, SEPARATE

# One row: no smaller microbatch is left to try.
ONE_GPU = [RECIPE, MODEL, *EAGER, "train.microbatch_size=1", "--world-size", "1"]
MACHINE = Machine(
    world_size=8, gpus_per_node=8, num_bytes=80 * GIB, host_bytes=1 << 40, headroom=0.1
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # as many as train/connect.py waits for: one for every tp of all ranks' GPUs
        (("rollout.tp=2",), "you start 8 replicas (rollout.tp=2)"),
        (("rollout.num_replicas=3",), "you start 3 replicas (rollout.tp=1)"),
        (("run.device=cpu",), "you start 1 replica (rollout.tp=1)"),
    ],
)
def test_separate_replicas_are_counted_as_the_run_waits_for_them(settings, expected):
    config = load_config([RECIPE, MODEL, *SEPARATE, *settings])
    assert expected in node_lines(config, world_size=16, ranks_per_node=8)[-1]


def test_more_gpus_are_whole_nodes():
    def sizes(world_size: int) -> list[int]:
        machines = more_machines(replace(MACHINE, world_size=world_size))
        return [machine.world_size for machine in machines]

    assert sizes(1) == [2, 4, 8]
    # 12 are a node and a half
    assert sizes(3) == [6, 24]
    assert sizes(6) == [24, 48]
    assert sizes(8) == [16, 32, 64]


def test_lora_is_planned_before_it_is_advised(capsys, monkeypatch):
    """Megatron refuses FP8 beside it. No more GPUs are tried, on which all weights would fit."""
    monkeypatch.setattr(remedies, "MORE_GPUS", ())
    fp8 = ["plan", *ONE_GPU, "--gpu", "h100", "engine.fp8=tensorwise"]
    for backend, beginning in (
        ("veomni", "lora.rank=32 "),
        ("megatron", "lora.rank=32 engine.fp8=none "),
    ):
        asked = [*fp8, f"engine.backend={backend}"]
        assert main(asked) == 1
        hint = re.search("^> it fits with: (.*)$", capsys.readouterr().out, re.M)[1]
        assert hint.startswith(beginning)
        assert ("engine.fp8" in hint) == (backend == "megatron")
        assert main([*asked, *hint.split()]) == 0

    # Where it is on, it is no advice.
    assert main(["plan", *ONE_GPU, "--gpu", "a100-40", "lora.rank=32"]) == 1
    text = capsys.readouterr().out
    assert "on up to 1 GPUs either; try GPUs with more memory, or a smaller model" in text


def test_a_model_without_layers_for_lora_gets_no_such_advice(monkeypatch):
    config = load_config([RECIPE, MODEL])
    adapter = build_adapter(Path(config.model.path))
    adapter.plan = replace(adapter.plan, lora_targets=())
    model = SimpleNamespace(adapter=adapter)
    plan = SimpleNamespace(config=config, text_tokens=0, model=model, machine=MACHINE)
    assert remedies._lora_remedy(plan) is None


def bagel_stages(tmp_path: Path) -> Path:
    file = tmp_path / "stages.yaml"
    stages = {"pipeline": "bagel_single_stage", "stages": [{"stage_id": 0, "devices": "0"}]}
    file.write_text(yaml.safe_dump(stages))
    return file


def refusal(capsys, *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_what_a_run_refuses_is_refused(capsys, tmp_path, monkeypatch):
    qwen = [RECIPE, MODEL, *EAGER, "--world-size", 16]
    error = refusal(capsys, *qwen, "rollout.tp=5")
    assert "rollout.tp=5 does not divide the model's 24 attention heads" in error
    error = refusal(capsys, *qwen, "rollout.num_replicas=3")
    assert "rollout.num_replicas=3 over 2 nodes: every node of a colocated run" in error

    bagel = [
        ROOT / "configs/recipes/bagel_flowgrpo_4xh200.yaml",
        f"model.path={ROOT / 'assets/bagel'}",
        "--world-size",
        4,
    ]
    stages = f"rollout.stage_config={bagel_stages(tmp_path)}"
    error = refusal(capsys, *bagel, stages, "rollout.tp=2")
    assert "devices names 1 GPUs, rollout.tp=2 takes 2" in error

    turbo = shutil.copytree(ROOT / "assets/z_image", tmp_path / "turbo")
    scheduler = turbo / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift": 3.0}))
    z_image = ROOT / "configs/recipes/z_image_base_flowgrpo_4xh200.yaml"
    error = refusal(capsys, z_image, f"model.path={turbo}", "--world-size", 4)
    assert "shift=3.0, so this is Z-Image-Turbo" in error

    error = refusal(capsys, *qwen, "rollout.fp8=true", "algorithm.old_log_prob=rollout")
    assert "rollout.fp8 with algorithm.old_log_prob=rollout" in error

    # the smallest change that makes sizes odd: the rule itself
    monkeypatch.setattr("megadiff.engines.fp8.FP8_MULTIPLE", 1000)
    error = refusal(capsys, *qwen, "engine.fp8=rowwise")
    assert "FP8 products need weights whose sizes are multiples of 1000" in error


def test_a_remedy_that_a_run_would_refuse_is_none(tmp_path):
    """A stage file that names one GPU takes no replica of two workers."""
    adapter = build_adapter(ROOT / "assets/bagel")
    plan = SimpleNamespace(
        text_tokens=64,
        model=SimpleNamespace(adapter=adapter),
        machine=MACHINE,
        replicas=SimpleNamespace(per_gpu=1, sleeps=True),
    )
    recipe = str(ROOT / "configs/recipes/bagel_flowgrpo_4xh200.yaml")
    stages = f"rollout.stage_config={bagel_stages(tmp_path)}"
    for settings, expected in (((), True), ((stages,), False)):
        plan.config = load_config([recipe, f"model.path={ROOT / 'assets/bagel'}", *settings])
        step = {"rollout.tp": 2}
        assert step in remedies._steps(plan)
        assert remedies._Tries(plan).is_allowed([step], MACHINE) == expected
