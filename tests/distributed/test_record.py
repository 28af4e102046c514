"""A step's diversity over several ranks is that of one rank that holds all groups."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.observe import diversity
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.train.diversity_figures import DiversityFigures
from megadiff.train.record import step_work
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling
from tests.distributed.ranks import run_ranks
from tests.stub_fleet import StubFleet

TEXTS = ("a circle", "a red circle", "a star", "two blue stars", "a square")
SAMPLING = Sampling(height=8, width=8, num_inference_steps=4)


def groups(texts: tuple[str, ...]) -> list[RolloutGroup]:
    requests = [
        RolloutRequest(
            prompt=Prompt(text=text, id=f"{len(text):016x}"),
            sampling=SAMPLING,
            sample_indices=(0, 1, 2, 3),
            seed=0,
            step=0,
        )
        for text in texts
    ]
    return [
        group for _, group in sorted(StubFleet().generate(requests), key=lambda found: found[0])
    ]


class TeraAdapter:
    """A forward of one sample is a TFLOP for each token of text."""

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        return 1e12 * num_text_tokens

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return 9, 3

    def num_text_tokens(self, conditioning: Mapping[str, torch.Tensor]) -> int:
        return conditioning["prompt_embeds"].shape[1]


def _worker(out: str, world_size: int, sp: int, texts: tuple[str, ...]) -> None:
    mesh = init_mesh(
        resolve_layout(dp=0, sp=sp, tp=1, dp_replicate=1, world_size=world_size), "cpu"
    )
    mine = groups(texts[mesh.dp_rank :: mesh.dp])
    metrics = DiversityFigures(mine).metrics(mesh)
    window = [
        replace(
            group,
            conditioning={"prompt_embeds": torch.zeros(1, 7, 1)},
            log_probs_GW=torch.zeros(4, 2),
        )
        for group in mine
    ]
    config = Config(algorithm=AlgorithmConfig(group_size=4))
    algorithm = build_algorithm(config.algorithm)
    options = {"config": config, "mesh": mesh}
    metrics |= step_work(window, window, TeraAdapter(), algorithm, **options)
    one_noise = [replace(group, sampling=replace(SAMPLING, same_noise=True)) for group in window]
    shared = step_work(one_noise, one_noise, TeraAdapter(), algorithm, **options)
    metrics["shared"] = shared["perf/tflop_rollout"]
    # the first rank computes one group, and its model-parallel peers the same one
    trained = window[:1] if mesh.dp_rank == 0 else []
    part = step_work(window, trained, TeraAdapter(), algorithm, **options)
    metrics |= {f"part/{key}": value for key, value in part.items()}
    metrics |= {"moving": _motion(mine, mesh)}
    Path(out, f"{mesh.rank}.json").write_text(json.dumps(metrics))


def videos(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups with a second frame, which is the first one's negative."""
    return [
        replace(group, pixels_GFHWC=torch.cat([group.pixels_GFHWC, 255 - group.pixels_GFHWC], 1))
        for group in groups
    ]


def _motion(mine: list[RolloutGroup], mesh: Mesh) -> float:
    moving = videos(mine)
    if not mesh.is_model_group_source:  # peers get the middle frame alone
        moving = [
            replace(group, pixels_GFHWC=group.middle_frames_GHWC[:, None]) for group in moving
        ]
    return DiversityFigures(moving).metrics(mesh)["diversity/motion"]


@pytest.mark.parametrize("world_size, sp", [(1, 1), (2, 1), (2, 2)])
def test_every_layout_finds_the_same_diversity(tmp_path, world_size, sp):
    run_ranks(_worker, world_size, str(tmp_path), world_size, sp, TEXTS)
    pixels = {group.prompt.text: group.pixels_GFHWC[:, 0] for group in groups(TEXTS)}
    open_prompts = [pixels[text] for text in TEXTS if "red" not in text and "blue" not in text]
    looks = [diversity.looks(samples) for samples in pixels.values()]
    means = {f"diversity/{name}": sum(each[name] for each in looks) / 5 for name in diversity.LOOKS}
    motions = [
        diversity.motion(frames) for group in videos(groups(TEXTS)) for frames in group.pixels_GFHWC
    ]
    expected = means | {
        "moving": sum(motions) / len(motions),
        "diversity/pixel_spread": sum(map(diversity.pixel_spread, pixels.values())) / 5,
        "diversity/clipped_share": sum(map(diversity.clipped_share, pixels.values())) / 5,
        "diversity/colour_entropy_bit": diversity.colour_entropy_bit(open_prompts),
        # 5 groups of 4 samples, 7 tokens; 4 steps, and a window of 2 forward and twice that back.
        "perf/tflop_rollout": 5 * 4 * 7 * 4 / world_size,
        # windows begin at step 1, so that a group's first two steps are one sample's
        "shared": 5 * (4 * 4 - 3 * 2) * 7 / world_size,
        "perf/tflop_train": 5 * 4 * 7 * 2 * 3 / world_size,
        # of all devices: 9 tokens of a sample
        "perf/tokens_rollout": 5 * 4 * 9 * 4,
        "perf/tokens_train": 5 * 4 * 9 * 2,
        "perf/images": 5 * 4,
    }
    of_samples = ("perf/tflop_rollout", "perf/tokens_rollout", "perf/images")
    expected |= {f"part/{key}": expected[key] for key in of_samples}
    for key in ("perf/tflop_train", "perf/tokens_train"):
        expected[f"part/{key}"] = expected[key] / 5
    for rank in range(world_size):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(expected)
    zeros = {"diversity/clipped_share", "diversity/edges"}  # of pictures of one colour
    assert all(value > 0 for key, value in expected.items() if key not in zeros)


def test_a_step_whose_prompts_all_name_colours_has_no_diversity_of_colour(tmp_path):
    run_ranks(_worker, 1, str(tmp_path), 1, 1, TEXTS[1::2])
    assert "diversity/colour_entropy_bit" not in json.loads((tmp_path / "0.json").read_text())
