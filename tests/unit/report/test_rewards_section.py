"""The section of rewards: figures of each, and what it liked best and least."""

import math
from dataclasses import replace

from PIL import Image
from synthetic_run import samples_of, section_of, write_run

from megadiff.observe.samples import SavedSample, read_samples, save_samples
from megadiff.observe.trackers import build_trackers
from megadiff.report.report import write_report
from megadiff.report.rewards_section import rewards_parts

ROWS = [
    {
        "step": step,
        "reward/mean": 0.5,
        "reward/group_std": 0.2,
        "reward/text": 0.2 + 0.01 * step,
        "reward/text/group_std": 0.3,
        "reward/text/share_of_advantage": 0.98,
        "reward/pick": 0.8,
        "reward/pick/group_std": 0.02,
        "reward/pick/share_of_advantage": 0.04,
        "reward/pick/mass": None if step < 3 else 0.9,
        "time/reward_text_s": 1.5,
        **({"reward/pick/dropped": 2.0, "reward/pick/retries": 5.0} if step % 2 else {}),
    }
    for step in range(1, 11)
]


def test_a_reward_has_a_row_and_what_was_not_logged_is_empty():
    config = {"reward": {"text": {"weight": 1.0}, "watched": {"weight": 0}}}
    table = rewards_parts(ROWS, config, [])["table"]
    assert table == [
        [
            "reward",
            "mean, first → last",
            "spread within groups",
            "share of the advantage",
            "failed samples",
            "seconds a step",
            "weight",
            "mass",
            "retries",
        ],
        ["text", "0.23 → 0.28", "0.3", "0.98", "", "1.5", "1", "", ""],
        ["watched", "", "", "", "", "", "0, only watched", "", ""],
        ["pick", "0.8 → 0.8", "0.02", "0.04", "10", "", "", "0.9", "25"],
    ]
    one_step = rewards_parts([{"step": 1, "reward/text": 0.5}], {"reward": {"text": "x"}}, [])
    assert one_step["table"][1] == ["text", "0.5", "", "", "", "", ""]
    assert rewards_parts([{"step": 1, "reward/mean": 0.5, "loss/policy": 0.1}], {}, []) == {}


def test_best_and_worst_are_of_those_with_a_score(tmp_path):
    scores = {"a": 0.1, "b": None, "c": 0.9, "d": math.nan, "e": -0.5}
    samples = []
    for step in (1, 5, 9):
        for caption, score in scores.items():
            path = tmp_path / f"{caption}{step}.png"
            Image.new("RGB", (8, 8)).save(path)
            sample = SavedSample(
                path=path,
                step=step,
                caption=caption,
                rewards={"text": 0.0 if step == 1 and score else score, "empty": None},
                reward=0.0,
                prompt_id=caption,
                sample_index=0,
                policy_version=step,
            )
            samples.append(sample)
    (strip,) = rewards_parts([], {"reward": {"text": {}, "empty": {}}}, samples)["strips"]
    # At step 1 all are alike; step 5 is neither the first nor the last.
    assert strip["caption"] == "Best and worst by text"
    assert [(look["label"], look["reward"]) for look in strip["looks"]] == [
        ("9 best", 0.9),
        ("9 worst", -0.5),
    ]
    assert [look["alt"] for look in strip["looks"]] == ["c, step 9", "e, step 9"]
    config = {"reward": {"text": {"weight": -2}, "empty": {}}}
    (strip,) = rewards_parts([], config, samples)["strips"]
    assert [look["reward"] for look in strip["looks"]] == [-0.5, 0.9]


def test_the_page_has_the_section_and_a_run_without_scores_too(tmp_path):
    text = section_of(write_report(write_run(tmp_path / "run", steps=60)).read_text(), "Rewards")
    assert text.count("<img") == 4 and "60 worst" in text and "Best and worst by color" in text
    assert '<th scope="row">jpeg_size</th>' in text and "0, only watched" in text
    assert "<figure" not in text  # no charts, all is in the table

    folder = tmp_path / "failed"
    with build_trackers([], folder, {}) as trackers:
        trackers.log(1, {"reward/mean": 0.5, "reward/color/dropped": 3.0})
    record = samples_of(1, num_steps=2)[0]
    unscored = replace(record, rewards={"color": None, "ocr": math.nan})
    save_samples(folder, step=1, samples=[unscored])
    assert read_samples(folder)[0].rewards == {"color": None, "ocr": None}
    assert "<td>3</td>" in section_of(write_report(folder).read_text(), "Rewards")
