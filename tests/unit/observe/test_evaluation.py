import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from synthetic_evaluation import TASKS, evaluation, with_rewards, write

from megadiff.observe.evaluation import (
    Comparison,
    Difference,
    comparison_to_json,
    estimate,
    evaluation_folder,
    evaluation_folders,
    image_name,
    read_evaluation,
    t_95,
    to_json,
    write_evaluation,
    write_json,
)
from megadiff.observe.step_folders import drop_steps_after
from megadiff.observe.video import read_frames
from megadiff.report.evaluation_page import write_evaluation_page
from megadiff.report.evaluation_table import settings_text


@pytest.mark.parametrize(
    "hits, n, low, high",  # R: prop.test(hits, n, correct=FALSE)$conf.int
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (1, 1, 0.2065, 1.0),
        (700, 1400, 0.4739, 0.5261),
    ],
)
def test_a_share_has_wilsons_interval(hits, n, low, high):
    found = estimate([1.0] * hits + [0.0] * (n - hits))
    assert (found.mean, found.n) == (hits / n, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_other_values_have_students_interval_of_their_mean():
    found = estimate([0.2, 0.4, 0.6, 0.8])
    half = 3.182 * math.sqrt(0.2 / 3) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert (estimate([0.3]).low, estimate([0.3]).high) == (None, None)


@pytest.mark.parametrize(
    ("num_degrees", "quantile"),  # R: qt(0.975, num_degrees)
    [(1, 12.7062), (4, 2.7764), (5, 2.5706), (7, 2.3646), (19, 2.0930), (139, 1.9772)],
)
def test_students_quantile(num_degrees: int, quantile: float):
    assert t_95(num_degrees) == pytest.approx(quantile, abs=1e-3)


def changed_by(gains: list[float]) -> Difference:
    """Return the difference where the first pairs changed so, from 0, and the others did not."""
    before = evaluation(0.0)
    after = before
    for index, gain in enumerate(gains):
        after = with_rewards(after, index=index, rewards={"shapes_strict": gain, "shapes": 0.5})
    samples = slice(len(gains))
    return Comparison(
        evaluation=replace(after, samples=after.samples[samples]),
        baseline=replace(before, samples=before.samples[samples]),
    ).difference("shapes_strict")


def test_few_pairs_are_not_clear():
    """Five that change alike are 1 of 16 by chance."""
    for num_pairs, is_clear in ((2, False), (5, False), (6, True)):
        assert changed_by([0.5 + index / 100 for index in range(num_pairs)]).is_clear == is_clear
    # However many stayed: they are no evidence either way.
    assert not changed_by([1.0] * 5 + [0.0] * 20).is_clear
    assert changed_by([1.0] * 12 + [0.0] * 8).is_clear


def test_no_share_changes_by_more_than_one():
    found = changed_by([1.0, 1.0, 0.0])
    assert (found.high, found.mean) == (1.0, pytest.approx(2 / 3)) and found.low > -1
    # Beyond 0 and 1 there is no share, and nothing is cut.
    assert changed_by([3.0, 2.0, 0.5]).high > 1


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_interval_covers_the_truth_95_times_in_100(share):
    draws = (torch.rand(2000, 60, generator=torch.Generator().manual_seed(0)) < share).double()
    found = [estimate(row) for row in draws.tolist()]
    covered = sum(each.low <= share <= each.high for each in found) / len(found)
    assert 0.93 <= covered <= 0.98


def test_the_record_holds_every_figure_and_comes_back_as_it_was(tmp_path):
    found = write(tmp_path, evaluation(0.5))
    assert read_evaluation(tmp_path) == found
    record = json.loads((tmp_path / "evaluation.json").read_text("utf-8"))
    assert record.keys() == {
        "model",
        "step",
        "seed",
        "num_inference_steps",
        "height",
        "width",
        "num_frames",
        "true_cfg_scale",
        "guidance_scale",
        "guidance_scale_2",
        "num_samples",
        "num_prompts",
        "rewards",
        "diversity",
        "samples",
    }
    assert (record["num_samples"], record["num_prompts"]) == (140, 70)
    strict = record["rewards"]["shapes_strict"]
    assert list(strict["by_task"]) == list(TASKS)
    values = [sample["rewards"]["shapes_strict"] for sample in record["samples"]]
    assert strict["mean"] == pytest.approx(sum(values) / 140) and strict["n"] == 140
    assert strict["by_task"]["single"]["mean"] == pytest.approx(sum(values[:20]) / 20)
    files = [sample["file"] for sample in record["samples"] if sample["file"]]
    assert len(files) == 28 and all(Image.open(tmp_path / file).size == (64, 64) for file in files)


def test_an_older_evaluation_is_replaced_with_its_images(tmp_path):
    write(tmp_path, evaluation(0.5))
    (tmp_path / "notes.txt").write_text("mine")
    plain = evaluation(0.7)
    write_evaluation(tmp_path, plain, {})
    assert read_evaluation(tmp_path) == plain and not list((tmp_path / "images").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evaluation.json",
        "images",
        "notes.txt",
    ]


def test_a_reward_that_is_not_finite_is_never_written(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "evaluation.json", {"mean": math.nan})
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model": "m"}', '{"samples": [{"a": 1}]}'])
def test_what_is_no_evaluation_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match="evaluation.json is no evaluation"):
        read_evaluation(tmp_path)


def test_a_run_keeps_whole_evaluations_up_to_where_it_resumes(tmp_path):
    for step in (0, 20, 40):
        write_evaluation(evaluation_folder(tmp_path, step), evaluation(0.5, step=step), {})
    (tmp_path / "evaluations" / "step_000060" / "images").mkdir(
        parents=True
    )  # killed before its record
    assert [step for step, _ in evaluation_folders(tmp_path)] == [0, 20, 40]
    drop_steps_after(tmp_path / "evaluations", 20)
    assert [step for step, _ in evaluation_folders(tmp_path)] == [0, 20]
    drop_steps_after(tmp_path / "evaluations", -1)
    assert evaluation_folders(tmp_path) == []


def test_a_comparison_is_of_pairs():
    before, after = evaluation(0.4), evaluation(0.6, model="runs/shapes", step=40)
    comparison = Comparison(evaluation=after, baseline=before)
    found = comparison.difference("shapes_strict")
    gained = after.estimate("shapes_strict").mean - before.estimate("shapes_strict").mean
    assert found.mean == pytest.approx(gained) and gained > 0.1
    assert (found.lost, found.won + found.tied) == (
        0,
        pytest.approx(1),
    ) and found.won == pytest.approx(gained)
    # paired: narrower than what two independent samples of that size would give
    independent = 1.959964 * math.sqrt(sum(m * (1 - m) / 140 for m in (0.4, 0.6)))
    assert 0 < found.low < found.mean < found.high and found.high - found.low < 2 * independent
    record = comparison_to_json(comparison)
    assert (record["model"], record["step"], record["baseline"]) == (
        "runs/shapes",
        40,
        "assets/shapes",
    )
    assert record["rewards"]["shapes_strict"]["by_task"]["single"]["n"] == 20


def test_pairs_are_matched_by_identity_and_not_by_place():
    before = evaluation(0.5)
    shuffled = replace(before, samples=before.samples[::-1])
    found = Comparison(evaluation=shuffled, baseline=before).difference("shapes")
    assert (found.mean, found.low, found.high, found.tied) == (0, 0, 0, 1)


def test_one_sample_that_got_worse_is_lost():
    before = evaluation(0.5)
    index = next(n for n, sample in enumerate(before.samples) if sample.rewards["shapes_strict"])
    after = with_rewards(before, index=index, rewards={"shapes_strict": 0.0, "shapes": 0.5})
    found = Comparison(evaluation=after, baseline=before).difference("shapes_strict")
    assert (found.won, found.lost, found.mean) == (
        0,
        pytest.approx(1 / 140),
        pytest.approx(-1 / 140),
    )


def test_only_rewards_of_both_are_compared():
    before = evaluation(0.5)
    only_dense = [
        replace(each, rewards={"shapes": each.rewards["shapes"]}) for each in before.samples
    ]
    comparison = Comparison(evaluation=before, baseline=replace(before, samples=only_dense))
    assert comparison.reward_names == ["shapes"]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"num_inference_steps": 20},
        {"height": 128},
        {"true_cfg_scale": 4.0},
        {"guidance_scale_2": 3.0},
    ]
    + [{"num_frames": 5}],
)
def test_other_noise_or_settings_are_no_baseline(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
        Comparison(evaluation=evaluation(0.5), baseline=replace(evaluation(0.5), **change))
    fewer = replace(evaluation(0.5), samples=evaluation(0.5).samples[:100])
    with pytest.raises(
        ValueError,
        match=r"40 samples are only in one of evaluation \(140 samples\) and baseline \(100\)",
    ):
        Comparison(evaluation=evaluation(0.5), baseline=fewer)


def test_to_json_without_tasks_has_none():
    untasked = [replace(sample, task="") for sample in evaluation(0.5).samples]
    assert to_json(replace(evaluation(0.5), samples=untasked))["rewards"]["shapes"]["by_task"] == {}


def test_settings_tell_of_videos_and_of_both_experts_guidance():
    video = replace(evaluation(0.5), num_frames=9, guidance_scale=4.0, guidance_scale_2=3.0)
    assert "64x64x9, 10 steps, CFG 4 and 3, seed" in settings_text(video)
    assert "64x64x9, 10 steps, CFG 4, seed" in settings_text(replace(video, guidance_scale_2=0.0))
    assert "64x64, 10 steps, seed" in settings_text(evaluation(0.5))


def test_videos_are_kept_as_videos(tmp_path):
    before = evaluation(0.5)
    file = image_name(before.samples[0].prompt_id, 0, suffix=".mp4")
    samples = [
        replace(each, file=file if number == 0 else None)
        for number, each in enumerate(before.samples)
    ]
    write_evaluation(
        tmp_path,
        replace(before, samples=samples),
        {file: torch.zeros(5, 16, 16, 3, dtype=torch.uint8)},
    )
    assert len(list(read_frames(tmp_path / file))) == 5
    page = write_evaluation_page(tmp_path, read_evaluation(tmp_path)).read_text("utf-8")
    assert page.count("<video ") == 1 and "media-src data:" in page
