import re

from synthetic_run import section_of, write_run

from megadiff.observe.events import Events
from megadiff.report.events_section import MAX_ROWS
from megadiff.report.report import write_report


def page_of(folder) -> str:
    return write_report(folder).read_text("utf-8")


def cells_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


def test_the_page_tells_what_happened_how_often_and_what_it_cost(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    events = Events(folder)
    events.write("run_started", step=0)
    for step in (3, 9):
        events.step = step
        events.write("replica_died", replica="replica_1", text="killed by <SIGKILL>\n  | log")
        events.write("call_retried", replica="replica_1", lost_s=2.5)
        events.write("replica_restarted", replica="replica_1", lost_s=60)

    section = section_of(page_of(folder), "What happened")
    totals, log = section.split('<div class="card figures log">')
    assert cells_of(totals)[1:] == [
        ["replica died", "replica_1", "2", "", "3 … 9"],
        ["call made again elsewhere", "replica_1", "2", "5.0 s", "3 … 9"],
        ["replica started again", "replica_1", "2", "2 min 00 s", "3 … 9"],
        ["in all", "", "", "2 min 05 s", ""],
    ]
    rows = cells_of(log)
    assert len(rows) == 1 + 7
    assert rows[2][1:4] == ["3", "replica died", "replica_1"]
    assert rows[2][5] == "killed by &lt;SIGKILL&gt;\n  | log"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", rows[2][0])


def test_a_run_to_which_nothing_happened_has_no_section(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    assert "What happened" not in page_of(folder)
    events = Events(folder)
    events.write("run_started")
    events.write("run_finished")
    assert "What happened" not in page_of(folder)


def test_a_resume_is_something_that_happened(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    Events(folder).write("run_resumed", step=2)
    assert "run resumed from a checkpoint" in section_of(page_of(folder), "What happened")


def test_of_many_events_the_newest_are_shown(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    events = Events(folder)
    for step in range(MAX_ROWS + 5):
        events.write("call_retried", step=step, replica="replica_0", lost_s=1)
    section = section_of(page_of(folder), "What happened")
    assert f"The newest {MAX_ROWS} of {MAX_ROWS + 5} events" in section
    assert ["call made again elsewhere", "replica_0", str(MAX_ROWS + 5)] in [
        row[:3] for row in cells_of(section)
    ]
