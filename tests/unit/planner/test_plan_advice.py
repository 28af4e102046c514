"""`megadiff plan`: what it says, advises and refuses, and what waits on the host."""

from __future__ import annotations

import json
import re

import pytest

from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.models.registry import build_adapter
from megadiff.planner.engine_memory import GIB
from megadiff.planner.offload_choice import offload_choice
from tests.unit.planner.recipe import EAGER, H100, MODEL, RECIPE, ROOT, SEPARATE, sizes


def test_optimizer_state_waits_on_the_host_where_nothing_fits_otherwise(plan):
    """All weights of Qwen-Image on eight GPUs of 80 GB, and not where there is memory for it."""
    found, code = plan(*H100, "algorithm.ema_decay=0.9", world_size=8)
    taken = found["layouts"][found["pick"]]
    assert code == 0 and sizes(taken) == ("veomni", 8, 1, 1, 1) and taken["offloads"]
    assert found["overrides"].endswith(" engine.offload=always")
    moved = taken["static"]["optimizer"] + taken["static"]["average"]
    assert taken["host"]["offloaded optimizer"] == moved > 28 * GIB
    for name, parts in taken["phases"].items():
        waits = 0 if name != "update" else moved
        assert parts["optimizer"] + parts["average"] == waits, name

    never, code = plan(*H100, "engine.offload=never", world_size=8)
    assert code == 1 and never["pick"] is None
    kept = never["layouts"][0]["phases"]["rollout"]["optimizer"]
    assert kept == taken["static"]["optimizer"]

    large, _ = plan(world_size=8)
    assert not large["layouts"][large["pick"]]["offloads"]
    separate, _ = plan(*H100, *SEPARATE, world_size=8)
    assert not any(layout["offloads"] for layout in separate["layouts"])


def test_the_hosts_memory_counts_too(plan, plan_text):
    """Of a node with less than its GPUs' states need, nothing fits, and both numbers are said."""
    found, code = plan(*H100, "--host-gib", "100", world_size=8)
    assert code == 1 and found["machine"]["host_bytes"] == 100 * GIB
    forced, code = plan(*H100, "--host-gib", "100", "engine.offload=always", world_size=8)
    assert code == 1 and not any(layout["fits"] for layout in forced["layouts"])
    asked = [*H100, "--host-gib", "100", "engine.offload=always", "--world-size", "8"]
    text = plan_text(*asked, code=1)
    assert re.search("its GPUs suffice, but [0-9.]+ GiB of host memory a GPU > 11.2 GiB", text)
    assert "over in host memory" in text


def test_a_run_decides_as_the_plan_does(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config([RECIPE, "train.microbatch_size=8"])
    adapter = build_adapter(ROOT / "assets/qwen_image")
    for gib, host_gib, expected in (
        (79.1, 1024, "always"),
        (79.1, 100, "never"),
        (139.8, 1024, "never"),
    ):
        choice, reason = offload_choice(
            config,
            adapter,
            world_size=8,
            ranks_per_node=8,
            num_bytes=int(gib * GIB),
            host_bytes=host_gib * GIB,
        )
        assert choice == expected, (gib, host_gib)
        assert choice == "never" or "would take 87.2 of 71.2 GiB; 18.9 GiB" in reason
        is_short = gib < 100 and choice == "never"
        assert ("does not fit either way: rollout takes 87.2 of 71.2 GiB" in reason) == is_short


def test_text_says_what_to_set(plan_text):
    text = plan_text(*EAGER, "--world-size", "8", "parallel.tp=4", "engine.backend=megatron")
    assert (
        "20.43 B parameters in bfloat16 on 8 x h200, 139.8 GiB each, of which 10% are kept "
        "free: 125.8 GiB" in text
    )
    assert (
        "> take: engine.backend=veomni parallel.dp=8 parallel.dp_replicate=1 parallel.sp=1 "
        "parallel.tp=1" in text
    )
    assert "* is what the config asks for; it fits too" in text
    first = (
        "engine.backend=megatron parallel.dp=4 parallel.dp_replicate=1 parallel.sp=1 parallel.tp=2"
    )
    assert f"of engine.backend=megatron the first: {first} parallel.sequence_parallel=true" in text


def test_nothing_fits(plan_text):
    text = plan_text("--world-size", "2", "--gpu", "a100-40", code=1)
    assert "nothing fits. Nearest: engine.backend=" in text
    assert "GiB > 35.5 GiB in update: " in text and "activations" in text
    hint = re.search("^> it fits with: (.*)$", text, re.M)[1]
    assert "--world-size 16 " in hint and "rollout.mode=separate" in hint
    # as many as the run waits for
    assert "rollout.num_replicas=16 " in hint
    assert "You then start 16 replicas (rollout.tp=1) on other GPUs" in text

    # Followed, it fits, and the layout that it names is the one to take.
    followed = json.loads(plan_text("--gpu", "a100-40", "--json", *hint.split()))
    assert followed["config"] == followed["pick"]


def test_replicas_over_two_gpus_are_tried(plan_text):
    """The transformer's weights alone leave no memory beside a trainer's share."""
    asked = ["train.microbatch_size=4", "engine.activation_memory_budget=0"]
    arguments = ["--world-size", "8", "--memory-gib", "60", *asked]
    text = plan_text(*arguments, code=1)
    assert "GiB > 54.0 GiB in rollout: " in text and "replica at work" in text
    hint = re.search("^> it fits with: (.*)$", text, re.M)[1]
    assert hint.startswith("rollout.tp=2 engine.backend=")
    assert "* is what the config asks for" not in plan_text(*arguments, *hint.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        # replicas stay awake beside LoRA, and a shared card is too small for both
        ("qwen_image_flowgrpo_lora_4xh200", ("--world-size", "4", "--memory-gib", "24")),
        # of two experts the idle one's state waits on the host
        ("wan22_t2v_a14b_flowgrpo_lora_8xh200", (*SEPARATE, "rollout.sleep=auto")),
    ],
)
def test_what_a_plan_advises_is_not_refused(capsys, recipe, arguments):
    command = ["plan", str(ROOT / f"configs/recipes/{recipe}.yaml")]
    if "--world-size" not in arguments:
        command += ["--world-size", "8"]
    code = main([*command, *arguments])
    text = capsys.readouterr().out
    advice = re.search("^> (it fits with|take): (.*)$", text, re.M)
    assert advice, text
    assert code == (advice[1] != "take")
    assert main([*command, *arguments, *advice[2].split()]) == 0, capsys.readouterr().err


def test_a_larger_budget_that_fits_is_named(plan_text):
    """Its update is as large as said; the next one does not fit."""

    def text(*arguments: str) -> str:
        return plan_text("--world-size", "8", "--memory-gib", memory, *arguments)

    memory = "122"
    ((budget, gib),) = re.findall(r"budget=(\S+) fits too, with (\S+) GiB in update", text())
    assert 0.25 < float(budget) < 0.5
    assert "fits too" not in text(f"engine.activation_memory_budget={budget}")
    row = next(
        line
        for line in text(f"engine.activation_memory_budget={budget}").splitlines()
        if line.startswith("> ")
    )
    assert gib in row.split()
    more = f"engine.activation_memory_budget={float(budget) + 0.05:g}"
    (row,) = [line for line in text(more).splitlines() if line[2:].split()[:2] == ["veomni", "8"]]
    assert " over in update" in row
    memory = "1000"
    assert "budget=0.5 fits too" in text() and "fits too" not in text(
        "engine.activation_memory_budget=0.5"
    )


def test_layouts_that_cannot_run_share_a_line(capsys):
    z_image = str(ROOT / "configs/recipes/z_image_base_flowgrpo_4xh200.yaml")
    assert main(["plan", z_image, "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert "  and 8 layouts that cannot run: sp*tp = 8 does not divide the model's 30 heads" in text
    assert text.count("does not divide the model's") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", "0"), "--world-size 0 is not a positive"),
        (("--world-size", "12"), "--world-size 12 is not a multiple of --gpus-per-node 8"),
        (("--world-size", "4", "--headroom", "1.5"), "--headroom 1.5 is not in [0, 1)"),
        (("--world-size", "4", "--memory-gib", "-1"), "--memory-gib -1.0 is not positive"),
        (("--world-size", "4", "--memory-gib", "nan"), "--memory-gib nan is not positive"),
        (("--world-size", "4", "--host-gib", "inf"), "--host-gib inf is not a positive finite"),
        (("--world-size", "4", "train.microbatchsize=2"), "did you mean train.microbatch_size?"),
        (
            ("--world-size", "4", "rollout.height=500"),
            "rollout.height=500 is not a positive multiple of 16",
        ),
        (("--world-size", "4", "parallel.tp=2"), "parallel.tp=2 with engine.backend=veomni"),
        (("--world-size", "4", "model.path=nowhere"), "model folder nowhere does not exist"),
        (
            (
                "--world-size",
                "4",
                "model.float32_streams=true",
                f"model.path={ROOT / 'assets/wan22_ti2v_5b'}",
            ),
            "model.float32_streams=true, but Wan2.1 and Wan2.2's streams",
        ),
    ],
)
def test_wrong_input_is_refused(capsys, arguments, message):
    assert main(["plan", RECIPE, MODEL, *EAGER, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
