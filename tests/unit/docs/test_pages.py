"""The pages lead to what there is, and what is made of recipes is up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megadiff.planner.command import main as plan
from tests.doc_commands import FENCE, PAGES, ROOT
from tools.recipe_table import COMPUTE, RECIPES, header, main, planned_peaks, with_table

PAGE = ROOT / "docs" / "choose_a_recipe.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# the words by which a user looks for a page, and the page
WANTED = {
    "first hour on a GPU": "first_hour.md",
    "choose a recipe": "choose_a_recipe.md",
    "read your run": "reading_a_run.md",
    "troubleshoot": "troubleshooting.md",
    "run on many nodes": "many_nodes.md",
    "add an algorithm": "adding_an_algorithm.md",
    "reproduce our figures": "measuring.md",
}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page to files that there are not; mkdocs checks anchors."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = [link.partition("#")[0] for link in LINK.findall(prose)]
    files = [target for target in targets if target and not re.match(r"\w+:", target)]
    return [f"{page.name}: {file}" for file in files if not (page.parent / file).exists()]


def test_every_link_leads_to_a_file():
    others = [ROOT / "CONTRIBUTING.md", *ROOT.glob("assets/*/README.md")]
    broken = [link for page in [*PAGES, *others] for link in broken_links(page, page.read_text())]
    assert not broken, "\n".join(broken)


def test_a_broken_link_is_found():
    text = "[a](../launch/setup.sh) [b](../launch/gone.sh#x) [c](https://a.b/c) `[d](gone.md)`"
    assert broken_links(PAGE, text) == ["choose_a_recipe.md: ../launch/gone.sh"]


@pytest.mark.parametrize(("words", "page"), WANTED.items())
def test_home_and_navigation_lead_to_a_page_by_its_words(words, page):
    rows = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert any(words.lower() in row.lower() and f"({page}" in row for row in rows)
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert re.search(rf"- {words}: {page}$", navigation, re.MULTILINE | re.IGNORECASE)


def test_the_table_is_that_of_the_recipes():
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python tools/recipe_table.py docs/choose_a_recipe.md"


def test_an_old_table_is_replaced(tmp_path):
    page = PAGE.read_text()
    (tmp_path / "page.md").write_text(page.replace("| 512 |", "| 511 |"))
    assert main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page


def test_a_recipe_without_its_figures_is_refused(tmp_path):
    (tmp_path / "a_1xh100.yaml").write_text("# A recipe.\n# rollout 3.0, sync 2.0\n")
    with pytest.raises(ValueError, match="no header with `rollout X"):
        planned_peaks(tmp_path / "a_1xh100.yaml")


def test_a_header_has_the_figures_of_the_plan(capsys):
    """Of the recipe that is planned fastest; `megadiff plan` says them of each."""
    file = RECIPES / "sd35_medium_flowgrpo_1xh200.yaml"
    assert plan([str(file), "--world-size", "1", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layouts"][0]
    peaks = {phase: sum(parts.values()) / 2**30 for phase, parts in layout["phases"].items()}
    assert planned_peaks(file) == pytest.approx(peaks, abs=0.06)
    compute_s = layout["network"]["train_s"] + layout["network"]["rollout_s"]
    assert float(re.search(COMPUTE, header(file))[1]) == pytest.approx(compute_s, abs=0.6)
