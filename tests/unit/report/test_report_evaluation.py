import io
import json
import re
from dataclasses import asdict, replace

import pytest
import yaml
from rich.console import Console
from synthetic_run import TASKS, eval_metrics_of, evaluation_of, section_of, write_run

from megadiff.observe.evaluation import (
    Comparison,
    Evaluation,
    evaluation_folder,
    evaluation_folders,
    read_evaluation,
    write_evaluation,
)
from megadiff.observe.heldout import compare_ends, read_evaluations
from megadiff.observe.trackers import build_trackers
from megadiff.report.compare import common_reward, read_runs, summary_rows
from megadiff.report.evaluation_page import leading_reward
from megadiff.report.evaluation_strips import evaluation_strips
from megadiff.report.report import held_out_headline, write_report
from megadiff.report.run_follower import RunFollower
from megadiff.report.watch_frame import frame


def page_of(folder) -> str:
    return write_report(folder).read_text("utf-8")


def evaluation(step: int):
    return evaluation_of(step, num_steps=60, size=8)[0]


def test_the_first_and_last_evaluation_stand_side_by_side(tmp_path):
    page = page_of(write_run(tmp_path / "run", steps=60, evaluated=True))
    held_out = section_of(page, "Held-out evaluation")
    assert "<h1>Held-out accuracy rose from 47.0 % to 76.0 %.</h1>" in page
    assert "100 samples of 4 prompts, 10 steps each" in held_out
    for task in TASKS:
        assert held_out.count(f'<span class="name">{task}</span>') == 2  # once a reward
    assert held_out.index("eval/shapes_strict") < held_out.index("eval/color")  # the accuracy leads
    assert held_out.count('<path class="whisker"') == 2 * 2 * (len(TASKS) + 1)
    assert held_out.count('<li><div class="pair">') == 24 and held_out.count("<img") == 48
    assert held_out.count("step 0") and held_out.count("step 60")
    assert "a sign that says &#34;OPEN&#34; &lt;b&gt;&amp;&lt;/b&gt;, step 60" in held_out
    assert "<b>&</b>" not in page


def test_pairs_are_the_same_sample_with_verdicts_in_words(tmp_path):
    page = page_of(write_run(tmp_path / "run", steps=60, evaluated=True))
    pairs = re.findall(r'<div class="pair">(.*?)</li>', page, re.S)
    for pair in pairs:
        (before, after) = re.findall(r'alt="(.*?)"', pair)
        assert before.removesuffix(", step 0") == after.removesuffix(", step 60")
    verdicts = [re.findall(r"</span> (right|wrong)</b>", pair) for pair in pairs]
    right = {
        step: sum(s.rewards["shapes_strict"] for s in evaluation(step).samples if s.file)
        for step in (0, 60)
    }
    assert [sum(v[place] == "right" for v in verdicts) for place in (0, 1)] == [right[0], right[60]]
    assert right[0] < right[60] < len(pairs)


def test_diversity_has_a_section_next_to_reward(tmp_path):
    page = page_of(write_run(tmp_path / "run", steps=60, evaluated=True))
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert (
        titles.index("Diversity")
        == titles.index("Reward") + 1
        == titles.index("Held-out evaluation") - 1
    )
    diversity = section_of(page, "Diversity")
    for key in ("diversity/colour_entropy_bit", "diversity/clipped_share", "eval/latent_spread"):
        assert key in diversity and key not in section_of(page, "Held-out evaluation")


@pytest.mark.parametrize(
    "steps, words", [(0, "No step is finished yet."), (5, "Reward went from 0.")]
)
def test_one_evaluation_is_shown_alone(tmp_path, steps, words):
    folder = write_run(tmp_path / "run", steps=steps, evaluated=True)
    page = page_of(folder)
    assert f"<h1>{words}" in page
    assert section_of(page, "Held-out evaluation").count("<img") == 24
    assert ("not started" in page) == (steps == 0)
    assert f"<span>Steps</span><strong>{steps}</strong>" in page
    assert "Held-out accuracy</span><strong>47.0 %</strong><em>95 %: 37.5 to 56.7 %</em>" in page


def test_a_change_within_its_interval_is_called_noise():
    before, after = evaluation(0), evaluation(60)
    assert held_out_headline(Comparison(evaluation=before, baseline=after)) == (
        "Held-out accuracy fell from 76.0 % to 47.0 %."
    )
    flipped = [
        replace(sample, rewards=sample.rewards | {"shapes_strict": 1.0}) if number == 24 else sample
        for number, sample in enumerate(before.samples)
    ]
    barely = Comparison(evaluation=replace(before, samples=flipped), baseline=before)
    assert (
        held_out_headline(barely)
        == "Held-out accuracy went from 47.0 % to 48.0 %: within the noise."
    )
    assert held_out_headline(None) is None


def test_few_samples_that_changed_alike_are_no_noise_and_not_clear():
    def all_score(value: float) -> Evaluation:
        samples = [
            replace(sample, rewards={"shapes_strict": value})
            for sample in evaluation(0).samples[:5]
        ]
        return replace(evaluation(0), samples=samples)

    assert held_out_headline(Comparison(evaluation=all_score(1.0), baseline=all_score(0.0))) == (
        "Held-out accuracy went from 0.0 % to 100.0 %: too few samples changed to tell."
    )


def test_the_headline_is_of_a_reward_that_was_trained(tmp_path):
    folder = write_run(tmp_path / "run", steps=60, evaluated=True)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["reward"]["shapes_strict"] = {"type": "strict", "weight": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page = page_of(folder)
    assert "<h1>Held-out color rose from" in page
    assert "Watched, not trained on: +29.0 points of shapes_strict" in page
    config["reward"]["shapes_strict"]["weight"] = 0.5
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert "<h1>Held-out accuracy rose from" in page_of(folder)


def test_of_several_rewards_the_one_with_the_largest_weight_leads():
    found, _ = evaluation_of(30, num_steps=60, size=8)

    def scored(**rewards):
        return replace(
            found, samples=[replace(sample, rewards=rewards) for sample in found.samples]
        )

    graded = scored(size=0.3, hue=0.5, tone=0.7)
    assert leading_reward(graded) == "size"
    assert leading_reward(graded, {"size": 0.2}) == "hue"
    assert leading_reward(graded, {"size": 0.2, "hue": 0.5}) == "tone"
    assert leading_reward(graded, {"size": 0.2, "hue": 0.2, "tone": 0.0}) == "size"
    assert leading_reward(scored(size=0.3, hue=1.0), {"size": 1.0, "hue": 0.2}) == "hue"


def test_a_held_out_reward_that_is_no_verdict_is_the_headline_by_its_name(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, steps=30)
    for step in (0, 30):
        found, images = evaluation_of(step, num_steps=60, size=8)
        plain = [
            replace(sample, rewards={"color": sample.rewards["color"]}) for sample in found.samples
        ]
        write_evaluation(evaluation_folder(folder, step), replace(found, samples=plain), images)
    page = page_of(folder)
    assert "<h1>Held-out color rose from" in page and "Held-out color</span><strong>0." in page
    assert "✓" not in page and leading_reward(replace(found, samples=plain)) == "color"
    unasked = [replace(sample, rewards={"ocr": None, **sample.rewards}) for sample in plain]
    found = replace(found, samples=unasked)
    assert not found.is_share("ocr") and leading_reward(found) == "color"
    assert "Under each picture stands its color." in page
    assert "<p><b>0.8</b></p>" in page and "<p><b>0.4</b></p>" in page


def test_curves_alone_are_shown_when_there_are_no_records(tmp_path):
    with build_trackers([], tmp_path, {}) as trackers:
        trackers.log(0, eval_metrics_of(0, num_steps=60))
        trackers.log(1, {"reward/mean": 0.5})
    page = page_of(tmp_path)
    assert (
        "eval/shapes_strict" in section_of(page, "Held-out evaluation")
        and '<figure class="card bars"' not in page
    )


def test_evaluations_on_other_noise_are_not_compared(tmp_path, caplog):
    folder = write_run(tmp_path / "run", steps=60, evaluated=True)
    found, images = evaluation_of(60, num_steps=60)
    write_evaluation(evaluation_folder(folder, 60), replace(found, seed=1), images)
    page = page_of(folder)
    assert "not compared with the run's first evaluation: seed=1, but 0" in caplog.text
    assert "<h1>Reward rose" in page and section_of(page, "Held-out evaluation").count("<img") == 24


def test_a_torn_record_is_passed_over(tmp_path, caplog):
    folder = write_run(tmp_path / "run", steps=30, evaluated=True)
    (evaluation_folder(folder, 30) / "evaluation.json").write_text("{")
    assert [each.step for _, each in read_evaluations(folder)] == [0, 20]
    assert compare_ends(folder).evaluation.step == 20 and "skipped" in caplog.text
    assert "The same noise at step 0 and step 20" in page_of(folder)


def test_a_picture_that_is_gone_leaves_its_verdict(tmp_path):
    folder = write_run(tmp_path / "run", steps=60, evaluated=True)
    next((evaluation_folder(folder, 60) / "images").iterdir()).unlink()
    held_out = section_of(page_of(folder), "Held-out evaluation")
    assert held_out.count("<img") == 47 and held_out.count('<div class="gap"></div>') == 1
    assert len(re.findall("</span> (right|wrong)</b>", held_out)) == 48


def test_a_reward_that_the_first_evaluation_had_not_is_shown_without_a_value(tmp_path):
    folder = write_run(tmp_path / "run", steps=60, evaluated=True)
    first, images = evaluation_of(0, num_steps=60)
    plain = [
        replace(sample, rewards={"color": sample.rewards["color"]}) for sample in first.samples
    ]
    write_evaluation(evaluation_folder(folder, 0), replace(first, samples=plain), images)
    pairs = re.findall(r'<div class="pair">(.*?)</li>', page_of(folder), re.S)
    assert len(pairs) == 24 and all("<b>–</b>" in pair for pair in pairs)
    assert all(re.search("</span> (right|wrong)</b>", pair) for pair in pairs)


def test_held_out_prompts_are_followed_over_all_evaluations(tmp_path):
    folder = write_run(tmp_path / "run", steps=40, evaluated=True)
    over_time = section_of(page_of(folder), "Samples over time")
    rows = over_time.split('<article class="card">')[1:]
    assert len(rows) == 8 and "from the same noise at each evaluation" in over_time
    for row in rows:
        assert re.findall(r"<p><span>(\d+)</span>", row) == ["0", "10", "20", "30", "40"]
    captions = [re.search("<h3>(.*?)</h3>", row)[1] for row in rows]
    assert len(set(captions[: len(TASKS)])) == len(TASKS)  # tasks take turns

    next((evaluation_folder(folder, 20) / "images").iterdir()).unlink()
    assert section_of(page_of(folder), "Samples over time").count('class="gap"') <= 1


def test_two_evaluations_leave_that_to_the_samples_of_training(tmp_path):
    folder = write_run(tmp_path / "run", steps=10, evaluated=True)
    assert "held-out" not in section_of(page_of(folder), "Samples over time")


@pytest.mark.parametrize(("steps", "mark"), [((0, 60), "is-good"), ((60, 0), "is-bad")])
def test_a_held_out_change_is_the_answer(tmp_path, steps, mark):
    folder = write_run(tmp_path / "run", steps=60)
    for step, weights in zip((0, 60), steps, strict=True):
        found, images = evaluation_of(weights, num_steps=60, size=8)
        write_evaluation(evaluation_folder(folder, step), replace(found, step=step), images)
    page = page_of(folder)
    gain = "Yes: +29.0" if mark == "is-good" else "No: −29.0"
    assert f'<div class="answer {mark}"><h2>Did it work?</h2>' in page
    assert f"{gain} points of shapes_strict, 95 % interval" in page
    assert "on 100 held-out samples from the same noise." in page
    assert "Most is left to learn in “" in page
    is_good = mark == "is-good" and '<div class="answer is-bad">' not in page
    assert ("Take the model: megadiff convert" in page) == is_good


def test_a_reward_of_weight_0_leads_nowhere(tmp_path):
    """A reader follows one reward through the headline, the bars, the pictures and the terminal."""
    folder = write_run(tmp_path / "run", steps=60, evaluated=True, size=8)
    config = folder / "config.yaml"
    weight = "  shapes_strict: {type: x, weight: 0.0}\n"
    config.write_text(config.read_text().replace("reward:\n", f"reward:\n{weight}"))

    page = page_of(folder)
    held_out = section_of(page, "Held-out evaluation")
    assert "<h1>Held-out color rose" in page
    assert held_out.index("eval/color") < held_out.index("eval/shapes_strict")
    assert not re.search(r"</span> (right|wrong)</b>", held_out)  # of shapes_strict alone

    shown = io.StringIO()
    Console(file=shown, width=100).print(frame(RunFollower(folder).look(), 100))
    assert shown.getvalue().index("eval/color") < shown.getvalue().index("eval/shapes_strict")
    assert common_reward(read_runs([folder, write_run(tmp_path / "b", steps=1)])) == "color"

    first, *_ = evaluation_strips(folder, {"shapes_strict": 0.0})
    values = {look["reward"] for look in first["looks"]}
    assert values <= {0.4, 0.8} and values


def test_a_strip_shows_one_reward_in_every_look(tmp_path):
    """One that is 0 for all samples at first looks like a share there, and is none."""
    folder = write_run(tmp_path / "run", steps=60, evaluated=True, size=8)
    for step, at in evaluation_folders(folder):
        found = read_evaluation(at)
        samples = []
        for number, sample in enumerate(found.samples):
            legible = 0.0 if step == 0 else 0.3 + number / 1000
            samples.append(replace(sample, rewards={"style": 0.6, "ocr": legible}))
        record = json.loads((at / "evaluation.json").read_text("utf-8"))
        record["samples"] = [asdict(sample) for sample in samples]
        (at / "evaluation.json").write_text(json.dumps(record))
    for strip in evaluation_strips(folder):
        assert {look["reward"] for look in strip["looks"]} == {0.6}


def test_the_wall_time_has_the_evaluations(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    rows = [{"step": 0, "time/evaluate_s": 100.0}]
    rows += [{"step": step, "reward/mean": 0.5, "time/step_s": 10.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "<strong>2 min 00 s</strong><em>10.0 s a step, 1 min 40 s of evaluations</em>"
    assert f"<span>Wall time</span>{text}" in page_of(folder)

    head, row, _ = summary_rows(read_runs([folder, write_run(tmp_path / "b", steps=1)]))
    assert row[head.index("in all")] == "2 min 00 s"
