"""A replica as a process: vllm-omni's own server app around our engine, with the RL routes."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadiff.process.garbage import freeze_startup_objects
from megadiff.process.lifeline import exit_with, kill_children
from megadiff.rollout.limits import Limits
from megadiff.rollout.proof import is_loopback

if TYPE_CHECKING:  # imports torch
    from megadiff.types import Sampling

logger = logging.getLogger(__name__)
GRACE_S = 1  # after SIGTERM: for the requests in flight
KEEP_ALIVE_S = (
    600  # longer than any client keeps an idle connection, or a request may meet one that closes
)
ENGINE_STOP_S = 2.0  # then for the engine's own shutdown
EXIT_S = 4.0  # then the process ends, whatever threads are left; a fleet sends SIGKILL after 5 s


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """name: None takes the host's name and the port, so that no two replicas of a registry share one. port 0: any free one.
    device: auto, cpu or cuda, a check against the vLLM build, which decides. token: needed from clients when given, and must
    be given for a host that is not loopback. registry: folder to announce `<name>.json` in. weights: the folder of
    sync.transport=disk, whose newest version is served. tp: workers (GPUs) that share the transformer's weights. parent_pid:
    exit when that process does."""

    model: Path
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    dtype: str = "bfloat16"
    token: str | None = None
    registry: Path | None = None
    weights: Path | None = None
    parent_pid: int | None = None
    compile: bool = False
    fp8: bool = False
    fp8_in_place: bool = False
    float32_streams: bool = False
    tp: int = 1
    limits: Limits = field(default_factory=Limits)


def serve(config: ServeConfig) -> None:
    """Runs until SIGTERM or SIGINT, and then raises KeyboardInterrupt.

    Raises ValueError, before anything is loaded, for a setting that cannot work.
    """
    if config.parent_pid is not None:
        exit_with(config.parent_pid)
    signal.signal(signal.SIGTERM, _on_sigterm)
    check_host(config.host, config.token)
    listener = bind(config.host, config.port)
    config = replace(
        config, name=config.name or f"{socket.gethostname()}-{listener.getsockname()[1]}"
    )
    from megadiff.models.registry import (
        build_adapter,
        check_model_folder,
    )  # imports torch: a taken port is told before
    from megadiff.process.allocator import grow_segments

    grow_segments()
    try:
        family = check_model_folder(config.model)
        adapter = build_adapter(config.model)
        check_device(config.device)
        check_tensor_parallel(config, num_heads=adapter.num_heads)
        check_fp8(config)
        if config.float32_streams:
            adapter.check_float32_streams()
        stay_on_loopback(config.host)
        with tempfile.TemporaryDirectory(prefix="megadiff-replica-") as folder:
            pipeline = family.rollout_pipeline
            asyncio.run(_serve(config, pipeline, adapter.validate, listener, Path(folder)))
    finally:
        listener.close()
        kill_children()  # vllm-omni's workers, when its own shutdown did not end them


def _on_sigterm(signal_number: int, frame: object) -> None:
    """Leaves through every `finally`. uvicorn holds the signal while it serves, and raises it again when it is done."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last_resort = threading.Timer(EXIT_S, _leave)
    last_resort.daemon = True
    last_resort.start()
    raise KeyboardInterrupt


def _leave() -> None:
    kill_children()
    os._exit(0)


def check_host(host: str, token: str | None) -> None:
    """Raises ValueError for an address that others can reach, without a token."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines: set MEGADIFF_TOKEN or give "
            "--token-file, or use --host 127.0.0.1"
        )


def stay_on_loopback(host: str) -> None:
    """Make the engine's own sockets listen on loopback, as its worker processes are on this host.

    NCCL joins the trainer's group, too: it stays there only where the trainer is on this host.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if is_loopback(host):
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def check_device(device: str) -> None:
    """Raises ValueError when the installed vLLM is built for another device."""
    from vllm.platforms import current_platform

    built_for = current_platform.device_type or "no device that it found"
    if device != "auto" and device != built_for:
        raise ValueError(
            f"--device {device}, but the installed vLLM runs on {built_for}; use --device auto"
        )


def check_tensor_parallel(config: ServeConfig, *, num_heads: int) -> None:
    """Raises ValueError when --tp does not divide the model's attention heads, or there are fewer GPUs."""
    import torch

    if config.tp < 1 or num_heads % config.tp:
        raise ValueError(
            f"--tp {config.tp} does not divide the model's {num_heads} attention heads; give a divisor of {num_heads}"
        )
    if torch.cuda.is_available() and config.tp > torch.cuda.device_count():
        raise ValueError(
            f"--tp {config.tp}, but {torch.cuda.device_count()} GPUs are visible; give at most that"
        )


def check_fp8(config: ServeConfig) -> None:
    """Raises ValueError for --fp8 beside weights that are not bfloat16, and for --fp8-in-place alone."""
    if config.fp8_in_place and not config.fp8:
        raise ValueError(
            "--fp8-in-place says how --fp8 keeps its weights; give --fp8 as well, or neither"
        )
    if config.fp8 and config.dtype != "bfloat16":
        raise ValueError(
            f"--fp8 multiplies copies of bfloat16 weights, but --dtype is {config.dtype}; give --dtype bfloat16"
        )


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound before anything is loaded; it refuses connections until the server listens on it.

    Raises ValueError when the port is taken or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted connections inherit these: a client's host that vanished has left a minute later
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} on {host} is in use; give another --port, or 0 for any free one"
            ) from None
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


def reachable_url(host: str, port: int) -> str:
    """The address that others use: a host that means "every interface" is announced by this machine's name."""
    host = socket.getfqdn() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(
    config: ServeConfig,
    pipeline: str,
    model_rule: Callable[[Sampling], None],
    listener: socket.socket,
    private_folder: Path,
) -> None:
    import uvicorn

    from megadiff.rollout.server.late_join import load_newest
    from megadiff.rollout.server.omni_app import (
        EngineConfig,
        build_app,
        build_engine,
        call_worker,
        check_versions,
    )
    from megadiff.rollout.server.punctual import PunctualProtocol
    from megadiff.rollout.server.replica import Replica
    from megadiff.rollout.server.routes import replica_app
    from megadiff.sync.transports.shared_memory import sweep

    omni_version = check_versions()
    sweep()
    engine_config = EngineConfig(
        model=config.model,
        name=config.name,
        dtype=config.dtype,
        pipeline=pipeline,
        compile=config.compile,
        fp8=config.fp8,
        fp8_in_place=config.fp8_in_place,
        float32_streams=config.float32_streams,
        tp=config.tp,
        private_folder=private_folder,
    )
    engine = build_engine(engine_config)
    try:
        replica = Replica(
            engine,
            name=config.name,
            expected=await call_worker(engine, "policy_manifest"),
            places=(await call_worker(engine, "policy_places"))["workers"],
            limits=config.limits,
            model_rule=model_rule,
            arithmetic={"fp8": config.fp8, "float32_streams": config.float32_streams},
            weights_folder=config.weights,
            private_folder=private_folder,
        )
        if config.weights is not None:
            await load_newest(replica, config.weights)
        app = await build_app(engine, engine_config)
        url = reachable_url(config.host, listener.getsockname()[1])
        server = uvicorn.Server(
            uvicorn.Config(
                replica_app(app, replica, token=config.token, url=url),
                http=PunctualProtocol,
                ws="none",
                log_level="warning",
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
            )
        )
        freeze_startup_objects()
        logger.info(
            "%s serves %s on %s (vllm-omni %s)", config.name, config.model, url, omni_version
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.02)
        with Announcement(config.registry, name=config.name, url=url):
            await serving
    finally:
        _stop_engine(engine)


def _stop_engine(engine: Any) -> None:
    """Within ENGINE_STOP_S; a shutdown that hangs is left behind, and its processes are killed by the caller."""
    stopper = threading.Thread(target=engine.shutdown, name="engine-shutdown", daemon=True)
    stopper.start()
    stopper.join(ENGINE_STOP_S)
    if stopper.is_alive():
        logger.warning("the engine did not stop within %.0f s", ENGINE_STOP_S)


class Announcement:
    """`registry/<name>.json` with name, url and pid, as long as the context lasts. Nothing when registry is None. Of two
    replicas of one name the later one is announced, and stays so when the earlier one ends."""

    def __init__(self, registry: Path | None, *, name: str, url: str) -> None:
        self.path = registry / f"{name}.json" if registry is not None else None
        self.entry = {"name": name, "url": url, "pid": os.getpid()}

    def __enter__(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(self.entry, file)
        os.replace(file.name, self.path)  # readers see a whole file or none

    def __exit__(self, *_: object) -> None:
        if self.path is not None and self._is_announced():
            self.path.unlink(missing_ok=True)

    def _is_announced(self) -> bool:
        try:
            return json.loads(self.path.read_text(encoding="utf-8")) == self.entry
        except (OSError, ValueError):
            return False
