"""Bytes and seconds on links, against sums made by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megadiff.cli.main import main
from megadiff.parallel.mesh import Layout
from megadiff.planner.engine_memory import ModelShape, Placing, Work
from megadiff.planner.network import (
    FEATURES,
    GRADIENTS,
    REPLICAS,
    TOKENS,
    WEIGHTS,
    Links,
    StepPasses,
    Traffic,
    link_seconds,
    push_traffic,
    step_traffic,
)
from tests.unit.planner.recipe import MODEL, RECIPE, ROOT, WORK

PARAMETERS = 20_430_401_088
# nothing reads the last block's text after its attention: a product and an MLP
UNUSED = 3072 * 3072 + 3072 + 2 * 4 * 3072 * 3072 + 5 * 3072
TRAINED = PARAMETERS - UNUSED
NODE = Links(gpus_per_node=8, nvlink=300e9, network=400e9)


def placing(world_size: int, *, backend: str = "veomni", **sizes: int) -> Placing:
    axes = {"dp_replicate": 1, "sp": 1, "tp": 1} | sizes
    dp = world_size // axes["sp"] // axes["tp"]
    layout = Layout(world_size=world_size, dp=dp, **axes)
    return Placing(backend=backend, layout=layout, sequence_parallel=axes["tp"] > 1)


def sent(model: ModelShape, place: Placing, of: Work, passes: StepPasses) -> dict[str, float]:
    return {row.purpose: row.sent for row in step_traffic(model, place, of, passes)}


def test_fsdp_gathers_for_each_microbatch_where_whole_weights_do_not_fit(qwen):
    """2 updates of 4 microbatches: a block is gathered forward and backward, the rest once."""
    passes = StepPasses(updates=2, microbatches=4)
    units = qwen.units(qwen.shapes)
    rest = units.pop(None)
    blocks = sum(units.values())
    assert rest + blocks == PARAMETERS
    found = sent(qwen, placing(8), WORK, passes)
    assert found == pytest.approx(
        {
            WEIGHTS: 8 * 2 * (rest + 2 * blocks) * 7 / 8,
            GRADIENTS: 8 * 4 * TRAINED * 7 / 8,
        },
        rel=1e-4,  # padding
    )
    guided = sent(qwen, placing(8), replace(WORK, passes=2), passes)
    assert guided[WEIGHTS] == pytest.approx(8 * 2 * (rest + 4 * blocks) * 7 / 8, rel=1e-4)
    assert guided[GRADIENTS] == found[GRADIENTS]


def test_and_once_an_update_where_they_do(qwen):
    passes = StepPasses(updates=2, microbatches=4)
    found = sent(qwen, placing(8), replace(WORK, accumulates=True), passes)
    assert found == pytest.approx(
        {WEIGHTS: 2 * 2 * PARAMETERS * 7 / 8, GRADIENTS: 2 * 4 * TRAINED * 7 / 8}, rel=1e-4
    )
    # a forward without gradient gathers all once more
    more = StepPasses(updates=2, microbatches=4, forwards=3)
    extra = sent(qwen, placing(8), replace(WORK, accumulates=True), more)[WEIGHTS] - found[WEIGHTS]
    assert extra == pytest.approx(3 * 2 * PARAMETERS * 7 / 8, rel=1e-4)


def test_copies_reduce_their_shards_across_nodes(qwen):
    """Of 4 nodes: an eighth of the gradients goes out of each GPU, twice round the four."""
    passes = StepPasses(updates=1, microbatches=1)
    rows = step_traffic(qwen, placing(32, dp_replicate=4), WORK, passes)
    by_purpose = {row.purpose: row for row in rows}
    copies = by_purpose.pop(REPLICAS)
    assert copies.sent == pytest.approx(2 * 4 * TRAINED / 8 * 3 / 4, rel=1e-4)
    assert copies.members(8) == 1
    assert copies.network_bytes(8) == pytest.approx(8 * copies.sent)
    assert copies.nvlink_s(NODE) == 0
    assert copies.network_s(NODE) == pytest.approx(8 * copies.sent / 400e9)
    assert [row.network_bytes(8) for row in by_purpose.values()] == [0, 0]


def test_shards_of_all_nodes_go_round_all_of_them():
    row = Traffic(purpose=WEIGHTS, num_bytes=32e9, size=32, is_hidden=True)
    assert row.sent == 31e9
    assert row.network_bytes(8) == 31e9  # one ring, that goes out of a node once
    assert (row.nvlink_s(NODE), row.network_s(NODE)) == (31 / 300, 31 / 400)
    lone = Traffic(purpose=WEIGHTS, num_bytes=32e9, size=8, is_hidden=True)
    assert (lone.network_bytes(8), lone.network_s(NODE)) == (0, 0)


def test_hidden_rings_share_no_link_and_others_wait_for_one_another():
    within = Traffic(purpose=WEIGHTS, num_bytes=8e9, size=8, is_hidden=True)
    across = Traffic(purpose=REPLICAS, num_bytes=4e9, size=4, stride=8, rounds=2, is_hidden=True)
    assert link_seconds([within, across], NODE, is_hidden=True) == max(7 / 300, 6 / 50)
    blocking = [Traffic(purpose=TOKENS, num_bytes=8e9, size=8)] * 2
    assert link_seconds(blocking, NODE, is_hidden=False) == pytest.approx(2 * 7 / 300)
    assert link_seconds(blocking, NODE, is_hidden=True) == 0


@pytest.mark.parametrize(("budget", "recomputed"), [(0.0, 60), (0.5, 30), (1.0, 0)])
def test_ulysses_exchanges_heads_for_tokens(qwen, budget, recomputed):
    """Query, key, value and output of this rank's tokens: forward, backward and again."""
    passes = StepPasses(updates=1, microbatches=1)
    local = 16 * (1024 + 64) // 4 * 3072 * 2
    exchanges = 4 * (2 * 60 + recomputed) * local * 3 / 4
    stream = 3 * 16 * 1024 * 3072 * 2 * 3 / 4  # gathered after the blocks, and its gradient summed
    found = sent(qwen, placing(4, sp=4), replace(WORK, budget=budget), passes)
    assert found[TOKENS] == exchanges + stream


def test_tensor_parallelism_gathers_and_scatters_around_attention_and_mlp(qwen):
    """2 of each a block and pass; backward gathers the MLP's input again; all is recomputed."""
    passes = StepPasses(updates=1, microbatches=1)
    tokens = 16 * (1024 + 64) * 3072 * 2 * 3 / 4
    found = sent(qwen, placing(4, backend="megatron", tp=4), WORK, passes)
    assert found == {FEATURES: 60 * (4 + 5 + 4) * tokens}
    plain = placing(4, backend="megatron", tp=4)
    plain = Placing(backend="megatron", layout=plain.layout)
    assert sent(qwen, plain, WORK, passes) == {FEATURES: 60 * 3 * 2 * 2 * tokens}


def test_a_push_is_the_same_for_any_number_of_nodes(qwen):
    pushed = 2 * PARAMETERS
    rows = [
        push_traffic(place, pushed_bytes=pushed, links=NODE, is_separate=False)
        for place in (placing(8), placing(64, dp_replicate=8))
    ]
    assert rows[0] == rows[1]
    assert rows[0][0].sent == pushed * 7 / 8
    _, chain = push_traffic(placing(8), pushed_bytes=pushed, links=NODE, is_separate=True)
    assert chain.sent == chain.network_bytes(8) == pushed
    assert chain.network_s(NODE) == pytest.approx(pushed / 50e9)  # from one GPU


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    main(["plan", RECIPE, MODEL, "--text-tokens", "64", "--json", *arguments])
    return json.loads(capsys.readouterr().out)


def test_nodes_and_gpus_a_node(capsys):
    sizes = [
        plan(capsys, *arguments.split())["machine"]
        for arguments in (
            "--nodes 2",
            "--world-size 16",
            "--nodes 4 --world-size 16",
            "--nodes 4 --gpus-per-node 4",
        )
    ]
    assert [(size["world_size"], size["gpus_per_node"]) for size in sizes] == [
        (16, 8),
        (16, 8),
        (16, 4),
        (16, 4),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "neither --world-size nor --nodes is given"),
        ("--nodes 3 --world-size 16", "--world-size 16 is not --nodes 3; leave one of them out"),
        ("--nodes 2 --world-size 16 --gpus-per-node 4", "--nodes 2 of --gpus-per-node 4"),
        ("--nodes 0", "--nodes 0 is not a positive"),
        ("--nodes 2 --network-gbs -1", "--network-gbs -1.0 is not a positive"),
    ],
)
def test_wrong_sizes_are_refused(capsys, arguments, message):
    assert main(["plan", RECIPE, MODEL, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_slow_network_stops_the_scaling_earlier(capsys):
    prompts = "train.prompts_per_step=4096"
    fast, slow, slower = (
        plan(capsys, "--nodes", "2", prompts, "--network-gbs", speed)
        for speed in ("400", "20", "10")
    )
    assert fast["links"]["network"] == 400e9
    assert fast["nodes"][0] == 512 and "dp=8192 does not divide" in fast["nodes"][1]
    assert fast["nodes"][0] > slow["nodes"][0] > slower["nodes"][0]
    assert "s for links, beside" in slow["nodes"][1]


def test_the_work_of_a_step_is_the_models_own(capsys):
    """docs/performance.md: 512 samples on 4 H200s train for 30.8 s and are drawn in 38.5 s."""
    found = plan(capsys, "--world-size", "4")
    network = found["layouts"][found["pick"]]["network"]
    assert 25 < network["train_s"] < 36
    assert 33 < network["rollout_s"] < 44
    separate = plan(capsys, "--nodes", "1", "rollout.mode=separate", "rollout.registry=r")
    assert separate["layouts"][0]["network"]["rollout_s"] == 0


def test_fp8_replicas_draw_faster(capsys):
    """docs/performance.md: 32 samples with LoRA take one H200 20.9 s, FP8 replicas 12.5 s."""
    recipe = str(ROOT / "configs/recipes/qwen_image_flowgrpo_lora_1xh100.yaml")
    size = ["--world-size", "1", "--text-tokens", "64", "--json", "train.prompts_per_step=2"]
    rollout_s = []
    for fp8 in ("false", "true"):
        main(["plan", recipe, MODEL, *size, f"rollout.fp8={fp8}"])
        layout = json.loads(capsys.readouterr().out)["layouts"][0]
        rollout_s.append(layout["network"]["rollout_s"])
    assert rollout_s == pytest.approx([20.9, 12.5], rel=0.1)


def test_shards_across_nodes_are_named_with_both_figures(plan_text):
    text = plan_text("--nodes", "2")
    assert "* parallel.dp_replicate=1 shards weights over 16 GPUs, a node has 8: " in text
    assert "parallel.dp_replicate=2 shards them within a node, fits, and sends " in text
    assert "node 1: torchrun starts ranks 8-15; rank 8 starts 8 replicas (rollout.tp=1)" in text
    for fine in (["parallel.dp_replicate=2"], ["--memory-gib", "80"]):
        assert "shards weights over" not in plan_text("--nodes", "2", *fine)


def test_a_dry_run_says_the_same(tiny_model, tmp_path, caplog, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "prompts.txt").write_text("".join(f"cup {index}\n" for index in range(16)))
    arguments = f"""train --dry-run --json --world-size 16 model.path={tiny_model}
        data.prompts={tmp_path}/prompts.txt train.prompts_per_step=16 train.num_steps=1
        algorithm.group_size=2 run.name=plan rollout.height=64 rollout.width=64 optim.lr=1e-4
        reward.jpeg.type=jpeg_size""".split()
    assert main([*arguments, "--gpus-per-node", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"][1] == (
        "node 1: torchrun starts ranks 8-15; rank 8 starts 8 replicas (rollout.tp=1)"
    )
    assert "parallel.dp_replicate=2 shards them within a node, fits, and sends" in caplog.text
    assert main([*arguments, "--gpus-per-node", "8", "run.device=cpu"]) == 0
    assert "rank 8 starts 1 replica " in json.loads(capsys.readouterr().out)["nodes"][1]
    assert main([*arguments, "--gpus-per-node", "8", "parallel.sp=4"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main([*arguments, "parallel.sp=4"]) == 2
    assert (
        "parallel.sp*parallel.tp = 4*1 = 4 does not divide a node's 2 ranks"
        in capsys.readouterr().err
    )
