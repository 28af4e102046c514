"""Describe every key of the schema, for docs/configuration.md and `megadiff train --help-config`.

python -m megadiff.config.docs > docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

from omegaconf import MISSING

from megadiff.config.key import bound_texts
from megadiff.config.rewards import NAMED_SECTIONS
from megadiff.config.schema import FIELDS, SECTIONS

MARKDOWN_HEAD = """# Configuration

`megadiff train CONFIG.yaml key=value …` merges yaml files and overrides from left to right. The
later one wins. Keys without a default must be given; recipes set most of them.
`megadiff train --help-config` prints this page as text.

In an override, the value of a key of type str is what you type: `run.name=010` is 010, not 8, and
`run.name=on` is on. Quotes are taken off, and `${run.dir}` is that key's value. YAML reads all
else: `null`, lists, and mappings, as in `run={name: x}`.

A relative path is relative to the folder in which the command is started, wherever the yaml file
lies. The launchers start it in the repository: give them absolute paths. Only the files that a
prompt file names are looked for beside it. Start the command in the same folder again: the run's
own `config.yaml` keeps paths as they were given.
This page is made from [config/schema.py](../megadiff/config/schema.py):
`python -m megadiff.config.docs > docs/configuration.md`.
"""


def to_text() -> str:
    """Return all keys for a terminal: type, default, rules and a sentence for each."""
    lines = []

    for name, sentence, keys in _sections():
        lines += ["", f"{name}: {sentence}"]
        for field in keys:
            if field.metadata["heading"]:
                lines += ["", f"  {field.metadata['heading']}"]
            rules = f"  [{_rules(field)}]" if _rules(field) else ""
            lines.append(f"  {field.name}: {field.type} = {_default(field)}{rules}")
            lines.append(f"      {field.metadata['text']}")

    # Every section begins with an empty line, which the first one needs not.
    return "\n".join(lines[1:]) + "\n"


def to_markdown() -> str:
    """Return docs/configuration.md: a table for each section, or each group of its keys."""
    lines = [MARKDOWN_HEAD]

    for name, sentence, keys in _sections():
        lines += [f"## {name}", "", sentence]
        for field in keys:
            if field.metadata["heading"]:
                lines += ["", f"### {field.metadata['heading']}"]
            # A heading ends a table, and the next one needs a head of its own.
            if field.metadata["heading"] or field is keys[0]:
                lines += ["", "| key | type | default | rules | |", "|---|---|---|---|---|"]
            cells = [f"`{field.name}`", str(field.type), _default(field), _rules(field)]
            lines.append(f"| {' | '.join([*cells, field.metadata['text']])} |")
        lines.append("")

    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, str, list[dataclasses.Field]]]:
    """Yield each section's name, its first sentence and its keys, in the schema's order."""
    for section, kind in SECTIONS.items():
        name = f"{section}.NAME" if section in NAMED_SECTIONS else section or "Top level"
        keys = [field for (of_section, _), field in FIELDS.items() if of_section == section]
        yield name, str(kind.__doc__).splitlines()[0], keys


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return "(must be given)" if field.default == MISSING else json.dumps(field.default)


def _rules(field: dataclasses.Field) -> str:
    return ", ".join([*field.metadata["choices"], *bound_texts(field.metadata["bounds"])])


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
