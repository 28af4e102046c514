"""megadiff COMMAND …: `megadiff COMMAND --help` explains each command."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import NoReturn

import megadiff
from megadiff.cli.console import (
    INTERRUPTED,
    READER_LEFT,
    ended_by_ctrl_c,
    has_reader_left,
    interrupted_text,
    leave,
    quiet_imports,
    show_crashes,
)
from megadiff.process.doors import near
from megadiff.process.garbage import collection_paused

COMMANDS = {  # name → (module that has its main(), what it does)
    "train": ("megadiff.cli.train", "post-train a policy: CONFIG.yaml … key=value …"),
    "serve": ("megadiff.cli.serve", "run a rollout replica: MODEL …, or CONFIG.yaml … key=value …"),
    "score": ("megadiff.cli.score", "serve a reward to `remote` rewards elsewhere: CONFIG.yaml …"),
    "evaluate": ("megadiff.cli.evaluate", "score a model or a checkpoint on a prompt set"),
    "check": ("megadiff.cli.check", "say what a model folder holds, and what it lacks: MODEL"),
    "plan": (
        "megadiff.planner.command",
        "say which layouts fit on the GPUs, and which to take: CONFIG.yaml … key=value … "
        "--world-size N",
    ),
    "doctor": (
        "megadiff.doctor.command",
        "look for what would stop a run: [CONFIG.yaml … key=value …] [--model DIR]",
    ),
    "convert": (
        "megadiff.convert.command",
        "weights between diffusers, checkpoints of any layout, LoRA files: SRC DST [--to FORMAT]",
    ),
    "prompts": (
        "megadiff.cli.prompts",
        "bring a public prompt set into megadiff's format: import FORMAT SRC OUT.jsonl",
    ),
    "stacks": (
        "megadiff.cli.stacks",
        "say what every rank and replica of a live run is doing, for one that hangs: RUN",
    ),
    "report": ("megadiff.report.command", "write a run's report.html: RUN"),
    "watch": ("megadiff.report.watch", "show a run on the terminal, live: RUN"),
    "compare": ("megadiff.report.compare_command", "lay runs over each other on a page: RUN RUN …"),
}


def main(argv: list[str] | None = None) -> int:
    """Return the exit code of the command; 2 for an unknown one."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2

    command, *rest = arguments
    if command == "--version":
        sys.stdout.write(f"megadiff {megadiff.__version__}\n")
        return 0
    if command not in COMMANDS:
        hint = near(command, COMMANDS)
        sys.stderr.write(f"megadiff: unknown command {command!r}{hint}\n{_usage()}")
        return 2

    if command == "train":
        # It would kill the process, and imports take seconds. BuildWatch hears it afterwards.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    quiet_imports()
    name, _ = COMMANDS[command]  # no other is imported: most take seconds
    with ended_by_ctrl_c(command), collection_paused():
        module = importlib.import_module(name)
    return module.main(rest)


def entry() -> NoReturn:
    """Run the console command."""
    # A script has its own folder on the path, not the user's, where `module:Class` is looked for.
    # At the end, so that no file there hides a module of ours or of a library.
    sys.path.append("")
    show_crashes()
    for stream in (sys.stdout, sys.stderr):
        if stream:  # `>&-` closes it
            # a terminal that is not UTF-8 shows question marks, rather than an error
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = main()
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        if not has_reader_left():
            raise
        code = READER_LEFT
    except KeyboardInterrupt:
        command = "".join(sys.argv[1:2])
        sys.stderr.write(interrupted_text(command))
        code = INTERRUPTED
    leave(code)


def _usage() -> str:
    lines = [f"  {command:<10}{summary}\n" for command, (_, summary) in COMMANDS.items()]
    return f"usage: megadiff COMMAND …\n{''.join(lines)}  --version\n"


if __name__ == "__main__":
    entry()
