"""nginx with TLS in front of replicas, set up as docs/many_nodes.md says, and a CA of its own."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "many_nodes.md"
PROGRAMS = ("nginx", "openssl")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
SUBJECT_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def make_authority(folder: Path) -> Path:
    """An authority and, signed by it, a certificate for localhost. Returns the authority's file."""
    folder.mkdir()
    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    authority = ("-x509", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.crt")
    _openssl(folder, "req", *key, *authority)
    _openssl(folder, "req", *key, "-subj", "/CN=node", "-keyout", "node.key", "-out", "node.csr")
    (folder / "names").write_text(SUBJECT_NAMES)
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    _openssl(folder, "x509", "-req", "-in", "node.csr", *signing, "-days", "2", "-out", "node.crt")
    return folder / "ca.crt"


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def settings(certificates: Path, ports: Mapping[int, int]) -> str:
    """The page's own `server` block for each port of the proxy → port of the replica."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    blocks = []
    for port, replica_port in ports.items():
        # 127.0.0.2 is no name in the certificate
        listen = f"listen 127.0.0.2:{port} ssl;\n    listen 127.0.0.1:{port}"
        block_of_port = block.replace("listen 8443", listen)
        block_of_port = block_of_port.replace("127.0.0.1:8000", f"127.0.0.1:{replica_port}")
        blocks.append(block_of_port.replace("/etc/megadiff/tls", str(certificates)))
    return "\n".join(blocks)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def proxy(folder: Path, certificates: Path, ports: Mapping[int, int]) -> Iterator[None]:
    """nginx in the foreground, until the block ends."""
    folder.mkdir()
    folders = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off;\n{folders}{settings(certificates, ports)}}}\n"
    )
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(file)])
    try:
        for port in ports:
            _wait_until_open(port, process, folder)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_open(port: int, process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
