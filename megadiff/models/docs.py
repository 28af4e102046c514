"""Write README's table of models, from the families of the registry.

python -m megadiff.models.docs README.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megadiff.models.registry import FAMILIES, Family, families
from megadiff.observe.text_files import rewrite_page, text_between

START = "<!-- made by python -m megadiff.models.docs README.md -->\n"
END = "<!-- end of the models -->"
HEAD = (
    "| family | models | VeOmni: FSDP2, HSDP, Ulysses | Megatron-core: TP, SP, Ulysses "
    "| all weights at full size on GPUs |",
    "|---|---|---|---|---|",
)


def to_markdown() -> str:
    """Return the table of megadiff's own families, without those of installed packages."""
    own = families()[: len(FAMILIES)]
    rows = [row for family in own for row in _rows(family)]
    return "\n".join([*HEAD, *rows]) + "\n"


def _rows(family: Family) -> Iterator[str]:
    """Yield a row for each published model. Each engine trains what has a plan."""
    for model, gpus in family.published.items():
        yield f"| {family.title} | {model} | yes | yes | {gpus or 'not yet'} |"


def with_table(page: str) -> str:
    """Return the page with a new table between its marks. Raises ValueError where they lack."""
    return text_between(page, to_markdown(), start=START, end=END)


def main(argv: Sequence[str]) -> int:
    """Rewrite the table of the page that argv names."""
    return rewrite_page(argv, with_table, usage=str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
