import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from synthetic_run import PROMPTS, TASKS, evaluation_of, section_of, write_run

from megadiff.observe.evaluation import evaluation_folder, write_evaluation
from megadiff.observe.events import Events
from megadiff.report.compare import config_rows, distinct_names, headline, pair_up, read_runs
from megadiff.report.compare_command import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Three runs: of two lengths, two of one name, the last without evaluations."""
    root = tmp_path_factory.mktemp("runs")
    folders = [
        write_run(root / "first" / "shapes", steps=60, evaluated=True, size=8),
        write_run(root / "second" / "shapes", steps=40, evaluated=True, size=8),
        write_run(root / "plain", steps=20, size=8),
    ]
    config = folders[1] / "config.yaml"
    config.write_text(config.read_text().replace("group_size: 8", "group_size: 16\n  beta: 2.0"))
    return folders


def test_one_page_and_a_summary_compare_runs(runs, tmp_path, capsys):
    page_path = tmp_path / "page.html"
    assert main([*map(str, runs), "--out", str(page_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Held-out shapes_strict ends at 76.0 % in first/shapes")
    assert text.rstrip().endswith(str(page_path))
    assert "algorithm.group_size             8             16      8" in text
    assert "plain has no evaluation (eval.every)" in text

    page = page_path.read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page)
    differs = re.findall(r'<th scope="row">(.*?)</th>', section_of(page, "What differs"))
    assert differs == ["algorithm.group_size", "algorithm.beta"]
    for name in ("first/shapes", "second/shapes", "plain"):
        assert f"</i>{name}</li>" in page
    assert len(page) < 1_000_000


def test_curves_of_different_lengths_share_their_axes(runs, tmp_path):
    main([*map(str, runs), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text("utf-8")
    (chart,) = [
        figure
        for figure in re.findall(r"<figure.*?</figure>", page, re.S)
        if "<code>reward/mean</code>" in figure
    ]
    lines = re.findall(r'<path class="line run(\d)" d="([^"]*)"', chart)
    assert [number for number, _ in lines] == ["0", "1", "2"]
    ends = [float(re.findall(r"([\d.]+) [\d.]+", line)[-1]) for _, line in lines]
    assert ends == pytest.approx([1000, 1000 * 39 / 59, 1000 * 19 / 59], abs=1)

    data = json.loads(unescape(re.search(r'data-chart="([^"]*)"', chart)[1]))
    assert data["steps"] == list(range(1, 61))
    # the shorter runs have no value at the last step
    last = [texts[-1] for _, texts in data["series"]]
    assert last[1:] == ["–", "–"] and last[0] != "–"


def test_pairs_are_of_the_same_noise(runs):
    pairing = pair_up(read_runs(runs))
    (pair,) = pairing.pairs
    assert (pair.name, pair.against) == ("second/shapes", "first/shapes")
    gain = pair.comparison.difference("shapes_strict")
    assert gain.n == 25 * len(TASKS) and gain.mean < 0
    assert pairing.notes == ["plain has no evaluation (eval.every)"]
    row = next(row for row in pairing.rows if "shapes_strict" in row)
    assert row[3:6] == ["60 and 40", "76.0 %", "67.0 %"]


def test_other_noise_is_never_paired_but_finds_its_own(tmp_path):
    for name, seed, weights in (("a", 0, 0), ("b", 1, 0), ("c", 1, 60), ("d", 2, 60)):
        folder = tmp_path / name
        write_run(folder, steps=1)
        found, _ = evaluation_of(weights, num_steps=60, size=8)
        plain = [replace(sample, file=None) for sample in found.samples]
        found = replace(found, seed=seed, samples=plain)
        write_evaluation(evaluation_folder(folder, 1), found, {})
    runs = read_runs([tmp_path / name for name in "abcd"])
    pairing = pair_up(runs)
    assert [(pair.name, pair.against) for pair in pairing.pairs] == [("c", "b")]
    # b is in a pair; d drew what nobody else did, and a was first
    assert [note.partition(":")[0] for note in pairing.notes] == ["d against a"]
    # d is ahead of none of them: it is in no pair
    assert headline(runs, pairing).endswith("The difference between b and c is clear.")
    two = {name: runs[name] for name in "bc"}
    assert headline(two, pair_up(two)).endswith("The difference is clear.")


def test_a_tie_is_told_as_one(tmp_path):
    for name in "ab":
        folder = write_run(tmp_path / name, steps=1)
        found, _ = evaluation_of(60, num_steps=60, size=8)
        plain = [replace(sample, file=None) for sample in found.samples]
        write_evaluation(evaluation_folder(folder, 1), replace(found, samples=plain), {})
    runs = read_runs([tmp_path / name for name in "ab"])
    assert "ends at 76.0 % in both. The difference is not" in headline(runs, pair_up(runs))


def test_names_are_as_long_as_they_must_be():
    paths = [Path("/x/1/a"), Path("/x/2/a"), Path("/x/2/b"), Path("/y/2/a")]
    assert distinct_names(paths) == ["1/a", "x/2/a", "b", "y/2/a"]


def test_runs_without_scores_and_equal_configs_have_a_page(tmp_path, capsys):
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("train: {num_steps: 9}\n")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c.html")]) == 0
    text = capsys.readouterr().out
    assert "2 runs with no score in common." in text and "The configs are the same." in text
    assert config_rows(read_runs([tmp_path / "a", tmp_path / "b"]))[1:] == []


def test_a_run_that_was_resumed_with_other_settings_says_so(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("train: {num_steps: 9}\n")
    Events(tmp_path / "b").write("run_resumed", step=7, text="with other settings: seed 0 → 1")
    assert config_rows(read_runs([tmp_path / "a", tmp_path / "b"]))[1:] == [
        ["resumed", "–", "at step 7 with other settings: seed 0 → 1"]
    ]


def test_what_cannot_be_compared_is_refused(runs, tmp_path, capsys):
    for folders, words in (
        (runs[:1], "1 runs, a comparison takes 2 to 16"),
        ([runs[0], runs[0].parent / "." / "shapes"], "was given twice"),
        ([runs[0], tmp_path / "nowhere"], "is no folder"),
        ([runs[0], tmp_path], "is no run"),
    ):
        assert main([*map(str, folders), "--out", str(tmp_path / "page.html")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()

    config = runs[0] / "config.yaml"
    before = config.read_text()
    for out, words in ((config, "is there and no .html"), (tmp_path / "no/a.html", "no folder")):
        assert main([*map(str, runs), "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    assert config.read_text() == before


def test_a_checkpoint_is_no_run(runs, tmp_path, capsys):
    """Though it holds the run's config."""
    checkpoint = tmp_path / "run/checkpoints/step_000003"
    checkpoint.mkdir(parents=True)
    for name in ("config.yaml", "progress.json"):
        (checkpoint / name).write_text("{}")
    assert main([str(runs[0]), str(checkpoint)]) == 2
    assert f"is a checkpoint; give its run's folder, {tmp_path}/run" in capsys.readouterr().err
    assert main([str(runs[0]), str(checkpoint.parent)]) == 2
    assert "it holds runs" not in capsys.readouterr().err


def test_values_and_their_change_are_written_alike(tmp_path):
    """Where scores are shares in one evaluation only, as of a policy that has collapsed."""
    for name, scale in (("before", 0.44), ("now", 1.0)):
        folder = write_run(tmp_path / name, steps=20, evaluated=True, size=8)
        found, _ = evaluation_of(20, num_steps=20)
        samples = [replace(sample, rewards={"shapes_strict": scale}) for sample in found.samples]
        write_evaluation(evaluation_folder(folder, 20), replace(found, samples=samples), {})
    (_, row) = pair_up(read_runs([tmp_path / "before", tmp_path / "now"])).rows
    assert row[4:7] == ["0.44", "1", "+0.56"]


def test_names_of_runs_are_escaped(tmp_path):
    folders = [tmp_path / "<b>a", tmp_path / "b"]
    for folder in folders:
        write_run(folder, steps=2, sample_every=0)
    main([*map(str, folders), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<b>a" not in page and "&lt;b&gt;a" in page and PROMPTS[0] not in page
