"""Every command that README.md and docs/ show is one that its program takes.

None is executed here, GPU or not: the commands themselves run in tests/e2e, the launchers in
tests/slurm. Each is parsed by its program's own parser, which its real main() is about to use. So a
flag, a choice or a number that the program refuses is found. Its yaml files and key=value go
through the config loader, so a renamed key or a missing file is found.

The rules, which a page has to keep:
- A path in a folder of the repository exists. `runs/…` and what begins with / or ~ need not.
- A yaml file is in the repository, or a yaml block shows it with its name in a comment, or its name
  is in capitals (MINE.yaml): the reader's own, here a complete config.
- `…` stands for arguments that are left out, capitals for the reader's own value. With them, and in
  running text, a command may be a fragment: its flags, keys and files must exist all the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

from megadiff.cli.main import main
from megadiff.config.load import SCHEMA, load_config
from tests.doc_commands import PAGES, ROOT, DocCommand, all_commands, blocks, commands_of

FOLDERS = ("assets", "configs", "docs", "examples", "launch", "megadiff", "tests", "tools")
# of the shell and its tools: `bash -n` reads them, no program of ours does
SHELL = {
    "cd",
    "chmod",
    "apptainer",
    "curl",
    "docker",
    "do",
    "done",
    "enroot",
    "export",
    "git",
    "hf",
    "source",
    "tail",
    "tar",
    "touch",
}
OVERRIDE = re.compile(r"(?!key=)[a-z]\w*(\.[\w-]+)*=\S+$")  # key=value is a name for all
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*$")
# what a page's fragment is laid over, as the rules above say
BASE = """
run: {name: doc}
model: {path: MODEL}
data: {prompts: PROMPTS.txt}
train: {num_steps: 3, prompts_per_step: 4}
algorithm: {group_size: 4}
rollout: {height: 64, width: 64}
optim: {lr: 1e-4}
"""
METHODS = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")


class _Parsing(BaseException):
    """Ends a program where it would parse its command line; no program catches it."""

    def __init__(self, parse: Callable, parser: argparse.ArgumentParser) -> None:
        self.parse = parse
        self.parser = parser


@cache
def parsing_of(program: str) -> _Parsing:
    """Return how a program parses: `megadiff plan`, a script, or a module that `python -m` runs."""
    words = program.split()

    def stopping(parse: Callable) -> Callable:
        def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> object:
            raise _Parsing(parse, self)

        return stop

    methods = {name: stopping(getattr(argparse.ArgumentParser, name)) for name in METHODS}
    with (
        mock.patch.multiple(argparse.ArgumentParser, **methods),
        mock.patch.dict(os.environ),  # tools set variables before they import torch
        mock.patch.object(sys, "argv", words),
    ):
        try:
            if words[0] == "megadiff":
                main(words[1:])
            elif program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except _Parsing as parsing:
            return parsing
    raise AssertionError(f"there is no command {program!r}")


def problem_of(command: DocCommand) -> str:
    """Return what is wrong with a command, "" where nothing is."""
    words = list(command.words)
    try:
        if words[0] == "srun":
            words = words[next(i for i, word in enumerate(words) if not is_flag(word, 1, i)) :]
        check_files(words)
        check_words(words, command)
        check_config(words)
    except (AssertionError, ValueError) as error:
        return f"{command}\n    {error}"
    return ""


def is_flag(word: str, first: int, index: int) -> bool:
    return index < first or word.startswith("-")


def check_files(words: Sequence[str]) -> None:
    """Refuse a path in a folder of the repository that does not exist."""
    for word in words:
        path = word.rpartition("=")[2].removeprefix("./")
        is_example = "*" in path or PLACEHOLDER.match(Path(path).stem)
        if path.partition("/")[0] in FOLDERS and "/" in path and not is_example:
            assert (ROOT / path).exists(), f"there is no {path}"


def check_words(words: list[str], command: DocCommand) -> None:
    """Give the words to the parser of the program that they name."""
    name, *rest = words
    if name == "megadiff":
        check_arguments(f"megadiff {rest[0]}", rest[1:], command)
    elif name == "pytest":
        check_tests(rest)
    elif name in ("python", "torchrun") and "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :]
        if module == "megadiff.cli.main":
            check_words(["megadiff", *arguments], command)
        elif module == "pytest":
            check_tests(arguments)
        elif has_parser(module):
            check_arguments(module, arguments, command)
    elif name == "python" and rest[0].startswith("tools/"):
        check_arguments(rest[0], rest[1:], command)
    elif (ROOT / "tools" / name).is_file():  # as the pages on measuring shorten them
        check_arguments(f"tools/{name}", rest, command)
    elif name == "sbatch" or "launch/" in name:
        check_launcher(words, command)
    else:
        assert name in SHELL | {"python", "torchrun"}, f"{name} is no command that is known here"


def has_parser(module: str) -> bool:
    """Tell whether a module of the repository parses; others belong to their libraries."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    if module.partition(".")[0] not in FOLDERS:
        # of the package alone, as finding a module imports all above it
        assert importlib.util.find_spec(module.partition(".")[0]), f"there is no module {module}"
        return False
    assert file.is_file(), f"there is no module {module}"
    return "argparse" in file.read_text()


def check_arguments(program: str, arguments: list[str], command: DocCommand) -> None:
    """Refuse what the program's parser refuses; of a fragment only flags that there are not."""
    parsing = parsing_of(program)
    flags = parsing.parser._option_string_actions
    given = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    unknown = [flag for flag in given if flag not in flags and not has_subcommands(parsing.parser)]
    assert not unknown, f"{program} has no {', '.join(unknown)}; it has {', '.join(flags)}"

    if "…" in " ".join(arguments):
        return
    filled = list(arguments)
    for index, word in enumerate(arguments[:-1]):
        action = flags.get(word)
        if action and PLACEHOLDER.match(arguments[index + 1]):
            example = "8" if action.type in (int, float) else arguments[index + 1]
            filled[index + 1] = str(next(iter(action.choices or [example])))
    refusal = StringIO()
    try:
        with redirect_stderr(refusal):
            parsing.parse(parsing.parser, filled)
    except SystemExit:
        text = refusal.getvalue().strip().splitlines()[-1]
        is_incomplete = "are required" in text or "expected" in text
        if not (command.is_inline and is_incomplete):
            raise ValueError(text) from None


def has_subcommands(parser: argparse.ArgumentParser) -> bool:
    return parser._subparsers is not None


def check_tests(arguments: Sequence[str]) -> None:
    """Refuse a -k that names no test of the files."""
    if "-k" not in arguments:
        return
    wanted = arguments[arguments.index("-k") + 1]
    files = [ROOT / word for word in arguments if word.endswith(".py")]
    tests = re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))
    assert any(wanted in test for test in tests), f"no test of {files} has {wanted!r} in its name"


def check_launcher(words: Sequence[str], command: DocCommand) -> None:
    """Refuse a variable, a flag or a word that the script does not know."""
    scripts = [word for word in words if "launch/" in word]
    if not scripts:
        return
    script = scripts[0]
    text = (ROOT / script).read_text()
    used = "".join(file.read_text() for file in (ROOT / "launch").glob("*.sh"))
    for variable in command.variables:
        assert variable in used or variable == "SSL_CERT_FILE", f"{script} reads no {variable}"
    own = words[words.index(script) + 1 :]
    for word in own:
        if word.startswith("--") or re.fullmatch("[a-z]+", word):
            assert word.lstrip("-") in text, f"{script} knows no {word}"
    if script.endswith(("torchrun.sh", "serve.sh")) and own:
        assert own[0].isdigit() or PLACEHOLDER.match(own[0]), (
            f"{script} N CONFIG.yaml …: {own[0]} is no number of processes"
        )


def check_config(words: Sequence[str]) -> None:
    """Load the yaml files and the key=value among the words, of a flag's value too."""
    layers: list[str] = []
    is_varied = False
    for word in " ".join(words).split():
        is_varied = word == "--vary" or (is_varied and not word.startswith("--"))
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            layers += filter(None, [layer_of(word)])
        elif OVERRIDE.match(word):
            key, _, value = word.partition("=")
            many = value.split(",") if is_varied and "[" not in value else [value]
            layers += [f"{key}={single}" for single in many]
    if layers:
        load(tuple(layers))


@cache
def load(layers: tuple[str, ...]) -> None:
    load_config([SHOWN["BASE"], *layers])


@cache
def layer_of(name: str) -> str:
    """Return the yaml file that a page means, "" for a reader's own."""
    name = name.removeprefix("~/megadiff/")  # where a page has the clone, seen from elsewhere
    if (ROOT / name).is_file():
        return str(ROOT / name)
    if PLACEHOLDER.match(Path(name).stem):
        return ""
    assert name in SHOWN, f"{name} is in no folder here, and no yaml block shows it"
    return SHOWN[name]


SHOWN: dict[str, str] = {}  # name of a file that a yaml block shows → a file with that text


@pytest.fixture(scope="module", autouse=True)
def shown_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shown")
    SHOWN["BASE"] = str(folder / "base.yaml")
    Path(SHOWN["BASE"]).write_text(BASE)
    for page in PAGES:
        for line, block in blocks(page.read_text(), "yaml"):
            for name in re.findall(r"# (\w+\.yaml)$", block.partition("\n\n")[0], re.MULTILINE):
                file = folder / f"{page.stem}_{line}_{name}"
                file.write_text(block)
                SHOWN[name] = str(file)


def test_every_command_is_one_that_its_program_takes():
    commands = all_commands()
    assert len(commands) > 150, "the pages' commands are not found any more"
    problems = list(filter(None, map(problem_of, commands)))
    assert not problems, "\n".join(problems)


def test_every_yaml_block_of_a_config_loads(tmp_path):
    problems = []
    for page in PAGES:
        for line, block in blocks(page.read_text(), "yaml"):
            sections = set(re.findall(r"^(\w+):", block, re.MULTILINE))
            if not sections or not sections <= SCHEMA.keys():
                continue
            file = tmp_path / "block.yaml"
            file.write_text(block)
            below = re.findall(r"^# over (\S+\.yaml)$", block, re.MULTILINE)
            try:
                load_config([SHOWN["BASE"], *(str(ROOT / name) for name in below), str(file)])
            except ValueError as error:
                problems.append(f"{page.name}:{line}: {error}")
    assert not problems, "\n".join(problems)


def test_every_shell_block_is_one_that_a_shell_reads():
    for page in PAGES:
        for line, block in blocks(page.read_text(), "bash"):
            done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
            assert done.returncode == 0, f"{page.name}:{line}: {done.stderr}"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("megadiff trian configs/quickstart.yaml", "no command"),
        ("megadiff plan configs/quickstart.yaml --world-sise 4", "has no --world-sise"),
        ("megadiff plan configs/quickstart.yaml --world-size four", "invalid int value"),
        ("megadiff train configs/quickstart.yaml train.num_step=3", "train.num_steps"),
        ("megadiff train configs/quick.yaml", "there is no configs/quick.yaml"),
        ("megadiff train mine2.yaml", "no yaml block shows it"),
        ("python tools/bench_step.py --layout train.nope=1", "has no --layout"),
        ("python tools/bench_engine.py --layout 'engine.compil=true'", "engine.compile"),
        ("python tools/bench_gain.py --vary optim.lr=1e-4,high", "optim.lr"),
        ("python tools/bench_all.py", "there is no tools/bench_all.py"),
        ("R=configs/quickstart.yaml\nlaunch/torchrun.sh $R", "no number of processes"),
        ("launch/setup.sh gup", "knows no gup"),
        ("NODS=2 launch/slurm.sh configs/quickstart.yaml", "reads no NODS"),
        ("sbatch launch/slurm.sh configs/quickstart.yaml optim.learning=3", "unknown key"),
        ("python -m pytest tests/gpu/test_one_gpu.py -k nosuch", "has 'nosuch' in its name"),
        ("for x in none wrong; do\nmegadiff serve M --dtype $x\ndone", "invalid choice"),
        ("megadif train configs/quickstart.yaml", "no command that is known here"),
    ],
)
def test_a_wrong_command_is_found(line, text):
    problems = list(
        filter(None, map(problem_of, commands_of("page.md", f"```bash\n{line}\n```\n")))
    )
    assert problems and text in problems[0], problems
