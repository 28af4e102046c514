"""Every key is described, and docs/configuration.md is what the schema says."""

from __future__ import annotations

import re
from pathlib import Path

from megadiff.cli.main import main
from megadiff.config.docs import to_markdown, to_text
from megadiff.config.load import all_keys
from megadiff.config.rewards import NAMED_SECTIONS
from megadiff.config.schema import FIELDS, SECTIONS

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == to_markdown(), "run python -m megadiff.config.docs > docs/configuration.md"


def test_every_key_has_one_sentence() -> None:
    assert len(FIELDS) > 80
    for field in FIELDS.values():
        assert re.fullmatch(r"[A-Za-z].{15,}\.", field.metadata["text"]), field.name
    for kind in SECTIONS.values():
        assert not kind.__doc__.startswith(f"{kind.__name__}("), f"{kind.__name__}: no docstring"


def test_text_and_page_have_every_key() -> None:
    text, page = to_text(), to_markdown()
    keys = set(all_keys()) - set(NAMED_SECTIONS)
    for key in keys:
        section, _, name = key.rpartition(".")
        in_text = re.search(rf"^{section or 'Top level'}: (?:.+\n|\n  )+?  {name}: ", text, re.M)
        assert in_text, key
        assert f"| `{name}` |" in page, key
    assert "  lr: float = (must be given)  [> 0, ≤ 10]\n      " in text
    assert "  type: str = (must be given)\n" in text  # of a reward


def test_rollout_stands_in_three_groups() -> None:
    of_rollout = [field for (section, _), field in FIELDS.items() if section == "rollout"]
    headings = list(filter(None, (field.metadata["heading"] for field in of_rollout)))
    assert headings == ["How a sample is drawn", "How a replica runs", "Where replicas are"]
    for heading in headings:
        assert f"\n### {heading}\n" in to_markdown()
        assert f"\n  {heading}\n" in to_text()


def test_help_config_prints_the_keys(capsys) -> None:
    assert main(["train", "--help-config"]) == 0
    assert capsys.readouterr().out == to_text()
