"""Build the weight sync from a run's engine to its replicas."""

from __future__ import annotations

from megadiff.engines.engine import Engine
from megadiff.parallel.collectives import agreed, gather_json, read_once
from megadiff.process.identity import device_name, host_name
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.choose import build_transport
from megadiff.tensors.boxes import boxes_from_json
from megadiff.tensors.manifest import folder_manifest
from megadiff.train.replicas import users_of, weights_folder
from megadiff.train.run import run_folder


def build_sync(engine: Engine, fleet: Fleet) -> WeightSync:
    """Return the weight sync from this engine to all replicas. Collective.

    Raises AgreedError for devices that the transport cannot serve.
    """
    config = engine.config
    mesh = engine.mesh
    adapter = engine.adapter
    manifest = folder_manifest(
        adapter.model_folder,
        adapter.components,
        dtype=config.model.dtype,
        plan=adapter.plan,
    )

    users = users_of(config, mesh)
    targets = fleet.weight_targets()
    # every rank needs to know which GPU each worker is on: a transport may send from any rank
    workers = read_once(
        lambda: {target.name: target.weights_places() for target in targets},
        source=users.source,
        group=users.group,
        world=mesh.cpu_group,
    )
    ranks = gather_json({"host": host_name(), "device": device_name(mesh.device)}, users.group)

    on_gpus = mesh.device.type == "cuda"
    transport = agreed(
        lambda: build_transport(
            # a base in GPU memory is mapped by the replica on that GPU
            "shm" if engine.shared_base and on_gpus else config.sync.transport,
            targets,
            workers,
            ranks=ranks,
            rank=mesh.rank - users.source,
            device=mesh.device,
            folder=weights_folder(config, mesh, run_folder(config)),
            heartbeat_s=config.rollout.heartbeat_s,
        ),
        mesh.cpu_group,
    )

    return WeightSync(
        engine,
        transport,
        manifest,
        boxes={name: boxes_from_json(rows) for name, rows in workers.items()},
        bucket_bytes=config.sync.bucket_mib * 2**20,
        cpu_group=mesh.cpu_group,
        shared_base=engine.shared_base,
    )
