"""`megadiff plan`: which layouts it offers, what it counts by phase, and which one it takes."""

from __future__ import annotations

import json
import shutil

import pytest

from megadiff.cli.main import main
from megadiff.models.registry import build_adapter
from megadiff.planner.engine_memory import GIB
from megadiff.planner.footprint import replica_weights
from tests.unit.planner.recipe import OFF, ROOT, SEPARATE, VIDEO, sizes


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
    def parts(*arguments: str, **machine: int) -> dict:
        return plan(*arguments, **machine)[0]["layouts"][0]["phases"]

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
    mapped = parts("lora.rank=8", "rollout.fp8=true", "rollout.sleep=always", world_size=1)
    # copies beside a base that is the trainer's
    copies = parked + copied + 60 * scales
    assert [mapped[phase]["replica"] for phase in ("rollout", "sync", "update")] == [
        copies,
        copies,
        0,
    ]
    awake = parts("lora.rank=8", "rollout.fp8=true")
    assert [awake[phase]["replica"] for phase in ("rollout", "sync", "update")] == [copies] * 3
    assert {phase: parts["replica"] for phase, parts in separate.items()} == dict.fromkeys(
        asleep, 0
    )
    assert all(
        asleep[phase]["contexts"] == 2 * separate[phase]["contexts"] > 0 for phase in asleep
    )  # two processes


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


def test_lora_holds_the_base_in_engine_dtype_and_trains_the_adapters_alone(plan, plan_text):
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
    text = plan_text("--world-size", "4", "lora.rank=64")
    assert "LoRA of rank 64: 0.422 B are trained" in text


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
    alone, other_text, from_image, longer, larger = (
        plan(*arguments)
        for arguments in (
            (),
            ("--text-tokens", "7"),
            ("rollout.images=true",),
            ("rollout.num_frames=97",),
            ("rollout.height=704", "rollout.width=1280"),
        )
    )
    layouts = {
        name: found["layouts"][0] for name, found in (("alone", alone), ("from_image", from_image))
    }
    assert alone == other_text and layouts["alone"]["work"]["text_tokens"] == 512
    assert [each["work"]["image_tokens"] for each in layouts.values()] == [5070, 5070]
    activations = [each["phases"]["update"]["activations"] for each in layouts.values()]
    assert 1.2 * activations[0] < activations[1] < 3 * activations[0]
    working = [found["replicas"]["working"] for found in (alone, longer, larger)]
    assert working[0] < working[1] < working[2]


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


def test_config_files_are_enough_for_a_replicas_size(tiny_model, tmp_path, plan_text):
    whole = replica_weights(build_adapter(tiny_model), dtype="bfloat16")
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    assert replica_weights(build_adapter(bare), dtype="bfloat16") == whole
    shutil.rmtree(bare / "text_encoder")
    assert replica_weights(build_adapter(bare), dtype="bfloat16").unknown == ("text_encoder",)
    text = plan_text(f"model.path={bare}", "--world-size", "1")
    assert "not counted, for want of their config.json: text_encoder" in text


def test_a_replicas_work_is_of_its_own_dtype(plan):
    def working(*arguments: str) -> int:
        large = ("rollout.height=1024", "rollout.width=1024", "rollout.batch_size=32")
        return plan(*large, *arguments)[0]["layouts"][0]["phases"]["rollout"]["replica at work"]

    assert working() == working("engine.dtype=float32") < working("model.float32_streams=true")
