"""Everything of vllm-omni's server that depends on its version: the engine, and its FastAPI app around it.

Tested with vllm-omni 0.26 (CPU and GPU) and 0.28 (CPU).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megadiff.rollout.late_outputs import deliver_late_outputs
from megadiff.rollout.raw_results import pass_results_untouched

logger = logging.getLogger(__name__)
TESTED = ("0.26", "0.28")
VLLM_ROUTES = (  # vllm-omni's router brings its own
    ("/v1/chat/completions", {"POST"}),
    ("/v1/chat/completions/batch", {"POST"}),
    ("/v1/models", {"GET"}),
)
OMNI_ROUTES = (  # the replica answers these itself, and sleeps by a route of its own
    ("/health", {"GET"}),
    ("/v1/omni/sleep", {"POST"}),
    ("/v1/omni/wakeup", {"POST"}),
    ("/v1/videos", {"POST"}),  # generates after it has answered, when weights may move; /v1/videos/sync stays
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """dtype: float32 or bfloat16. compile: torch.compile. fp8, fp8_in_place: see megadiff.rollout.fp8. float32_streams:
    the config's model.float32_streams. tp: workers that share the transformer's weights."""

    model: Path
    name: str
    dtype: str
    pipeline: str
    worker_extension: str = "megadiff.rollout.worker_extension.RolloutWorkerExtension"
    compile: bool = False
    fp8: bool = False
    fp8_in_place: bool = False
    float32_streams: bool = False
    tp: int = 1


def check_versions() -> str:
    """vllm-omni's version. Raises ValueError when it is absent or none of TESTED, or when vLLM's minor differs."""
    try:
        omni = version("vllm-omni")
    except PackageNotFoundError:
        raise ValueError("vllm-omni is not installed; run ./launch/setup.sh") from None
    if _minor(omni) not in TESTED:
        raise ValueError(f"vllm-omni {omni} is installed; tested are {' and '.join(TESTED)}; run ./launch/setup.sh")
    import vllm

    if _minor(vllm.__version__) != _minor(omni):
        raise ValueError(f"vllm {vllm.__version__} beside vllm-omni {omni}: their minor versions must match")
    return omni


def build_engine(config: EngineConfig) -> Any:
    """An AsyncOmni with our pipeline and worker extension; blocks until the weights are loaded.

    max_num_seqs=1: an engine step runs one request. The samples of a group already fill the batch, and a group's result
    then cannot depend on what else is running.
    """
    from vllm_omni.diffusion import diffusion_engine
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    pass_results_untouched(diffusion_engine)
    if _minor(version("vllm-omni")) == "0.26":
        from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

        deliver_late_outputs(MultiprocDiffusionExecutor)
    return AsyncOmni(
        model=str(config.model),
        dtype=config.dtype,
        enforce_eager=not config.compile,
        max_num_seqs=1,
        parallel_config={"tensor_parallel_size": config.tp},
        custom_pipeline_args={
            "pipeline_class": config.pipeline,
            "fp8": config.fp8,
            "fp8_in_place": config.fp8_in_place,
            "float32_streams": config.float32_streams,
        },
        worker_extension_cls=config.worker_extension,
    )


async def build_app(engine: Any, config: EngineConfig, *, max_image_pixels: int) -> Any:
    """vllm-omni's own FastAPI app on the engine, without the routes that the replica answers itself."""
    from vllm.entrypoints.openai.api_server import build_app as build_vllm_app
    from vllm_omni.entrypoints.openai import api_server

    arguments = _server_arguments(config)
    arguments.max_generated_image_size = max_image_pixels
    app = build_vllm_app(arguments, tuple(await engine.get_supported_tasks()))
    for path, methods in VLLM_ROUTES:
        api_server._remove_route_from_app(app, path, methods)
    app.include_router(api_server.router)
    for path, methods in OMNI_ROUTES:
        api_server._remove_route_from_app(app, path, methods)
    api_server._register_omni_exception_handlers(app)
    await api_server.omni_init_app_state(engine, app.state, arguments)
    return app


async def call_worker(engine: Any, method: str, *arguments: object) -> Any:
    """The result of a worker extension's method on the first worker; all run it, and the executor drops the others'.

    Raises RuntimeError with a worker's message: collective_rpc itself never raises, it returns {"supported": False, …}.
    """
    result = await engine.collective_rpc(method, args=arguments)
    while isinstance(result, list) and len(result) == 1:  # per stage, and per worker
        result = result[0]
    if isinstance(result, dict) and result.get("supported") is False:
        raise RuntimeError(f"worker call {method} failed: {result.get('error') or result}")
    return result


def _server_arguments(config: EngineConfig) -> Any:
    """The namespace that vLLM's app builder reads, from vllm-omni's own command line parser."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_omni.entrypoints.cli.serve import cmd_init

    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    arguments = parser.parse_args(["serve", str(config.model), "--omni", "--served-model-name", config.name])
    arguments.model = str(config.model)
    return arguments


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])
