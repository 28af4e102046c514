"""A replica's doors without an engine behind them, over a real socket."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from megadiff.rollout.limits import Limits
from megadiff.rollout.server.punctual import PunctualProtocol
from megadiff.rollout.server.replica import Replica
from megadiff.rollout.server.routes import replica_app
from megadiff.rollout.spec import ReplicaSpec
from megadiff.tensors.manifest import Manifest


@contextmanager
def serving(
    expected: Manifest,
    folder: Path,
    *,
    name: str = "r",
    token: str | None = None,
    limits: Limits | None = None,
    change: Callable[[Replica, FastAPI], Any] = lambda replica, app: None,
    announced: str = "",
) -> Iterator[str]:
    """Yield the address. change: what a test puts in place of an engine. announced: a proxy's
    address, which the replica signs in place of its own.
    """
    replica = Replica(
        engine=None,
        spec=ReplicaSpec(model=folder, name=name),
        expected=expected,
        workers=[{"host": "here"}],
        limits=limits or Limits(),
        model_rule=lambda sampling: None,
        private_folder=folder,
    )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    change(replica, app)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(
            replica_app(app, replica, token=token, url=announced or url),
            http=PunctualProtocol,
            ws="none",
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def replica_routes(name: str, *, token: str | None = None) -> Iterator[str]:
    """Serve a replica that holds no weights; yields the url that it signs."""
    with tempfile.TemporaryDirectory() as folder:
        with serving({}, Path(folder), name=name, token=token) as url:
            yield url


def announce(folder: Path, name: str, url: str, *, file: str = "") -> None:
    (folder / (file or f"{name}.json")).write_text(json.dumps({"name": name, "url": url, "pid": 1}))
