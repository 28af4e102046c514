"""`megadiff plan`: which layouts it offers, what it counts in which phase, which one it takes, and
what it refuses.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.models.registry import build_adapter
from megadiff.planner.engine_memory import GIB
from megadiff.planner.footprint import replica_weights
from megadiff.planner.offload_choice import offload_choice

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "configs/recipes/qwen_image_flowgrpo_4xh200.yaml")
MODEL = f"model.path={ROOT / 'assets/qwen_image'}"
EAGER = (
    "engine.compile=false",
    "engine.activation_memory_budget=0",
)  # Megatron's layouts are compared, too
VIDEO = {
    "one": ROOT / "configs/recipes/wan22_ti2v_5b_flowgrpo_8xh200.yaml",
    "experts": ROOT / "configs/recipes/wan22_t2v_a14b_flowgrpo_64xh200.yaml",
}
OFF = ('parity.mode="off"', "algorithm.old_log_prob=rollout")
SEPARATE = ("rollout.mode=separate", "rollout.registry=replicas")


@pytest.fixture
def plan(capsys):
    """Arguments → (the JSON plan, exit code)."""

    def run(*arguments: str, world_size: int = 4) -> tuple[dict, int]:
        code = main(
            [
                "plan",
                RECIPE,
                MODEL,
                *EAGER,
                "--world-size",
                str(world_size),
                "--text-tokens",
                "64",
                "--json",
                *arguments,
            ]
        )
        return json.loads(capsys.readouterr().out), code

    return run


def sizes(layout: dict) -> tuple:
    return tuple(layout[key] for key in ("backend", "dp", "dp_replicate", "sp", "tp"))


def test_takes_pure_data_parallelism_where_it_fits(plan):
    found, code = plan()
    assert code == 0
    assert sizes(found["layouts"][found["pick"]]) == ("veomni", 4, 1, 1, 1)
    assert found["overrides"] == (
        "engine.backend=veomni parallel.dp=4 parallel.dp_replicate=1 parallel.sp=1 parallel.tp=1"
    )
    order = [(layout["tp"], layout["sp"]) for layout in found["layouts"]]
    assert order == sorted(order) and len(order) == 12
    again, _ = plan(*found["overrides"].split())
    assert again["config"] == again["pick"]


@pytest.mark.parametrize(
    ("usable_gib", "taken"),
    [
        (102, ("veomni", 4, 1, 1, 1)),
        (97, ("veomni", 2, 1, 2, 1)),
        (93, ("veomni", 1, 1, 4, 1)),
    ],
)
def test_then_ulysses_as_memory_shrinks(plan, usable_gib, taken):
    found, _ = plan(*SEPARATE, "--memory-gib", str(usable_gib))
    assert sizes(found["layouts"][found["pick"]]) == taken
    worst = max(sum(parts.values()) for parts in found["layouts"][found["pick"]]["phases"].values())
    assert worst <= found["machine"]["budget"] == int(int(usable_gib * GIB) * 0.9)


def test_several_nodes_prefer_copies_of_a_sharded_node(plan):
    found, _ = plan(*SEPARATE, "train.prompts_per_step=64", world_size=64)
    assert sizes(found["layouts"][found["pick"]]) == ("veomni", 64, 8, 1, 1)
    assert {layout["sp"] * layout["tp"] for layout in found["layouts"]} == {1, 2, 4, 8}
    assert all(layout["dp"] * layout["sp"] * layout["tp"] == 64 for layout in found["layouts"])


@pytest.mark.slow
def test_where_replicas_count(plan):
    def parts(*arguments: str) -> dict:
        return plan(*arguments)[0]["layouts"][0]["phases"]

    asleep, awake, separate = parts(), parts("rollout.sleep=never"), parts(*SEPARATE)
    parked = 2 * (
        7_615_616_512 + 126_892_531
    )  # the text encoder without its vision tower, and the VAE
    weights = 2 * 20_430_401_088 + parked
    assert [asleep[phase]["replica"] for phase in ("rollout", "sync", "log_probs", "update")] == [
        weights
    ] * 3 + [0]
    hosts = [
        plan(*arguments)[0]["layouts"][0]["host"]["sleeping replica"]
        for arguments in ((), ("rollout.sleep=never",))
    ]
    assert hosts == [parked, 0]
    assert awake["update"]["replica"] == weights
    assert parts(*OFF)["log_probs"]["replica"] == 0
    assert (
        parts("lora.rank=8", "lora.shared_base=never")["update"]["replica"] == weights
    )  # whose pushes would not bring all of it
    assert parts("lora.rank=8")["update"]["replica"] == parked  # it maps the trainer's base
    assert parts("lora.rank=8", "rollout.sleep=always")["update"]["replica"] == 0
    d, scales = 3072, 4 * (8 * 3072 + 2 * 5 * 3072)
    copied = 60 * (8 * d * d + 4 * d * 4 * d)  # elements
    fp8, both = parts("rollout.fp8=true"), parts("rollout.fp8=true", "rollout.sleep=never")
    in_place = weights - copied + 60 * scales  # of one byte for two
    assert [fp8[phase]["replica"] for phase in ("rollout", "sync", "log_probs", "update")] == [
        in_place,
        weights,
        in_place,
        0,
    ]
    assert [both[phase]["replica"] for phase in ("rollout", "sync", "update")] == [
        weights + copied + 60 * scales
    ] * 3
    assert {phase: parts["replica"] for phase, parts in separate.items()} == dict.fromkeys(
        asleep, 0
    )
    assert all(
        asleep[phase]["contexts"] == 2 * separate[phase]["contexts"] > 0 for phase in asleep
    )  # two processes


H100 = ("--gpu", "h100", "train.microbatch_size=8")


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


def test_the_hosts_memory_counts_too(plan, capsys):
    """Of a node with less than its GPUs' states need, nothing fits, and both numbers are said."""
    found, code = plan(*H100, "--host-gib", "100", world_size=8)
    assert code == 1 and found["machine"]["host_bytes"] == 100 * GIB
    forced, code = plan(*H100, "--host-gib", "100", "engine.offload=always", world_size=8)
    assert code == 1 and not any(layout["fits"] for layout in forced["layouts"])
    asked = [RECIPE, MODEL, *H100, "--host-gib", "100", "engine.offload=always"]
    assert main(["plan", *asked, "--world-size", "8"]) == 1
    text = capsys.readouterr().out
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


def test_gradients_exist_while_an_update_runs(plan):
    """Of either engine."""
    layouts = {layout["backend"]: layout for layout in plan()[0]["layouts"] if layout["phases"]}
    assert layouts.keys() == {"veomni", "megatron"}
    for layout in layouts.values():
        assert {phase: parts.get("gradients") for phase, parts in layout["phases"].items()} == {
            **dict.fromkeys(("rollout", "sync", "log_probs")),
            "update": layout["static"]["gradients"],
        }


def test_the_workers_of_a_replica_share_the_transformer(plan):
    """On four GPUs two replicas of two are one worker a GPU, and four replicas of two are two."""
    model, transformer = ROOT / "assets/qwen_image", 2 * 20_430_401_088
    found = replica_weights(build_adapter(model), dtype="bfloat16")
    assert found.transformers == transformer
    half = transformer // 2 + found.others
    for asked, expected in (((), half), (("rollout.num_replicas=4",), 2 * half)):
        found = plan("rollout.tp=2", *asked)[0]["layouts"][0]["phases"]
        assert found["sync"]["replica"] == expected


def test_what_is_trained_on_images_does_not_grow_with_what_evaluations_sample(capsys, monkeypatch):
    def phases(*arguments: str) -> dict:
        sft = (
            "algorithm.name=sft",
            "data.images=photos",
            "algorithm.group_size=1",
            "train.updates_per_step=1",
        )
        main(["plan", str(VIDEO["one"]), "--world-size", "4", "--json", *sft, *arguments])
        return json.loads(capsys.readouterr().out)["layouts"][0]["phases"]

    monkeypatch.chdir(ROOT)  # where the recipe's model is
    image, video = (
        phases("rollout.num_frames=1", "rollout.guidance_scale=1"),
        phases("rollout.guidance_scale=5"),
    )
    assert video["update"] == image["update"]
    assert video["rollout"]["replica at work"] != image["rollout"]["replica at work"]


def test_the_gates_text_encoder_counts_beside_replicas_that_sleep_or_cannot(plan):
    """Whole, as the trainer loads it: with the vision tower."""

    def gate(*arguments: str) -> dict:
        return plan(*arguments)[0]["layouts"][0]["phases"]["log_probs"]

    sleeping, never, off = gate(), gate("rollout.sleep=never"), gate(*OFF)
    assert (
        "text encoder" not in sleeping and sleeping["activations"] > 0
    )  # less than the weights that are freed meanwhile
    assert never["text encoder"] == 2 * 8_292_166_656 and "activations" not in never
    assert sleeping["replica"] == never["replica"] > off["replica"]
    assert "text encoder" not in off and off["activations"] > 0


def test_a_reference_is_on_the_host(plan):
    layout = plan("algorithm.kl_coef=0.04")[0]["layouts"][0]
    assert (
        layout["host"]["reference"]
        == layout["static"]["reference"]
        == layout["static"]["parameters"]
    )
    assert plan()[0]["layouts"][0]["host"]["reference"] == 0


def test_lora_holds_the_base_in_engine_dtype_and_trains_the_adapters_alone(plan, capsys):
    found, _ = plan("lora.rank=64", "lora.shared_base=never", "algorithm.kl_coef=0.04")
    width, rank, num_blocks = 3072, 64, 60
    square, mlp = (
        2 * width * rank,
        (1 + 4) * width * rank,
    )  # of a pair beside width → width, and width ↔ 4 · width
    trained = num_blocks * (8 * square + 4 * mlp) - (
        square + 2 * mlp
    )  # the last block's text output is unused
    assert found["trained"] == trained and found["parameters"] == 20_430_401_088
    veomni = next(layout for layout in found["layouts"] if sizes(layout) == ("veomni", 4, 1, 1, 1))
    assert veomni["static"]["parameters"] == pytest.approx(
        (2 * 20_430_401_088 + 4 * trained) / 4, rel=1e-3
    )
    assert veomni["static"]["optimizer"] == pytest.approx(8 * trained / 4, rel=1e-3)
    megatron = next(
        layout for layout in found["layouts"] if sizes(layout) == ("megatron", 1, 1, 1, 4)
    )
    assert megatron["static"]["parameters"] < 2 * 20_430_401_088 / 4 * 1.05
    assert all(layout["host"]["reference"] == 0 for layout in found["layouts"])
    assert main(["plan", RECIPE, MODEL, "--world-size", "4", "lora.rank=64"]) == 0
    assert "LoRA of rank 64: 0.422 B are trained" in capsys.readouterr().out


def test_a_frozen_expert_has_weights_alone(capsys, monkeypatch):
    """In engine.dtype, and one expert's optimizer on the host where two have theirs."""

    def static(*arguments: str) -> tuple[dict, dict]:
        main(["plan", str(VIDEO["experts"]), "--world-size", "64", "--json", *arguments])
        layout = json.loads(capsys.readouterr().out)["layouts"][0]
        return layout["static"], layout["host"]

    monkeypatch.chdir(ROOT)  # where the recipe's model is
    (both, hosted), (one, hosted_one) = static(), static("train.components=[transformer]")
    assert one["parameters"] == pytest.approx(both["parameters"] * (4 + 2) / (4 + 4), rel=1e-6)
    assert (one["gradients"], one["optimizer"]) == (both["gradients"], both["optimizer"])
    assert 2 * hosted_one["offloaded optimizer"] == hosted["offloaded optimizer"] > 0
    with_lora = [
        static("lora.rank=8", *extra)[0] for extra in ((), ("train.components=[transformer]",))
    ]
    assert with_lora[0] == with_lora[1]  # both have adapters


def test_videos_are_planned_by_their_own_block(capsys, monkeypatch):
    """Text is padded to one length, a given first frame costs a modulation of each token, and
    decoding has a video at once, a few frames of it at a time.
    """

    def plan(*arguments: str) -> dict:
        main(["plan", str(VIDEO["one"]), "--world-size", "8", "--json", *arguments])
        return json.loads(capsys.readouterr().out)

    monkeypatch.chdir(ROOT)
    alone, other_text, from_image, longer, smaller = (
        plan(*arguments)
        for arguments in (
            (),
            ("--text-tokens", "7"),
            ("rollout.images=true",),
            ("rollout.num_frames=97",),
            ("rollout.height=256", "rollout.width=256"),
        )
    )
    layouts = {
        name: found["layouts"][0] for name, found in (("alone", alone), ("from_image", from_image))
    }
    assert alone == other_text and layouts["alone"]["work"]["text_tokens"] == 512
    assert [each["work"]["image_tokens"] for each in layouts.values()] == [5070, 5070]
    activations = [each["phases"]["update"]["activations"] for each in layouts.values()]
    assert 1.2 * activations[0] < activations[1] < 3 * activations[0]
    working = [found["replicas"]["working"] for found in (alone, longer, smaller)]
    assert working[2] < working[0] < working[1]


def test_supervised_training_has_an_average_and_no_rollout(plan):
    found, _ = plan(
        "algorithm.name=sft",
        "data.images=photos",
        "algorithm.ema_decay=0.99",
        "train.updates_per_step=1",
        "eval.every=0",  # evaluations need replicas, as the recipe's do
    )
    layout = found["layouts"][found["pick"]]
    assert layout["phases"].keys() == {"update"}
    assert layout["phases"]["update"]["average"] == layout["static"]["parameters"]


def test_true_cfg_keeps_two_graphs(plan):
    one, two = (plan(f"rollout.true_cfg_scale={scale}")[0]["layouts"][0] for scale in (1, 4))
    assert one["work"]["passes"] == 1 and two["work"]["passes"] == 2
    assert two["phases"]["update"]["activations"] > 1.4 * one["phases"]["update"]["activations"]


def test_what_training_would_refuse_is_listed_with_the_reason(plan):
    found, _ = plan("train.prompts_per_step=6")
    refused = [layout for layout in found["layouts"] if layout["dp"] == 4]
    assert refused and not any(layout["fits"] for layout in refused)
    assert all(
        "train.prompts_per_step=6 is not a multiple of dp=4" in layout["obstacle"]
        for layout in refused
    )
    assert sizes(found["layouts"][found["pick"]]) == ("veomni", 2, 1, 2, 1)
    only_veomni, _ = plan("engine.backend=veomni", "engine.fp8=rowwise", *SEPARATE)
    assert only_veomni["layouts"][only_veomni["pick"]]["backend"] == "veomni"
    obstacles = {
        layout["obstacle"] for layout in only_veomni["layouts"] if layout["backend"] == "megatron"
    }
    assert (
        len(obstacles) == 1 and "engine.fp8=rowwise with engine.backend=megatron" in obstacles.pop()
    )


def test_heads_must_divide(plan):
    found, _ = plan("train.prompts_per_step=5", "--gpus-per-node", "5", world_size=5)
    obstacles = {layout["obstacle"] for layout in found["layouts"] if layout["sp"] == 5}
    assert obstacles == {"sp*tp = 5 does not divide the model's 24 heads"}


def test_text_says_what_to_set(capsys):
    assert (
        main(
            [
                "plan",
                RECIPE,
                MODEL,
                *EAGER,
                "--world-size",
                "8",
                "parallel.tp=4",
                "engine.backend=megatron",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
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


def test_nothing_fits(capsys):
    arguments = ["plan", RECIPE, MODEL, "--world-size", "2", "--gpu", "a100-40"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "nothing fits. Nearest: engine.backend=" in text
    assert "GiB > 35.5 GiB in update: " in text and "activations" in text
    hint = re.search("^> it fits with: (.*)$", text, re.M)[1]
    assert "--world-size 16 " in hint and "rollout.mode=separate" in hint

    # Followed, it fits, and the layout that it names is the one to take.
    assert main(["plan", RECIPE, MODEL, "--gpu", "a100-40", "--json", *hint.split()]) == 0
    followed = json.loads(capsys.readouterr().out)
    assert followed["config"] == followed["pick"]


def test_replicas_over_two_gpus_are_tried(capsys):
    """The transformer's weights alone leave no memory beside a trainer's share."""
    asked = ["train.microbatch_size=4", "engine.activation_memory_budget=0"]
    arguments = ["plan", RECIPE, MODEL, "--world-size", "8", "--memory-gib", "60", *asked]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "GiB > 54.0 GiB in rollout: " in text and "replica at work" in text
    hint = re.search("^> it fits with: (.*)$", text, re.M)[1]
    assert hint.startswith("rollout.tp=2 engine.backend=")
    assert main([*arguments, *hint.split()]) == 0
    assert "* is what the config asks for" not in capsys.readouterr().out


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


def test_layouts_that_cannot_run_share_a_line(capsys):
    z_image = str(ROOT / "configs/recipes/z_image_base_flowgrpo_4xh200.yaml")
    assert main(["plan", z_image, "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert "  and 8 layouts that cannot run: sp*tp = 8 does not divide the model's 30 heads" in text
    assert text.count("does not divide the model's") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", "0"), "--world-size 0 < 1"),
        (("--world-size", "12"), "--world-size 12 is not a multiple of --gpus-per-node 8"),
        (("--world-size", "4", "--headroom", "1.5"), "--headroom 1.5 is not in [0, 1)"),
        (("--world-size", "4", "--memory-gib", "-1"), "--memory-gib -1.0 is not positive"),
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


def test_config_files_are_enough_for_a_replicas_size(tiny_model, tmp_path, capsys):
    whole = replica_weights(build_adapter(tiny_model), dtype="bfloat16")
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    assert replica_weights(build_adapter(bare), dtype="bfloat16") == whole
    shutil.rmtree(bare / "text_encoder")
    assert replica_weights(build_adapter(bare), dtype="bfloat16").unknown == ("text_encoder",)
    assert main(["plan", RECIPE, f"model.path={bare}", "--world-size", "1"]) == 0
    assert "not counted, for want of their config.json: text_encoder" in capsys.readouterr().out


def test_a_replicas_work_is_of_its_own_dtype(plan):
    def working(*arguments: str) -> int:
        large = ("rollout.height=1024", "rollout.width=1024", "rollout.batch_size=32")
        return plan(*large, *arguments)[0]["layouts"][0]["phases"]["rollout"]["replica at work"]

    assert working() == working("engine.dtype=float32") < working("model.float32_streams=true")


def test_a_larger_budget_that_fits_is_named(capsys):
    """Its update is as large as said; the next one does not fit."""

    def text(*arguments: str) -> str:
        assert (
            main(["plan", RECIPE, MODEL, "--world-size", "8", "--memory-gib", memory, *arguments])
            == 0
        )
        return capsys.readouterr().out

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
