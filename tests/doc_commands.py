"""Find the commands that README.md and docs/ show, as a shell would run them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
# what a command in running text begins with
STARTS = re.compile(r"megadiff |python |torchrun |sbatch |pytest |(\./)?launch/\w+\.sh\b|\w+\.py ")
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
LOOP = re.compile(r"for (\w+) in (.*)")


@dataclass(frozen=True)
class DocCommand:
    """One command. where: page:line. is_inline: it stands in running text, perhaps a fragment.

    words: without the variables before it, which are in `variables`.
    """

    where: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    is_inline: bool

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield each fenced block of a language with the line that it begins at."""
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start()) + 2, match[2]


@cache
def all_commands() -> list[DocCommand]:
    """Return every command of the pages, of fenced blocks and of running text."""
    return [command for page in PAGES for command in commands_of(page.name, page.read_text())]


def commands_of(name: str, text: str) -> list[DocCommand]:
    """Return the commands of a page; `$R` of its blocks means what an earlier block set it to."""
    commands: list[DocCommand] = []
    variables: dict[str, list[str]] = {}
    for line, block in blocks(text, "bash"):
        for offset, statement in _statements(block):
            commands += _expanded(f"{name}:{line + offset}", statement, variables)

    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INLINE.finditer(prose):
        statement = " ".join(match[1].split())
        if STARTS.match(statement):
            line = prose.count("\n", 0, match.start()) + 1
            commands.append(_command(f"{name}:{line}", shlex.split(statement), is_inline=True))
    return commands


def _statements(block: str) -> Iterator[tuple[int, str]]:
    """Yield the block's logical lines, each with the number of its first line."""
    start = 0
    whole = ""
    for number, line in enumerate(block.splitlines()):
        start = start if whole else number
        whole += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            yield from ((start, statement) for statement in whole.split(" && "))
            whole = ""


def _expanded(where: str, statement: str, variables: dict[str, list[str]]) -> Iterator[DocCommand]:
    """Yield the commands of a line, one for each value of a loop's variables."""
    loop = LOOP.match(statement.strip().partition(";")[0])
    if loop:
        variables[loop[1]] = loop[2].split()
        return

    used = [name for name in variables if re.search(rf"\${name}\b", statement)]
    for values in itertools.product(*(variables[name] for name in used)):
        filled = statement
        for name, value in zip(used, values, strict=True):
            filled = re.sub(rf"\${name}\b", value.replace("\\", r"\\"), filled)
        words = shlex.split(filled, comments=True)
        if words and all(ASSIGNMENT.match(word) for word in words):
            for word in words:
                name, _, value = word.partition("=")
                variables[name] = [value]
        elif words:
            yield _command(where, words, is_inline=False)


def _command(where: str, words: list[str], *, is_inline: bool) -> DocCommand:
    before = list(itertools.takewhile(ASSIGNMENT.match, words))
    rest = words[len(before) :]
    if ">" in rest:
        rest = rest[: rest.index(">")]
    return DocCommand(
        where=where,
        words=tuple(rest),
        variables=dict(word.split("=", 1) for word in before),
        is_inline=is_inline,
    )
