"""README's table of models is the registry's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megadiff.models.docs import main, to_markdown, with_table
from megadiff.models.registry import FAMILIES, families

README = Path(__file__).parents[3] / "README.md"


def test_readme_has_the_table_of_the_registry() -> None:
    page = README.read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python -m megadiff.models.docs README.md"


def test_every_family_has_a_row() -> None:
    own = families()[: len(FAMILIES)]
    table = to_markdown()
    assert [family.title for family in own if f"| {family.title} |" not in table] == []


def test_an_old_table_is_replaced(tmp_path: Path) -> None:
    page = README.read_text(encoding="utf-8")
    old = tmp_path / "README.md"
    old.write_text(page.replace("| Z-Image |", "| X-Image |"), encoding="utf-8")
    assert main([str(old)]) == 0
    assert old.read_text(encoding="utf-8") == page


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page lacks the lines"):
        with_table("# A page\n")
