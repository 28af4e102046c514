"""The registry: who is in it, and that an entry counts only where the very replica answers that announced itself."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from megadiff.rollout.fleet import ReplicaDied, wait_until_announced
from megadiff.rollout.server import Announcement


@contextmanager
def answering(body: bytes):
    """The address of a server that says this whatever is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802, its name in http.server
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_later_of_one_name_stays(tmp_path):
    later = Announcement(tmp_path, name="a", url="http://two")
    with Announcement(tmp_path, name="a", url="http://one"):
        later.__enter__()
    assert json.loads((tmp_path / "a.json").read_text())["url"] == "http://two"
    later.__exit__()
    assert list(tmp_path.iterdir()) == []


def test_the_replica_of_that_name_counts(tmp_path):
    with answering(b'{"name": "a"}') as url, Announcement(tmp_path, name="a", url=url):
        (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=5)
        assert (entry["name"], entry["url"]) == ("a", url)


@pytest.mark.parametrize("body", [b'{"name": "b"}', b"<html>", b"[]", b"{}"])
def test_another_service_on_its_port_does_not(tmp_path, body):
    with answering(body) as url, Announcement(tmp_path, name="a", url=url):
        with pytest.raises(ReplicaDied, match=f"0 of rollout.num_replicas=1 .*no answer from here: a at {url}"):
            wait_until_announced(tmp_path, count=1, timeout_s=0.1)
