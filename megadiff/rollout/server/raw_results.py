"""vllm-omni makes images and videos of what a pipeline returns; the tensors of our groups must go past that untouched."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megadiff.models.pipeline_base import RESULT_KEY


def pass_results_untouched(diffusion_engine: Any) -> None:
    """diffusion_engine: the module of vllm-omni that post-processes, for each model in its own way; done once a process."""
    stock = diffusion_engine.get_diffusion_post_process_func
    if getattr(stock, "passes_results", False):
        return

    @wraps(stock)
    def with_results(od_config: Any) -> Callable[..., Any] | None:
        post_process = stock(od_config)
        return None if post_process is None else _past(post_process)

    with_results.passes_results = True
    diffusion_engine.get_diffusion_post_process_func = with_results


def _past(post_process: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(post_process)  # vllm-omni looks which arguments it takes
    def call(output: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = isinstance(output, dict) and RESULT_KEY in (output.get("metadata") or {})
        return output if is_ours else post_process(output, *args, **kwargs)

    return call
