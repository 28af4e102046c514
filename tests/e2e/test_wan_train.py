"""Wan2.2 trained as a user starts it, with a real replica: one transformer, and two experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from megadiff.data.prompts import prompt_id
from megadiff.observe.evaluation import evaluation_folder, read_evaluation
from megadiff.rollout.client.client import ReplicaClient
from megadiff.tensors.fingerprint import fingerprints
from tests.e2e.conftest import GATED, Result, Trainer, train_in_ranks
from tests.e2e.pushes import folder_weights, urls_of
from tests.extra import cases

EXPERTS = ("transformer", "transformer_2")
COMMON = (  # of 6 steps with shift 5, 0 to 2 are the high-noise expert's
    "rollout.mode=separate",
    "rollout.num_frames=5",
    "rollout.sde_window_range=[0,5]",
    "reward.color.type=frame",
    "reward.color.args.reward=color",
    "train.updates_per_step=1",
    "optim.lr=1e-3",
    "train.num_steps=2",
)
GAP = "parity/log_prob_gap_max"
THREE_STEPS = "train.num_steps=3"
# Gradients of every layout are compared in tests/distributed.
LAYOUTS = {
    "ti2v_5b-sp2": ("parallel.sp=2",),
    "ti2v_5b-tp2": ("engine.backend=megatron", "parallel.tp=2"),
    "t2v_a14b-dp2": ("parallel.dp=2",),
    "t2v_a14b-tp2_whole_tokens": (
        "engine.backend=megatron",
        "parallel.tp=2",
        "parallel.sequence_parallel=false",
    ),
}

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def run(
    tiny_wan: dict[str, Path],
    wan_registries: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Two steps, so that the second starts from pushed weights: (kind, name, *overrides)."""
    trainers = {
        kind: Trainer(tmp_path_factory.mktemp(kind), model) for kind, model in tiny_wan.items()
    }

    def run(kind: str, name: str, *overrides: str, num_processes: int = 1) -> Result:
        folder = wan_registries[kind]
        places = (f"rollout.registry={folder}", f"sync.folder={folder.parent / 'weights'}")
        return train_in_ranks(trainers[kind], name, num_processes, *COMMON, *places, *overrides)

    return run


def differing(kind: str, tiny_wan: dict[str, Path], wan_registries: dict[str, Path]) -> set[str]:
    """The components whose held base weights are not all as the model folder has them, by the
    replica's fingerprints.
    """
    ((name, url),) = urls_of(wan_registries[kind]).items()
    client = ReplicaClient(url, name)
    client.weights_begin(100, {})  # a push of nothing: its commit says what the replica uses
    (worker,) = client.weights_commit(100)
    client.release()  # the next run would wait until this one counts as gone
    components = [path.name for path in tiny_wan[kind].glob("transformer*")]
    files = fingerprints(folder_weights(tiny_wan[kind], components))
    held = {name: value for name, value in worker["fingerprints"].items() if ".lora_" not in name}
    assert held.keys() == files.keys()
    return {name.partition(".")[0] for name, value in held.items() if files[name] != value}


def follows(rows: list[dict], limit: float) -> bool:
    """With one update a batch the trainer's log_probs of a step are the replica's."""
    return max((2 * row["policy/kl_old"]) ** 0.5 for row in rows) <= limit


def test_one_transformer(run: Run, tiny_wan, wan_registries) -> None:
    rows = run("ti2v_5b", "plain", GATED).rows
    assert len(rows) == 2 and rows[0][GAP] <= 1e-5 and follows(rows, 1e-5)
    assert f"{GAP}/transformer" not in rows[0]
    assert differing("ti2v_5b", tiny_wan, wan_registries) == {"transformer"}


@pytest.fixture(scope="module")
def one_process(run: Run) -> Callable[[str], list[dict]]:
    """Kind → the rows that every layout must have."""
    return cache(lambda kind: run(kind, "one", "train.updates_per_step=2").rows)


@pytest.mark.parametrize("name", cases(LAYOUTS, extra_ones=("t2v_a14b-dp2",)))
def test_layout_does_not_matter(run: Run, one_process, name: str) -> None:
    kind, layout = name.split("-")
    rows = run(kind, layout, "train.updates_per_step=2", *LAYOUTS[name], num_processes=2).rows
    for row, expected in zip(rows, one_process(kind), strict=True):
        assert row["reward/mean"] == pytest.approx(expected["reward/mean"], rel=2e-4)
        assert row["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=2e-4)
        # terms of ± advantage cancel on policy: relative to a thousandth of them
        assert row["loss/policy"] == pytest.approx(expected["loss/policy"], rel=2e-4, abs=2e-7)


def test_image_to_video(run: Run, tmp_path: Path) -> None:
    """The gate, rewards, samples and an evaluation from first frames, the drawn tokens split over
    two ranks.
    """
    colours = ["red", "green", "blue", "yellow"]
    for colour in colours:
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{colour}.png")
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": f"a {colour} circle", "image": f"{colour}.png"}) for colour in colours
    ]
    prompts.write_text("\n".join(lines))
    asked = (
        GATED,
        "rollout.images=true",
        f"data.prompts={prompts}",
        f"eval.prompts={prompts}",
        "eval.every=2",
    )
    result = run(
        "ti2v_5b", "image", *asked, "rollout.guidance_scale=2", "parallel.sp=2", num_processes=2
    )
    rows = [row for row in result.rows if row["step"]]
    assert (
        len(rows) == 2 and follows(rows, 1e-5) and max(row["optim/grad_norm"] for row in rows) > 0
    )
    assert rows[0][GAP] <= 1e-5 and rows[0]["parity/embedding_gap_max"] <= 1e-5
    evaluated = read_evaluation(evaluation_folder(result.folder, 2)).samples
    assert {sample.prompt_id for sample in evaluated} == {
        prompt_id(f"a {colour} circle", " ", [f"{colour}.png"]) for colour in colours
    }


def test_both_experts_learn_where_the_window_spans_the_boundary(
    run: Run, tiny_wan, wan_registries
) -> None:
    """Guided, each expert by its own scale."""
    guidance = (GATED, "rollout.guidance_scale=3", "rollout.guidance_scale_2=2")
    rows = run("t2v_a14b", "both", *guidance, "sync.transport=disk", THREE_STEPS).rows
    assert follows(rows, 1e-4)
    for component in EXPERTS:
        assert rows[0][f"{GAP}/{component}"] <= 1e-4
        assert max(row[f"optim/grad_norm/{component}"] for row in rows) > 0
        assert sum(row[f"train/pairs/{component}"] for row in rows) > 0
    assert differing("t2v_a14b", tiny_wan, wan_registries) == set(EXPERTS)


@pytest.mark.parametrize(
    ("window", "component"), [("[0,3]", "transformer"), ("[3,5]", "transformer_2")]
)
def test_a_window_on_one_side_trains_one_expert(
    run: Run, tiny_wan, wan_registries, window: str, component: str
) -> None:
    """The gate is of both all the same, and after the first push only the one that learns
    travels.
    """
    keys = (f"rollout.sde_window_range={window}", "rollout.sde_window_size=2")
    rows = run("t2v_a14b", component, GATED, *keys).rows
    assert follows(rows, 1e-5) and all(rows[0][f"{GAP}/{each}"] <= 1e-5 for each in EXPERTS)
    assert differing("t2v_a14b", tiny_wan, wan_registries) == {component}
    weights = folder_weights(tiny_wan["t2v_a14b"], EXPERTS)
    sizes = {
        each: sum(tensor.nbytes for name, tensor in weights.items() if name.startswith(f"{each}."))
        / 2**30
        for each in EXPERTS
    }
    assert [row["sync/gib"] for row in rows] == pytest.approx(
        [sum(sizes.values()), sizes[component]]
    )


def test_lora_of_both_experts(run: Run, tiny_wan, wan_registries) -> None:
    rows = run(
        "t2v_a14b",
        "lora",
        GATED,
        "lora.rank=4",
        "lora.alpha=8",
        "algorithm.kl_coef=0.04",
        "optim.lr=1e-2",
        THREE_STEPS,
    ).rows
    assert follows(rows, 1e-5) and all(rows[0][f"{GAP}/{each}"] <= 1e-5 for each in EXPERTS)
    assert rows[0]["policy/kl_ref"] <= 1e-12 and rows[2]["policy/kl_ref"] > 1e-10
    assert rows[0]["sync/gib"] > 10 * rows[1]["sync/gib"] > 0
    assert differing("t2v_a14b", tiny_wan, wan_registries) == set()  # frozen
