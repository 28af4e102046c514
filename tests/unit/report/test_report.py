import base64
import io
import math
import re

import pytest
from PIL import Image
from synthetic_run import metrics_of, samples_of, section_of, write_run

from megadiff.observe.samples import SavedSample, save_samples
from megadiff.observe.trackers import build_trackers
from megadiff.report import pictures
from megadiff.report.command import main
from megadiff.report.health import findings
from megadiff.report.pictures import evenly_spaced, pick_rows, step_rows
from megadiff.report.report import section_keys, stage_seconds, write_report
from megadiff.report.run_record import read_run


def page_of(folder) -> str:
    return write_report(folder).read_text("utf-8")


def saved(step: int, prompt: str, index: int = 0) -> SavedSample:
    return SavedSample(
        path=f"{prompt}{step}{index}",
        step=step,
        caption=prompt,
        rewards={},
        reward=0.0,
        prompt_id=prompt,
        sample_index=index,
        policy_version=step,
    )


def test_a_whole_run_shows_its_verdict_every_metric_and_every_prompt(tmp_path):
    page = page_of(write_run(tmp_path / "run", steps=60))
    assert re.search(r"<h1>Reward rose from 0\.\d+ to 0\.\d+\.</h1>", page)
    for key in metrics_of(10, num_steps=60):
        if key.startswith("reward/") and key.count("/") == 2:
            continue  # of one reward: in the table of the section Rewards
        assert key in page or key in (
            "time/step_s",
            *(f"time/{s}_s" for s in ("rollout", "reward", "train", "sync")),
        )
    strips = section_of(page, "Samples over time")
    assert strips.count('<article class="card">') == 4 and strips.count("<img") == 4 * 7
    assert "OPEN&#34; &lt;b&gt;&amp;&lt;/b&gt;" in page and "<b>&</b>" not in page
    assert "num_steps: 60" in page and "finished" in page


def write_supervised_run(folder, losses):
    with build_trackers(["jsonl"], folder, {}) as trackers:
        for step, loss in enumerate(losses, 1):
            figures = {"loss/flow_matching": loss, "optim/lr": 1e-3, "optim/grad_norm": 0.5}
            trackers.log(
                step, figures | {"time/data_s": 0.1, "time/train_s": 0.8, "time/step_s": 1.0}
            )
    return folder


@pytest.mark.parametrize(
    ("losses", "headline"),
    [
        (
            [2.0, 1.5, 1.2, 1.1, 1.0, *[0.5, 0.51, 0.49, 0.5, 0.5] * 2],
            "Loss fell from 1.36 to 0.5.",
        ),
        (
            [0.5, 0.4, 0.45, 0.55, 0.4, 0.45, 0.5, 0.4, 0.5, 0.4],
            "Loss went from 0.46 to 0.45: within the noise.",
        ),
        ([0.5], "One step so far, at a loss of 0.5."),
    ],
)
def test_a_supervised_run_tells_its_loss(tmp_path, losses, headline):
    page = page_of(write_supervised_run(tmp_path / "run", losses))
    assert f"<h1>{headline}</h1>" in page
    for text in (
        "Flow-matching loss",
        "Learning rate",
        "Gradient norm",
        "waiting for images and noise",
    ):
        assert text in page
    assert "eward" not in re.sub(
        r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL
    )


def test_the_page_needs_nothing_but_itself(tmp_path):
    page = page_of(write_run(tmp_path / "run", steps=12))
    assert not re.findall(r"https?://|@import|<link[^>]+stylesheet|url\(", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "steps, words",
    [
        (0, "No step is finished yet."),
        (1, "One step so far, at a reward of 0.4."),
        (2, "too early to say"),
    ],
)
def test_a_run_that_has_just_begun_has_a_page(tmp_path, steps, words):
    page = page_of(write_run(tmp_path / "run", steps=steps))
    assert words in page and ("still going" in page) == (steps > 0)


def test_nan_a_torn_line_and_missing_parts_are_no_obstacle(tmp_path):
    with build_trackers([], tmp_path, {}) as trackers:
        trackers.log(1, {"loss/policy": math.nan, "reward/mean": math.nan})
        trackers.log(3, {"time/rollout_s": 1.0})
        trackers.log(4, {"reward/mean": 0.5, "reward/std": math.inf, "odd/thing": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rewa')
    page = page_of(tmp_path)
    assert "NaN or infinity in loss/policy, reward/mean, reward/std" in page
    assert (
        "Other metrics" in page and "odd/thing" in page and "This run has no config.yaml." in page
    )


@pytest.mark.parametrize(
    "config",
    [
        "a: [",
        "just text",
        "train: 3\nalgorithm: {clip_range: x}",
        "train: {num_steps: '???'}",
        "- 1",
        "seed: 2024-13-45",
    ],
)
def test_a_config_that_cannot_be_read_is_shown_as_it_is(tmp_path, config):
    folder = write_run(tmp_path / "run", steps=3, sample_every=0)
    (folder / "config.yaml").write_text(config)
    assert f"<pre>{config.replace(chr(39), '&#39;')}</pre>" in page_of(folder)


def test_a_config_that_cannot_be_read_hides_no_report(tmp_path):
    """A file server may fail for a moment, and a file may be its owner's alone."""
    folder = write_run(tmp_path / "run", steps=3, sample_every=0)
    (folder / "config.yaml").unlink(missing_ok=True)
    (folder / "config.yaml").mkdir()
    record = read_run(folder)
    assert record.rows and record.settings == {} and record.config_text == ""


def test_a_damaged_image_leaves_a_gap(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)
    next((folder / "samples" / "step_000010").glob("000_*.png")).write_bytes(
        b"\x89PNG\r\n\x1a\ntorn"
    )
    page = page_of(folder)
    strips = section_of(page, "Samples over time")
    assert strips.count("<img") == 4 * 2 - 1 and strips.count('class="gap"') == 1
    # The best sample of that step too.
    extremes = section_of(page, "Rewards")
    assert extremes.count("<img") == 4 - 1 and extremes.count('class="gap"') == 1


def test_the_command_names_the_page_or_the_reason(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=2)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "neither config.yaml nor"), ("nowhere", "nowhere is no folder")):
        assert main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err


def test_writing_it_again_replaces_the_page_and_leaves_nothing_else(tmp_path):
    folder = write_run(tmp_path / "run", steps=2)
    before = {path.name for path in folder.iterdir()}
    write_report(folder)
    write_report(folder)
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}


def test_large_images_are_made_smaller_until_the_page_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "SECTION_BYTES", 26_000)
    for step in (1, 2):
        save_samples(tmp_path, step=step, samples=samples_of(1, num_steps=50, size=400))
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    strips = section_of(page_of(tmp_path), "Samples over time")
    images = re.findall(r"data:image/webp;base64,([^\"]+)", strips)
    assert len(images) == 8 and sum(map(len, images)) <= 26_000 * 4 / 3 + 64
    assert Image.open(io.BytesIO(base64.b64decode(images[0]))).size == (96, 96)


def test_prompts_that_never_come_again_have_a_row_a_step():
    samples = [saved(step, f"{name} at {step}") for step in (1, 5, 9) for name in "ab"]
    rows = step_rows(samples)
    assert [[sample.prompt_id for sample in row] for row in rows] == [
        [f"a at {step}", f"b at {step}"] for step in (1, 5, 9)
    ]


def test_rows_are_the_prompts_seen_most_and_columns_their_steps():
    samples = [
        saved(1, "rare"),
        saved(1, "often", 1),
        saved(1, "often", 0),
        saved(2, "often"),
        saved(3, "often"),
    ]
    rows = pick_rows(samples)
    assert [[None if s is None else s.path for s in row] for row in rows] == [
        ["often10", "often20", "often30"],
        ["rare10", None, None],
    ]


def test_prompts_of_scattered_steps_have_their_own_columns():
    samples = [
        saved(2 * step + offset, prompt) for step in range(20) for offset, prompt in enumerate("ab")
    ]
    rows = pick_rows(samples)
    assert [len(row) for row in rows] == [10, 10] and None not in rows[0]
    assert (rows[0][0].step, rows[0][-1].step, rows[1][-1].step) == (0, 38, 39)
    assert len(pick_rows([saved(1, str(number)) for number in range(30)])) == 8


def test_evenly_spaced_keeps_both_ends():
    assert evenly_spaced(range(100), 4) == [0, 33, 66, 99]
    assert evenly_spaced([5, 7], 4) == [5, 7]


def test_stages_and_the_rest_make_the_whole_step():
    row = {"step": 1, "time/rollout_s": 2.0, "time/train_s": None, "time/step_s": 3.0}
    assert stage_seconds(row) == {
        "data": 0.0,
        "rollout": 2.0,
        "reward": 0.0,
        "train": 0.0,
        "sync": 0.0,
        "other": 1.0,
    }


def test_every_metric_has_one_section():
    keys = ["time/step_s", "reward/zz", "reward/mean", "loss/policy", "new/thing", "eval/ocr"]
    sections = section_keys(keys)
    assert sections["Reward"] == ["reward/mean", "reward/zz"] and sections["Other metrics"] == [
        "new/thing"
    ]
    assert sections["Where the time goes"] == ["time/step_s"]
    assert sorted(sum(sections.values(), [])) == sorted(keys)


@pytest.mark.slow
def test_a_page_of_a_thousand_steps_is_below_a_megabyte(tmp_path):
    rows = [metrics_of(step, num_steps=1000) for step in range(1, 1001)]
    with build_trackers(["jsonl"], tmp_path, {}) as trackers:
        for step, row in enumerate(rows, 1):
            trackers.log(step, row)
    for step in range(100, 1001, 100):
        save_samples(tmp_path, step=step, samples=samples_of(step, num_steps=1000, size=512))
    assert len(page_of(tmp_path)) < 1_000_000


def texts_of(answer_html):
    return re.findall(r"<li>(.*?)</li>", answer_html)


def answers_of(page):
    """Return question → (its mark, its sentences)."""
    parts = re.findall(r'<div class="answer([^"]*)"><h2>(.*?)</h2>(.*?)</div>', page, re.DOTALL)
    return {question: (mark.strip(), texts_of(html)) for mark, question, html in parts}


def test_the_first_screen_answers_three_questions(tmp_path):
    folder = write_run(tmp_path / "run", steps=60)
    answers = answers_of(page_of(folder))
    assert list(answers) == ["Did it work?", "Can I trust it?", "What next?"]
    mark, (sentence,) = answers["Did it work?"]
    assert mark == "is-good"
    assert re.fullmatch(r"Yes: the reward in training went from 0\.\d+ to 0\.\d+\.", sentence)
    assert answers["Can I trust it?"][0] in ("is-unsure", "is-bad")  # nothing was held out


def test_a_run_that_has_not_ended_is_told_how_it_goes_on(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    (folder / "config.yaml").write_text("train: {num_steps: 9}\n")
    _, sentences = answers_of(page_of(folder))["What next?"]
    assert sentences[0].startswith("If it does not run: the same command goes on")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"reward/zero_std_ratio": 0.8}, "80% of the groups"),
        ({"policy/clip_fraction": 0.6}, "60% of the ratios"),
        ({"parity/log_prob_gap_max": 1e-4}, "half the clip range is 5e−5"),
        ({"optim/grad_norm": None}, "NaN or infinity in optim/grad_norm"),
        ({"time/sync_s": 2.0}, "Weight sync takes"),
        ({"time/step_s": 9.0}, "in no stage"),
    ],
)
def test_findings_name_what_is_wrong_and_only_that(change, words):
    config = {"algorithm": {"clip_range": 1e-4}}
    healthy = [{"step": step, **metrics_of(step, num_steps=60)} for step in range(1, 21)]
    assert findings(healthy, config, None) == []
    found = findings([row | change for row in healthy], config, None)
    assert len(found) == 1 and words in found[0]


def test_a_parity_gap_is_no_finding_where_log_probs_are_recomputed():
    rows = [{"step": 1, "parity/log_prob_gap_max": 1e-4}]
    for old_log_prob, count in (("rollout", 1), ("recompute", 0), ("auto", 0)):
        algorithm = {"clip_range": 1e-4, "old_log_prob": old_log_prob}
        assert len(findings(rows, {"algorithm": algorithm}, None)) == count


def test_a_jump_of_the_gradient_norm_is_found():
    rows = [{"step": step, "optim/grad_norm": 50.0 if step == 18 else 1.0} for step in range(1, 21)]
    assert "jumped to 50; its median is 1" in findings(rows, {}, None)[0]
