"""Make pages that are written for GitHub build as a site. Named in mkdocs.yml, run by mkdocs.

GitHub follows links out of docs/ (`../megadiff/train/loop.py`); a site has no such pages. There
they become the file's path, or links to `repo_url` where mkdocs.yml has one.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^\s*```")
LIST_ITEM = re.compile(r"([-*+]|\d+\.) ")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page's text with links out of docs/ replaced and lists set apart."""
    repo_url = (config.repo_url or "").rstrip("/")

    def replacement(link: re.Match[str]) -> str:
        text, path = link.groups()
        return f"[{text}]({repo_url}/blob/main/{path})" if repo_url else f"`{path}`"

    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            line = OUTSIDE.sub(replacement, line)
            # Python-Markdown takes a list for one only after an empty line; GitHub needs none.
            starts_list = LIST_ITEM.match(line) and lines and _is_text(lines[-1])
            if starts_list:
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _is_text(line: str) -> bool:
    """Tell a paragraph's line from an empty one, a list's item and its indented lines."""
    return bool(line) and not line.startswith(" ") and not LIST_ITEM.match(line)
