"""The page of `megadiff compare` in a real browser, wide and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import write_run

from megadiff.report.compare import read_runs
from megadiff.report.compare_command import write_comparison
from tests.e2e.test_report_browser import BROWSER, look

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome found"
)

PROBE = """<script>
addEventListener("load", () => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const seen = { overflow: document.documentElement.scrollWidth - innerWidth };
  const hero = document.querySelector(".chart.hero");
  seen.strokes = all(".line", hero).map((line) => getComputedStyle(line).stroke);
  seen.drawn = all(".line", hero).map((line) => line.getTotalLength());
  const area = hero.querySelector(".area");
  const end = { clientX: area.getBoundingClientRect().right, bubbles: true };
  area.dispatchEvent(new PointerEvent("pointermove", end));
  seen.tip = hero.querySelector(".tip").innerText;
  seen.swatches = all(".runs .swatch").map((swatch) => getComputedStyle(swatch).borderTopColor);
  const paper = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  seen.themes = [paper, getComputedStyle(document.body).backgroundColor];
  seen.problems = problems;
  document.documentElement.dataset.probe = JSON.stringify(seen);
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    folders = [
        write_run(root / "a", steps=60, evaluated=True, sample_every=0, size=8),
        write_run(root / "b", steps=40, evaluated=True, sample_every=0, size=8),
        write_run(root / "c", steps=20, sample_every=0),
    ]
    return write_comparison(root / "compare.html", read_runs(folders))


@pytest.mark.parametrize("width", [1200, 500])
def test_runs_lie_over_each_other_in_colours_of_their_own(page, tmp_path, width):
    seen = look(page, tmp_path, width=width, probe=PROBE)
    assert seen["problems"] == [] and seen["overflow"] <= 0
    assert seen["strokes"] == seen["swatches"] and len(set(seen["strokes"])) == 3
    long, middle, short = seen["drawn"]
    assert long > middle > short > 0
    # at the last step two of three runs have ended
    lines = seen["tip"].split("\n")
    assert lines[0] == "step 60" and lines[1::2] == ["a", "b", "c"]
    assert [value == "–" for value in lines[2::2]] == [False, True, True]
    assert seen["themes"][0] != seen["themes"][1]
