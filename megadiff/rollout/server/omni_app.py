"""Hold all of vllm-omni's server that depends on its version: the engine and its FastAPI app.

Tested with vllm-omni 0.26 (CPU and GPU) and 0.28 (CPU).
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI

from megadiff.process.versions import VLLM_OMNI
from megadiff.rollout.server.late_outputs import deliver_late_outputs
from megadiff.rollout.server.patient_polls import poll_patiently
from megadiff.rollout.server.raw_results import pass_results_untouched
from megadiff.rollout.spec import ReplicaSpec

logger = logging.getLogger(__name__)
WORKER_EXTENSION = "megadiff.rollout.worker.extension.RolloutWorkerExtension"
KEPT_ROUTES = {  # of vllm-omni's: all others are past the bounds of megadiff.rollout.server.images
    "/v1/images/generations": {"POST"},
    "/v1/models": {"GET"},
}


def check_versions() -> str:
    """Return vllm-omni's version.

    Raises ValueError when it is absent or none of VLLM_OMNI, or when vLLM's minor version differs.
    """
    try:
        omni = version("vllm-omni")
    except PackageNotFoundError:
        raise ValueError("vllm-omni is not installed; run ./launch/setup.sh") from None

    if _minor(omni) not in VLLM_OMNI:
        raise ValueError(
            f"vllm-omni {omni} is installed; tested are {' and '.join(VLLM_OMNI)}; "
            "run ./launch/setup.sh"
        )
    import vllm

    if _minor(vllm.__version__) != _minor(omni):
        raise ValueError(
            f"vllm {vllm.__version__} beside vllm-omni {omni}: their minor versions must match"
        )

    return omni


def build_engine(
    spec: ReplicaSpec,
    *,
    pipeline: str,
    stages: Path | None = None,
    private_folder: Path | None = None,
    worker_extension: str = WORKER_EXTENSION,
) -> Any:
    """Return an AsyncOmni with our pipeline and worker extension, its weights loaded.

    pipeline: "module:Class". stages: a stage configuration file, None where the model needs none.
    private_folder: of the replica's processes alone, where its workers meet; None: by TCP.
    """
    from vllm_omni.diffusion import diffusion_engine
    from vllm_omni.engine import orchestrator
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    pass_results_untouched(diffusion_engine)
    poll_patiently(orchestrator)
    if _minor(version("vllm-omni")) == "0.26":
        from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

        deliver_late_outputs(MultiprocDiffusionExecutor)

    return AsyncOmni(
        model=str(spec.model),
        dtype=spec.dtype,
        enforce_eager=not spec.compile,
        # An engine step runs one request: a call's groups already fill the batch, and their
        # result then cannot depend on what else is running.
        max_num_seqs=1,
        parallel_config={"tensor_parallel_size": spec.tp},
        # Workers read the spec's fields from here, by their names.
        custom_pipeline_args={
            **json.loads(spec.to_json()),
            "pipeline_class": pipeline.replace(":", "."),
            "private_folder": str(private_folder or ""),
        },
        worker_extension_cls=worker_extension,
        **({"deploy_config": str(stages)} if stages else {}),
    )


async def build_app(engine: Any, spec: ReplicaSpec) -> FastAPI:
    """Return a new app with KEPT_ROUTES of vllm-omni's.

    vLLM's app has dozens of routes more, pages, and lets scripts of any web site in (CORS).
    """
    from vllm_omni.entrypoints.openai import api_server

    routes = [
        route
        for route in api_server.router.routes
        if KEPT_ROUTES.get(getattr(route, "path", "")) == getattr(route, "methods", ())
    ]

    if len(routes) != len(KEPT_ROUTES):
        raise ValueError(f"vllm-omni's router has {len(routes)} of {', '.join(KEPT_ROUTES)}")

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(APIRouter(routes=routes))
    api_server._register_omni_exception_handlers(app)
    await api_server.omni_init_app_state(engine, app.state, _server_arguments(spec))

    return app


async def call_worker(engine: Any, method: str, *arguments: object) -> Any:
    """Run a worker extension's method on all workers and return the first one's result.

    Raises RuntimeError with a worker's message.
    """
    result = await engine.collective_rpc(method, args=arguments)
    while isinstance(result, list) and len(result) == 1:  # per stage, and per worker
        result = result[0]
    # collective_rpc itself never raises.
    if isinstance(result, dict) and result.get("supported") is False:
        raise RuntimeError(f"worker call {method} failed: {result.get('error') or result}")
    return result


def _server_arguments(spec: ReplicaSpec) -> Any:
    """Return what vLLM's app builder reads, made by vllm-omni's own command line parser."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_omni.entrypoints.cli.serve import cmd_init

    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    arguments = parser.parse_args(
        ["serve", str(spec.model), "--omni", "--served-model-name", spec.name]
    )
    arguments.model = str(spec.model)

    return arguments


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])
