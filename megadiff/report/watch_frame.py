"""Draw a run on a terminal: one frame of `megadiff watch`.

All texts of a run (names, prompts, reasons) are shown as text: neither markup nor control codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megadiff.observe.metrics import (
    column,
    config_number,
    finite,
    format_number,
    format_seconds,
    median,
    pretty_number,
    step_of,
    step_seconds,
    verdict,
)
from megadiff.report.blocks import bar, plot, sparkline
from megadiff.report.evaluation_page import leading_reward
from megadiff.report.evaluation_table import format_of
from megadiff.report.report import TEXTS, stage_seconds
from megadiff.report.run_follower import RunView

RECENT_STEPS = 20  # whose medians are the present speed
# Without a new line this long, and as long as ten steps and an evaluation, a run may hang.
SILENT_S = 60.0
START_S = 1800.0  # before its first line, where the config says nothing of replicas
WIDE = 80  # columns, from which on there is space for more than the numbers
MIN_NAME = 8  # columns
MIN_SPARKLINE = 8  # columns; a shorter one shows nothing
SPEED = "perf/samples_per_s"
FigureCells = tuple[str, str, str, Sequence[float]]  # name, value, note, curve
STATE_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "silent": "yellow"}


@dataclass(frozen=True)
class Detail:
    """Set how much of a run is shown: lines of the curve, rows of the lists, empty lines."""

    curve: int
    rewards: int
    events: int
    samples: int
    has_gaps: bool = True


# From all to little: the first whose frame fits the terminal is taken.
DETAILS = (
    Detail(12, 8, 6, 16),
    Detail(10, 6, 4, 8),
    Detail(8, 4, 3, 4),
    Detail(6, 4, 3, 4, has_gaps=False),
    Detail(4, 2, 2, 3, has_gaps=False),
    Detail(3, 0, 1, 1, has_gaps=False),
    Detail(2, 0, 0, 0, has_gaps=False),
)


def fitting_frame(view: RunView, console: Console, *, height: int) -> Group:
    """Return the frame with as much detail as `height` lines hold."""
    frames = (frame(view, console.width, detail) for detail in DETAILS)
    for drawn in frames:
        lines = console.render_lines(drawn, console.options.update(height=None))
        if len(lines) <= height:
            break

    return drawn


def frame(view: RunView, width: int, detail: Detail = DETAILS[0]) -> Group:
    """Return the run as lines of at most `width` columns; what it has nothing of is left out."""
    parts: list[RenderableType] = [_head(view, width)]
    if not view.rows:
        parts.append(Text("No step is finished yet.", style="bold"))

    parts += _curve(view, width, detail)
    parts += _figures(view, width, detail)
    parts += _stages(view, width)
    parts += _alarms(view)
    parts += _events(view, width, detail)
    parts += _samples(view, width, detail)
    if not detail.has_gaps:
        parts = [line for line in parts if not (isinstance(line, Text) and not line.plain)]

    return Group(*parts)


def clean(text: str) -> str:
    """Return a text in one line, without control codes, which a terminal would obey."""
    printable = (char if char.isprintable() else " " for char in text)
    return " ".join("".join(printable).split())


def _title(title: str, note: str = "") -> list[RenderableType]:
    heading = Text.assemble((title, "bold"), (f"  {note}" if note else "", "dim"))
    return [Text(), heading]


def _head(view: RunView, width: int) -> RenderableType:
    """Return name and state, and under them how far the run is and when it ends."""
    state, since = state_of(view, now=time.time())
    words = f"{state}, {since}" if since else state
    name = clean(view.folder.name)
    head = Text.assemble(("megadiff ", "cyan"), (name, "bold"), "  ", (words, STATE_STYLES[state]))
    head.truncate(width, overflow="ellipsis")

    steps = f"step {view.last_step}"
    if view.num_steps:
        steps += f" of {view.num_steps}"

    remaining_s = eta_s(view)
    if remaining_s and state == "running":
        end = datetime.fromtimestamp(time.time() + remaining_s)
        steps += f"  ETA {format_seconds(remaining_s)}, at {end:%H:%M}"
    if not view.num_steps:
        return Group(head, Text(steps))

    width_of_bar = max(8, width - len(steps) - 2)
    done = bar(view.last_step / view.num_steps, width_of_bar)
    track = "─" * (width_of_bar - len(done))

    return Group(head, Text.assemble((done, "cyan"), (track, "dim"), "  ", steps))


def state_of(view: RunView, *, now: float) -> tuple[str, str]:
    """Return one of STATE_STYLES, and since when as a text."""
    turns = [event for event in view.events if event.kind.startswith("run_")]
    last = turns[-1] if turns else None
    if last is not None and last.kind in ("run_finished", "run_stopped"):
        return last.kind.removeprefix("run_"), _ago(now - last.time.timestamp())
    if last is None and view.is_finished:
        return "finished", _ago(now - view.logged_at) if view.logged_at else ""

    begun_at = last.time.timestamp() if last else None
    if begun_at is not None and (view.logged_at is None or view.logged_at < begun_at):
        # No step of this attempt yet: the model loads, and replicas start.
        start_s = config_number(view.config, "rollout", "start_timeout_s") or START_S
        is_silent = now - begun_at > start_s
        return "silent" if is_silent else "running", f"started {_ago(now - begun_at)}"
    if view.logged_at is None:
        return "running", ""

    seconds = finite(step_seconds(row) for row in view.rows[-RECENT_STEPS:])
    evaluations = column(view.rows, "time/evaluate_s")
    limit_s = 10 * max(seconds, default=0.0) + max(evaluations, default=0.0)
    silent_s = now - view.logged_at
    is_silent = silent_s > max(SILENT_S, limit_s)

    return "silent" if is_silent else "running", f"last line {_ago(silent_s)}"


def _ago(seconds: float) -> str:
    # Another host's clock may be ahead of ours.
    whole = max(0, round(seconds))
    return f"{whole} s ago" if whole < 60 else f"{format_seconds(whole)} ago"


def eta_s(view: RunView) -> float | None:
    """Return the seconds of the steps and evaluations that are left; None before the first step."""
    usual = median(step_seconds(row) for row in view.rows[-RECENT_STEPS:])
    if usual is None or not view.num_steps:
        return None

    remaining = max(0, view.num_steps - view.last_step)
    every = int(config_number(view.config, "eval", "every") or 0)
    evaluations = 0
    if every and remaining:
        multiples = view.num_steps // every - view.last_step // every
        evaluations = multiples + (view.num_steps % every != 0)

    evaluation_s = median(column(view.rows, "time/evaluate_s")) or 0.0

    return remaining * usual + evaluations * evaluation_s


def _curve(view: RunView, width: int, detail: Detail) -> Iterator[RenderableType]:
    """Yield the curve of the reward, or of the loss, with the labels of its axes."""
    ends = view.ends
    if ends is None:
        return

    rows = [row for row in view.rows if ends.key in row]
    lines, axis = plot(
        [row[ends.key] for row in rows], width=max(10, width - 9), height=detail.curve
    )
    name = TEXTS["metrics"][ends.key][0]
    now = f"{pretty_number(ends.first)} → {pretty_number(ends.last)}"
    yield from _title(name, f"{now}, first and last {ends.window} steps")

    labels = [""] * len(lines)
    labels[0] = pretty_number(axis.high)
    labels[-1] = pretty_number(axis.low)
    for label, line in zip(labels, lines):
        yield Text.assemble((f"{label:>7} ", "dim"), ("│", "dim"), (line, "cyan"))

    first = f"step {step_of(rows[0])}"
    last = str(step_of(rows[-1]))
    gap = max(1, width - 9 - len(first) - len(last))
    yield Text(" " * 9 + first + " " * gap + last, style="dim")


def _cut(name: str, columns: int) -> Text:
    label = Text(clean(name), style="dim")
    label.truncate(max(MIN_NAME, columns - 2), overflow="ellipsis")
    return label


def _grid(*justify: Any) -> Table:
    table = Table.grid(padding=(0, 2))
    for side in justify:
        table.add_column(justify=side, no_wrap=True, overflow="ellipsis")

    return table


def _figures(view: RunView, width: int, detail: Detail) -> Iterator[RenderableType]:
    """Yield held-out scores, each reward and the speed, with a sparkline where it fits."""
    cells = list(_heldout_cells(view, width >= WIDE)) + list(_reward_cells(view))[: detail.rewards]
    speed = median(column(view.rows[-RECENT_STEPS:], SPEED))
    if speed is not None:
        cells.append(("samples/s", pretty_number(speed), "", column(view.rows, SPEED)))
    if not cells:
        return

    yield Text()
    # The gap after each is two columns wide.
    value_columns = max(len(value) + 2 for _, value, _, _ in cells)
    note_columns = max(len(note) + 2 for _, _, note, _ in cells)
    name_columns = max(len(name) + 2 for name, _, _, _ in cells)
    num_columns = min(24, width - name_columns - value_columns - note_columns)
    has_lines = num_columns >= MIN_SPARKLINE

    table = _grid("left", "left", "left", *(["left"] if has_lines else []))
    for name, value, note, values in cells:
        # Names may be cut, numbers may not.
        label = _cut(name, width - value_columns - note_columns)
        row = [label, Text(value, style="bold"), Text(note)]
        if has_lines:
            # Of two values there is no course to see.
            line = sparkline(values, num_columns) if len(values) > 2 else ""
            row.append(Text(line, style="cyan"))

        table.add_row(*row)

    yield table


def _heldout_cells(view: RunView, is_wide: bool) -> Iterator[FigureCells]:
    """Yield the held-out rewards: how they changed, on the same noise, or what they are."""
    evaluation = view.evaluation
    if evaluation is None:
        return

    leading = leading_reward(evaluation, view.weights)
    names = sorted(evaluation.reward_names, key=lambda name: name != leading)
    percent = "95 %: " if is_wide else ""

    for name in names:
        form = format_of(evaluation, view.heldout, name)
        now = form.value(evaluation.estimate(name).mean)
        values = column(view.rows, f"eval/{name}")
        if view.heldout is None or name not in view.heldout.reward_names:
            interval = form.interval(evaluation.estimate(name))
            yield f"eval/{name}", now, f"{percent}{interval}", values
            continue

        before = form.value(view.heldout.baseline.estimate(name).mean)
        gain = view.heldout.difference(name)
        note = f"{form.gain(gain.mean)} ({percent}{form.interval(gain)})"
        yield f"eval/{name}", f"{before} → {now}", note, values


def _reward_cells(view: RunView) -> Iterator[FigureCells]:
    """Yield each reward by itself, where there are several."""
    names = list(view.config.get("reward") or {})
    for name in names if len(names) > 1 else ():
        ends = verdict(view.rows, key=f"reward/{name}")
        if ends is not None:
            text = f"{pretty_number(ends.first)} → {pretty_number(ends.last)}"
            yield f"reward/{name}", text, "", column(view.rows, ends.key)


def _stages(view: RunView, width: int) -> Iterator[RenderableType]:
    """Yield a bar a stage: medians of the recent steps, and their shares of a step."""
    recent = [row for row in view.rows[-RECENT_STEPS:] if step_seconds(row) is not None]
    if not recent:
        return

    steps = [stage_seconds(row) for row in recent]
    seconds = {}
    for name in steps[0]:
        seconds[name] = median(step[name] for step in steps) or 0.0

    total = sum(seconds.values()) or 1.0
    whole = median(step_seconds(row) for row in recent)
    yield from _title("A step", f"{pretty_number(whole)} s, median of the last {len(recent)}")
    table = _grid("left", "right", "right", "left")

    for name, value in seconds.items():
        if value:
            drawn = Text(bar(value / total, max(8, width - 32)), style="cyan")
            label = Text(name, style="dim")
            table.add_row(label, f"{format_number(value)} s", f"{value / total:.0%}", drawn)

    yield table


def _alarms(view: RunView) -> Iterator[RenderableType]:
    if not view.rows:
        return

    yield from _title("Alarms", "" if view.alarms else "none")
    table = Table.grid(padding=(0, 1))
    for sentence in view.alarms:
        table.add_row(Text("!", style="bold yellow"), Text(clean(sentence)))
    if view.alarms:
        yield table


def _events(view: RunView, width: int, detail: Detail) -> Iterator[RenderableType]:
    """Yield the newest events, in local time."""
    shown = view.events[-detail.events :] if detail.events else []
    if not shown:
        return

    yield from _title("What happened")
    for event in shown:
        lost = f"{format_seconds(event.lost_s)} lost" if event.lost_s else ""
        words = " · ".join(filter(None, (event.words, event.replica, lost, event.text)))
        stamp = event.time.astimezone().strftime("%H:%M:%S")
        line = Text.assemble((stamp, "dim"), f"  step {event.step:<5} ", clean(words))
        line.truncate(width, overflow="ellipsis")
        yield line


def _samples(view: RunView, width: int, detail: Detail) -> Iterator[RenderableType]:
    """Yield the last saved samples: reward, prompt, and each reward's value where it fits."""
    shown = view.samples[: detail.samples]
    if not shown:
        return

    yield from _title("Samples", f"of step {shown[0].step}")
    table = _grid("right", "left")

    for sample in shown:
        prompt = clean(sample.caption)
        values = ", ".join(f"{k} {format_number(v)}" for k, v in sample.rewards.items())
        text = Text(prompt)
        if len(sample.rewards) > 1 and width >= WIDE:
            text.append(f"  {clean(values)}", style="dim")

        table.add_row(Text(pretty_number(sample.reward), style="bold"), text)

    yield table
