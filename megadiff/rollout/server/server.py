"""A replica as a process: vllm-omni's own server app around our engine, with the RL routes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megadiff.process.descriptors import raise_soft_limit
from megadiff.process.garbage import collection_paused, freeze_startup_objects
from megadiff.process.lifeline import exit_with, kill_children
from megadiff.process.network import check_port
from megadiff.process.stacks import announce
from megadiff.process.title import set_title
from megadiff.process.versions import sampling_code
from megadiff.rollout.proof import NAME_RULE, is_loopback, is_name, is_url
from megadiff.rollout.server.absent import hide_transformer_engine
from megadiff.rollout.spec import ReplicaSpec, process_title
from megadiff.rollout.stages import check_stages, single_stage

if TYPE_CHECKING:  # imports torch
    from megadiff.models.adapter import ModelAdapter

logger = logging.getLogger(__name__)
GRACE_S = 1  # after SIGTERM: for the requests in flight of a replica that ends with its run
LEAVE_S = 120  # of one that leaves a run which goes on: it finishes them
KEEP_ALIVE_S = 600  # longer than any client's, or a request may meet a connection that closes
# Seconds of silence before a probe, seconds between probes, and how many stay unanswered.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
ENGINE_STOP_S = 2.0  # then for the engine's own shutdown
EXIT_S = 4.0  # then the process ends, whatever threads are left; a fleet sends SIGKILL after 5 s


def serve(spec: ReplicaSpec, *, token: str | None) -> None:
    """Run until SIGTERM or SIGINT, and then raise KeyboardInterrupt.

    token: needed from clients when given, and must be given for a host that is not loopback.
    Raises ValueError, before anything is loaded, for a setting that cannot work.
    """
    if spec.parent_pid is not None:
        exit_with(spec.parent_pid)

    raise_soft_limit()  # a client of each rank may be connected
    sampling_code()  # now, of the files that are about to be imported
    signal.signal(signal.SIGTERM, _on_sigterm)
    check_host(spec.host, token)
    check_url(spec.url, token)
    check_announcement(spec.registry, spec.name)
    listener = bind(spec.host, spec.port)
    if not spec.name:  # no two replicas of a registry may share a name
        spec = replace(spec, name=f"{socket.gethostname()}-{listener.getsockname()[1]}")
    set_title(process_title(spec.name, spec.run, "server"))
    if spec.stacks is not None:
        announce(spec.stacks, spec.name)

    # These import torch, which takes seconds: a port that is taken is told before.
    with collection_paused():
        from megadiff.models.registry import build_adapter, check_model_folder
        from megadiff.process.allocator import grow_segments

    grow_segments()
    hide_transformer_engine()
    try:
        check_model_folder(spec.model, spec.family)
        adapter = build_adapter(spec.model, spec.family)

        check_hardware(spec, num_heads=adapter.num_heads)
        if spec.float32_streams:
            adapter.check_float32_streams()

        if spec.stage_config:
            check_stages(
                spec.stage_config,
                adapter,
                tp=spec.tp,
                num_devices=num_devices(spec.tp),
            )

        stay_on_loopback(spec.host)
        with tempfile.TemporaryDirectory(prefix="megadiff-replica-") as folder:
            serving = _serve(spec, token, adapter, listener, Path(folder))
            asyncio.run(serving)
    finally:
        listener.close()
        kill_children()  # vllm-omni's workers, when its own shutdown did not end them


def _on_sigterm(signal_number: int, frame: object) -> None:
    """Leave through every `finally`.

    uvicorn holds the signal while it serves, and raises it again when it is done.
    """
    # a second signal would break off the clean-up
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last_resort = threading.Timer(EXIT_S, _leave)
    last_resort.daemon = True
    last_resort.start()
    raise KeyboardInterrupt


def _leave() -> None:
    kill_children()
    os._exit(0)


def check_host(host: str, token: str | None) -> None:
    """Raise ValueError for an address that others can reach, without a token."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines: set MEGADIFF_TOKEN or give "
            "--token-file, or use --host 127.0.0.1"
        )


def check_url(url: str, token: str | None) -> None:
    """Raise ValueError for an address to announce that is none, or that needs a token."""
    if url and not is_url(url):
        raise ValueError(
            f"--url {url!r} must be https://HOST:PORT, without a path; give the proxy's address, "
            "or leave it out where there is none"
        )
    # The replica itself may be on loopback: then all who reach the proxy reach it.
    if url and not token and not is_loopback(urlsplit(url).hostname or ""):
        raise ValueError(
            f"--url {url} can be reached from other machines: set MEGADIFF_TOKEN or give "
            "--token-file"
        )


def check_announcement(registry: Path | None, name: str) -> None:
    """Raise ValueError for a --name or --registry under which a replica cannot announce itself."""
    if name and not is_name(name):
        raise ValueError(f"--name {name!r:.80} is not {NAME_RULE}; give another one")
    if registry is None:
        return
    try:
        registry.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=registry) as file:
            file.write(b"{}")
    except OSError as error:
        raise ValueError(
            f"--registry {registry}: no file can be written there ({error.strerror}); give a "
            "folder that this user may write to"
        ) from error


def stay_on_loopback(host: str) -> None:
    """Make the engine's own sockets listen on loopback, as its worker processes are on this host.

    NCCL joins the trainer's group, too: it stays there only where the trainer is on this host.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if is_loopback(host):
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def check_hardware(spec: ReplicaSpec, *, num_heads: int) -> None:
    """Raise ValueError for a --device, --tp, --dtype or --fp8 that the model cannot run with."""
    import torch
    from vllm.platforms import current_platform

    built_for = current_platform.device_type or "no device that it found"
    if spec.device not in ("auto", built_for):
        raise ValueError(
            f"--device {spec.device}, but the installed vLLM runs on {built_for}; use --device auto"
        )

    if spec.tp < 1 or num_heads % spec.tp:
        raise ValueError(
            f"--tp {spec.tp} does not divide the model's {num_heads} attention heads; "
            f"give a divisor of {num_heads}"
        )
    if torch.cuda.is_available() and spec.tp > torch.cuda.device_count():
        raise ValueError(
            f"--tp {spec.tp}, but {torch.cuda.device_count()} GPUs are visible; give at most that"
        )

    if spec.shared_base and (spec.tp > 1 or spec.fp8_in_place or spec.weights is not None):
        raise ValueError(
            "--shared-base maps a trainer's weights whole and as they are; leave out --tp, "
            "--fp8-in-place and --weights"
        )
    if spec.fp8_in_place and not spec.fp8:
        raise ValueError(
            "--fp8-in-place says how --fp8 keeps its weights; give --fp8 as well, or neither"
        )
    if spec.fp8 and spec.dtype != "bfloat16":
        raise ValueError(
            f"--fp8 multiplies copies of bfloat16 weights, but --dtype is {spec.dtype}; "
            "give --dtype bfloat16"
        )


def num_devices(tp: int) -> int:
    """Return how many GPUs a stage can name; on a CPU as many as the replica has workers."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else tp


def stage_file(spec: ReplicaSpec, adapter: ModelAdapter, folder: Path) -> Path | None:
    """Return the replica's stage configuration file, written into the folder where none is given.

    None where vllm-omni has one topology of the model.
    """
    if spec.stage_config or not adapter.stage_topology:
        return spec.stage_config
    file = folder / "stages.yaml"
    file.write_text(single_stage(adapter.stage_topology, tp=spec.tp))
    return file


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket, bound before anything is loaded.

    It refuses connections until the server listens on it.
    Raises ValueError when the port is taken or the address is not this machine's.
    """
    check_port(port)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        # else a port whose last connections are still closing would count as taken
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these: a client's host that vanished has left a minute later.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)

        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} on {host} is in use; give another --port, or 0 for any free one"
            ) from None
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from None

    return listener


def reachable_url(host: str, port: int) -> str:
    """Return the address that others use."""
    # "Every interface" is no address to connect to; this machine's name is.
    host = socket.getfqdn() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(
    spec: ReplicaSpec,
    token: str | None,
    adapter: ModelAdapter,
    listener: socket.socket,
    private_folder: Path,
) -> None:
    with collection_paused():
        import uvicorn

        from megadiff.rollout.server.announcement import AnnouncedServer, announced
        from megadiff.rollout.server.late_join import load_newest
        from megadiff.rollout.server.omni_app import (
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
        engine = build_engine(
            spec,
            pipeline=adapter.rollout_pipeline,
            stages=stage_file(spec, adapter, private_folder),
            private_folder=private_folder,
        )

    # A worker within this process has given it vllm-omni's own title.
    set_title(process_title(spec.name, spec.run, "server"))

    try:
        model = await call_worker(engine, "describe")
        replica = Replica(
            engine=engine,
            spec=spec,
            expected=model["manifest"],
            workers=model["workers"],
            model_rule=adapter.validate,
            private_folder=private_folder,
        )

        if spec.weights is not None:
            await load_newest(replica, spec.weights)

        app = await build_app(engine, spec)
        url = spec.url or reachable_url(spec.host, listener.getsockname()[1])
        server = AnnouncedServer(
            uvicorn.Config(
                replica_app(app, replica, token=token, url=url),
                http=PunctualProtocol,
                ws="none",
                log_level="warning",
                timeout_graceful_shutdown=GRACE_S if spec.ends_with_run else LEAVE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
            ),
            announced(spec.registry, name=spec.name, url=url),
        )

        freeze_startup_objects()
        logger.info("%s serves %s on %s (vllm-omni %s)", spec.name, spec.model, url, omni_version)

        with server.announcement:
            await server.serve(sockets=[listener])
    finally:
        _stop_engine(engine)


def _stop_engine(engine: Any) -> None:
    """Stop the engine within ENGINE_STOP_S.

    A shutdown that hangs is left behind, and its processes are killed by the caller.
    """
    stopper = threading.Thread(target=engine.shutdown, name="engine-shutdown", daemon=True)
    stopper.start()
    stopper.join(ENGINE_STOP_S)
    if stopper.is_alive():
        logger.warning("the engine did not stop within %.0f s", ENGINE_STOP_S)
