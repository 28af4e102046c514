"""Serve a judge that answers every request after some seconds, however many come at once.

    python tools/slow_judge.py SECONDS     # prints its port, ends with its stdin

The standard library alone, so that it starts at once and takes no core from what is measured.
"""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SlowJudge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer_s = 0.0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.answer_s)
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"1")

    def log_message(self, *args: object) -> None:
        pass


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # so many connections may come at once


def main() -> None:
    SlowJudge.answer_s = float(sys.argv[1])
    server = JudgeServer(("127.0.0.1", 0), SlowJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
