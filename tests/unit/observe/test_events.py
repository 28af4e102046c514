import logging
import os
import threading

import pytest

from megadiff.observe.events import KINDS, TEXT_CHARS, Event, Events, parse_event, read_events


def test_an_event_comes_back_as_it_was_written(tmp_path):
    events = Events(tmp_path)
    events.step = 7
    events.write("replica_died", replica="replica_1", text="killed by SIGKILL\n  | its log")
    events.write("waited_for_replicas", lost_s=3.25, step=8)
    died, waited = read_events(tmp_path)
    assert (died.kind, died.step, died.replica) == ("replica_died", 7, "replica_1")
    assert died.text == "killed by SIGKILL\n  | its log" and died.lost_s == 0
    assert (waited.kind, waited.step, waited.lost_s) == ("waited_for_replicas", 8, 3.25)
    assert died.time <= waited.time
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_demands_its_fields(tmp_path, kind):
    needed = {"replica": "replica_0", "lost_s": 0.5}
    fields = {name: needed[name] for name in KINDS[kind][1:]}
    for missing in fields:
        with pytest.raises(AssertionError, match=f"event {kind} needs {missing}"):
            rest = {name: value for name, value in fields.items() if name != missing}
            Events(tmp_path).write(kind, **rest)
    Events(tmp_path).write(kind, **fields)
    assert [event.kind for event in read_events(tmp_path)] == [kind]


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(KeyError):
        Events(tmp_path).write("replica_exploded")


def test_lines_of_many_threads_and_two_writers_stay_whole(tmp_path):
    writers = [Events(tmp_path), Events(tmp_path)]

    def write(number):
        for index in range(50):
            replica = f"replica_{number}"
            text = f"{index} {'x' * 1500}"
            writers[number % 2].write("call_retried", replica=replica, lost_s=0, text=text)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(tmp_path)
    pairs = {(event.replica, event.text.split()[0]) for event in events}
    assert len(events) == len(pairs) == 400


def test_nodes_have_files_of_their_own_that_are_read_as_one(tmp_path):
    first, second = Events(tmp_path), Events(tmp_path, node=1)
    for events, replica in ((first, "replica_0"), (second, "replica_4"), (first, "replica_1")):
        events.write("replica_joined", replica=replica)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl",
        "events_node_1.jsonl",
    ]
    replicas = [event.replica for event in read_events(tmp_path)]
    assert sorted(replicas) == ["replica_0", "replica_1", "replica_4"]


def test_half_a_line_costs_itself_only(tmp_path, caplog):
    Events(tmp_path).write("run_started")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T')
    Events(tmp_path).write("run_resumed", step=3)
    assert [event.kind for event in read_events(tmp_path)] == ["run_started", "run_resumed"]
    assert "line 2 is torn and skipped" in caplog.text


def test_a_full_disk_warns_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    events = Events(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            events.write("run_started")
    assert caplog.text.count("events may be missing") == 1
    assert os.strerror(28) in caplog.text


def test_a_folder_that_is_gone_ends_nothing(tmp_path, caplog):
    Events(tmp_path / "gone").write("run_stopped", text="SIGTERM")
    assert "events may be missing" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Events(None).write("replica_left", replica="replica_0")
    assert not list(tmp_path.iterdir())


def test_long_texts_are_cut(tmp_path):
    Events(tmp_path).write("run_stopped", text="x" * 10**6)
    (event,) = read_events(tmp_path)
    assert len(event.text) == TEXT_CHARS


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"time": 3, "step": 1, "event": "run_started"}',
        '{"time": "x", "step": 1, "event": "e"}',
        '{"time": "2026-01-01T00:00:00Z", "step": null, "event": "e"}',
        '{"time": "2026-01-01T00:00:00Z", "step": 1, "event": "e", "lost_s": []}',
        '{"time": "2026-01-01T00:00:00Z", "step": 1, "event": "e", "lost_s": Infinity}',
    ],
)
def test_what_is_no_event_is_none(line):
    assert parse_event(line) is None


def test_a_kind_of_a_later_version_is_shown_by_its_name():
    event = parse_event('{"time": "2026-01-01T00:00:00", "step": 1, "event": "moon_landed"}')
    assert isinstance(event, Event) and event.words == "moon landed"
