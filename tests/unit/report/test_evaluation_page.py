import re
from dataclasses import replace

from synthetic_evaluation import TASKS, evaluation, write

from megadiff.observe.evaluation import Comparison
from megadiff.report.evaluation_page import headline, write_evaluation_page
from megadiff.report.evaluation_table import to_text


def compared(tmp_path):
    before = write(tmp_path / "baseline", evaluation(0.4), sharpness=0.2)
    after = write(tmp_path, evaluation(0.7, model="runs/shapes", step=40))
    return Comparison(evaluation=after, baseline=before)


def test_the_page_needs_nothing_but_itself_and_shows_every_task(tmp_path):
    page = write_evaluation_page(tmp_path, write(tmp_path, evaluation(0.5))).read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page)
    for task in TASKS:
        assert page.count(f'<span class="name">{task}</span>') == 2  # once a reward
    assert len(re.findall(r"data:image/webp;base64,", page)) == 28
    assert "<b>circle</b>" not in page and "a red &lt;b&gt;circle&lt;/b&gt; &amp; single 0" in page
    assert re.search(r"<h1>shapes_strict: \d\d\.\d\s%\.</h1>", page)
    assert page.count("✓") + page.count("✗") == 28
    shown = list(dict.fromkeys(re.findall(r'<p class="task">(.*?)</p>', page)))
    assert shown == list(TASKS)  # in the order of the prompt file
    assert (
        "colour entropy, bit</span><strong>0.52" in page and "saturation</span><strong>" not in page
    )


def test_a_comparison_shows_both_on_the_same_noise(tmp_path):
    comparison = compared(tmp_path)
    page = write_evaluation_page(
        tmp_path, comparison.evaluation, comparison, baseline_folder=tmp_path / "baseline"
    ).read_text("utf-8")
    assert len(re.findall(r"data:image/webp;base64,", page)) == 56
    pairs = re.findall(r'<div class="pair">(.*?)</li>', page, re.S)
    assert len(pairs) == 28 and all(pair.count("<img") == 2 for pair in pairs)
    assert re.search(r"<h1>shapes_strict rose from \d\d\.\d\s% to \d\d\.\d\s%\.</h1>", page)
    assert (
        page.count('<rect class="part4"')
        == page.count('<rect class="part0"')
        == 2 * (len(TASKS) + 1)
    )


def test_the_headline_says_a_change_only_beyond_its_interval(tmp_path):
    before, after = evaluation(0.4), evaluation(0.7)
    assert " rose from " in headline(after, Comparison(evaluation=after, baseline=before))
    assert " fell from " in headline(before, Comparison(evaluation=before, baseline=after))
    assert headline(before, Comparison(evaluation=before, baseline=before)).endswith(
        ": no clear difference."
    )


def test_a_page_without_images_or_tasks_is_whole(tmp_path):
    plain = evaluation(0.5)
    plain = replace(plain, samples=[replace(sample, task="") for sample in plain.samples])
    page = write_evaluation_page(tmp_path, plain).read_text("utf-8")
    assert 'class="name">all</span>' in page and "<h2>Samples</h2>" not in page


def test_the_table_has_a_row_a_task_and_lines_up(tmp_path):
    text = to_text(evaluation(0.5))
    strict = text.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in strict] == ["shapes_strict", "all", *TASKS]
    assert re.fullmatch(r"all +\d\d\.\d % +\d\d\.\d to \d\d\.\d % +140", strict[1])
    assert len({len(line) for line in strict}) == 1 and text.isascii()
    assert "saturation" in text and "n/a" in text


def test_the_table_of_a_comparison_counts_points(tmp_path):
    comparison = compared(tmp_path)
    text = to_text(comparison.evaluation, comparison)
    row = next(line for line in text.splitlines() if line.startswith("all "))
    gain = 100 * comparison.difference("shapes_strict").mean
    assert f"{gain:+.1f}" in row and row.endswith(" 140")
    assert "differences are on the same noise" in text
