"""The registry: who is in it, and that an entry counts only where the very replica answers that
announced itself."""

import json
import logging
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn

from megadiff.rollout.client import processes, registry
from megadiff.rollout.client.processes import ReplicaDied, ReplicaProcess
from megadiff.rollout.client.registry import RegistryWatch, wait_until_announced
from megadiff.rollout.server.announcement import AnnouncedServer, announced
from megadiff.rollout.spec import ReplicaSpec
from tests.unit.process.strangers import Stranger, drip, flood, reply
from tests.unit.rollout.served import announce, replica_routes
from tests.waiting import wait_for


@pytest.fixture
def replica_a(tmp_path):
    """The url of a replica that is announced as 'a'."""
    with replica_routes("a") as url, announced(tmp_path, name="a", url=url):
        yield url


def test_the_later_of_one_name_stays(tmp_path):
    with ExitStack() as stack:
        with announced(tmp_path, name="a", url="http://one"):
            stack.enter_context(announced(tmp_path, name="a", url="http://two"))
        assert json.loads((tmp_path / "a.json").read_text())["url"] == "http://two"
    assert list(tmp_path.iterdir()) == []


def test_an_announcement_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch, caplog):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    with announced(tmp_path, name="a", url="http://a"):
        monkeypatch.setattr(Path, "unlink", refuse)
    assert "a.json could not be removed" in caplog.text


def test_what_cannot_be_read_is_not_gone(tmp_path, replica_a, monkeypatch):
    """Over NFS a read may fail once, and its replica has not left for that."""
    watch = RegistryWatch(tmp_path, token=None, run="mine")
    watch.look()
    assert watch.names() == {"a"}
    for name in ("listdir", "open"):
        with monkeypatch.context() as broken:
            broken.setattr(registry.os, name, Mock(side_effect=OSError(116, "Stale file handle")))
            watch.look()
            assert watch.names() == {"a"} and watch.is_announced("a")
    (tmp_path / "a.json").unlink()
    assert not watch.is_announced("a")
    watch.look()
    assert watch.names() == set()
    watch.close()


def test_a_loss_among_many_reads_no_other_announcement(tmp_path, monkeypatch):
    for index in range(100):
        announce(tmp_path, f"r{index}", f"http://127.0.0.1:{10_000 + index}")
    announce(tmp_path, "elsewhere", "http://127.0.0.1:9", file="odd name.json")
    watch = RegistryWatch(tmp_path, token=None, run="mine")
    watch.claims = registry.read_claims(tmp_path)[0]
    (tmp_path / "r1.json").unlink()
    announce(tmp_path, "another", "http://127.0.0.1:9", file="r2.json")
    (tmp_path / "r3.json").write_text("{")

    opened = Mock(wraps=os.open)
    monkeypatch.setattr(registry.os, "open", opened)
    asked = ("r0", "r1", "r2", "r3", "elsewhere", "never")
    assert [name for name in asked if watch.is_announced(name)] == ["r0", "elsewhere"]
    assert opened.call_count <= 8
    watch.close()


def test_addresses_that_are_announced_no_longer_are_forgotten(tmp_path, replica_a):
    watch = RegistryWatch(tmp_path, token=None, run="mine")
    for _ in range(3):
        with replica_routes("b") as url, announced(tmp_path, name="b", url=url):
            while len(watch.look()) < 2:
                pass
            assert watch.names() == {"a", "b"}
    watch.look()
    assert [address.name for address in watch._visits] == ["a"]
    assert [address.name for address in watch._first_seen_s] == ["a"]
    assert watch.look(settled=[("a", replica_a)]) == [] and not watch._visits
    watch.close()


def test_it_is_gone_before_a_connection_is_closed(tmp_path):
    """Else the client that sees it closed takes the replica for dead, and not for one that left."""

    async def answer(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    entry = announced(tmp_path, name="a", url="http://a")
    server = AnnouncedServer(uvicorn.Config(answer, lifespan="off", log_level="error"), entry)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    with server.announcement:
        thread.start()
        with socket.create_connection(address, timeout=10) as idle:
            idle.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert idle.recv(1000).startswith(b"HTTP/1.1 200")
            wait_for((tmp_path / "a.json").exists)
            server.should_exit = True
            while idle.recv(1000):
                pass  # the rest of the answer
            assert list(tmp_path.iterdir()) == []
    thread.join(10)


def test_the_replica_of_that_name_counts(tmp_path, replica_a):
    (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=5)
    assert (entry["name"], entry["url"]) == ("a", replica_a)
    assert entry["health"]["state"] == "ready"


def test_a_replica_that_works_for_another_run_is_not_counted(tmp_path, replica_a):
    """Nor taken, though it comes first: the run would be refused at its first push."""
    taken = json.dumps({"name": "0", "run": "theirs", "is_taken": True}).encode()
    with Stranger(lambda handler, _: reply(handler, taken)) as other:
        announce(tmp_path, "0", other.url)
        (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=5)
        assert entry["url"] == replica_a
        with pytest.raises(ReplicaDied, match=r"0 at http.* \(it works for the run 'theirs'; give"):
            wait_until_announced(tmp_path, count=2, timeout_s=0.5)


@pytest.mark.parametrize("body", [b'{"name": "b"}', b"<html>", b"[]", b"{}", b"[" * 200_000])
def test_another_service_on_its_port_does_not(tmp_path, body):
    with Stranger(lambda handler, _: reply(handler, body)) as stranger:
        announce(tmp_path, "a", stranger.url)
        with pytest.raises(
            ReplicaDied, match=f"0 of rollout.num_replicas=1 .*left out: .*a at {stranger.url}"
        ):
            wait_until_announced(tmp_path, count=1, timeout_s=0.1)


ODD = {
    "empty": (b"", "not JSON"),
    "notes": (b"notes", "not JSON"),
    "binary": (b"\xff\xfe\x00", "not JSON"),
    "deep": (b"[" * 50_000, "not JSON"),
    "list": (b"[]", "a list and not a JSON object"),
    "no_name": (b'{"url": "http://127.0.0.1:1"}', "its name is None"),
    "path": (b'{"name": "../a", "url": "http://127.0.0.1:1"}', "its name is '../a'"),
    "newline": (b'{"name": "a\\nb", "url": "http://127.0.0.1:1"}', "its name is"),
    "no_url": (b'{"name": "x"}', "its url is None"),
    "number": (b'{"name": "x", "url": 5}', "its url is 5"),
    "bracket": (b'{"name": "x", "url": "http://[bad"}', "its url is"),
    "colons": (b'{"name": "x", "url": "http://[:::]:80"}', "its url is"),
    "half": (b'{"name": "x", "url": "http://[fe80]:80"}', "its url is"),
    "four": (b'{"name": "x", "url": "http://[1.2.3.4]:80"}', "its url is"),
    "file": (b'{"name": "x", "url": "file:///etc/passwd"}', "its url is"),
    "port": (b'{"name": "x", "url": "http://127.0.0.1:99999"}', "its url is"),
    "large": (b" " * 2**17, "larger than 65536 bytes"),
}


def test_odd_files_are_left_out_with_one_warning_each(tmp_path, replica_a, caplog):
    for name, (body, _) in ODD.items():
        (tmp_path / f"{name}.json").write_bytes(body)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to("/nonexistent/file")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "token").write_text("secret")
    expected = {name: reason for name, (_, reason) in ODD.items()}
    expected |= {"folder": "not a regular file", "dangling": "a link to nothing"}
    expected |= {"loop": "cannot be read", "pipe": "not a regular file"}
    with caplog.at_level(logging.WARNING):
        (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=5)
        assert entry["url"] == replica_a
        caplog.clear()
        with pytest.raises(ReplicaDied, match="1 of rollout.num_replicas=2 .*left out: "):
            wait_until_announced(tmp_path, count=2, timeout_s=1)  # several looks
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == len(expected)
    for message, (name, reason) in zip(messages, sorted(expected.items()), strict=True):
        assert message.startswith(f"registry: {tmp_path / name}.json: ") and reason in message


def test_an_announcement_that_lies_there_twice_counts_once(tmp_path, replica_a, caplog):
    announce(tmp_path, "a", replica_a, file="copy.json")
    with pytest.raises(ReplicaDied, match="1 of rollout.num_replicas=2 "):
        wait_until_announced(tmp_path, count=2, timeout_s=0.5)
    assert "copy.json: a at http" in caplog.text and "announced in a.json already" in caplog.text


def test_a_claim_to_a_name_does_not_keep_its_replica_out(tmp_path, replica_a):
    with Stranger(lambda handler, _: reply(handler, b'{"name": "a"}', status=404)) as stranger:
        announce(tmp_path, "a", stranger.url, file="0.json")
        (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=5)
    assert entry["url"] == replica_a


def test_announcements_that_come_and_go(tmp_path):
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            announce(tmp_path, "a", "http://127.0.0.1:1", file="aside")
            os.replace(tmp_path / "aside", tmp_path / "a.json")
            (tmp_path / "a.json").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            with pytest.raises(ReplicaDied):
                wait_until_announced(tmp_path, count=1, timeout_s=-1)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("slow", [drip, flood])
def test_a_bad_address_delays_no_other_and_no_end(tmp_path, replica_a, slow):
    with ExitStack() as stack:
        for number in range(3):
            stranger = stack.enter_context(Stranger(slow))
            announce(tmp_path, f"0{number}", stranger.url)
        start_s = time.monotonic()
        (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=20)
        assert entry["url"] == replica_a and time.monotonic() - start_s < 10
        start_s = time.monotonic()
        with pytest.raises(ReplicaDied):
            wait_until_announced(tmp_path, count=2, timeout_s=0.5)
        assert time.monotonic() - start_s < 10


def test_a_dead_process_ends_the_wait_at_once(tmp_path, monkeypatch):
    """Any of them, also while an address keeps those waiting who ask it."""
    codes = {"lives": "import time; time.sleep(60)", "dies": "import time; time.sleep(0.3); 1 / 0"}
    monkeypatch.setattr(
        processes, "serve_command", lambda file: [sys.executable, "-c", codes[file.stem]]
    )
    started = []
    for name in codes:
        spec = ReplicaSpec(name=name, model=tmp_path)
        started.append(ReplicaProcess(spec, log=tmp_path / "logs" / f"{name}.log", num_threads=1))
    try:
        with Stranger(drip) as stranger:
            announce(tmp_path, "a", stranger.url)
            start_s = time.monotonic()
            with pytest.raises(ReplicaDied, match="(?s)dies .* exited with code 1.*ZeroDivision"):
                wait_until_announced(tmp_path, count=1, timeout_s=30, processes=started)
            assert time.monotonic() - start_s < 20
    finally:
        processes.stop_all(started)


def test_a_folder_that_others_can_write_to_is_named(tmp_path, replica_a, caplog):
    tmp_path.chmod(0o777)
    wait_until_announced(tmp_path, count=1, timeout_s=5)
    assert f"registry: {tmp_path}: every user of this machine can write here" in caplog.text
