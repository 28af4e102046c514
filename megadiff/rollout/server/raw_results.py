"""Keep our results out of vllm-omni's post-processing, which makes images of all outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megadiff.models.pipeline_base import RESULT_KEY


def pass_results_untouched(diffusion_engine: Any) -> None:
    """Make vllm-omni hand on our results as they are; a second call does nothing.

    diffusion_engine: the module that post-processes, for each model in its own way.
    """
    stock = diffusion_engine.get_diffusion_post_process_func
    if getattr(stock, "passes_results", False):
        return

    @wraps(stock)
    def with_results(od_config: Any) -> Callable[..., Any] | None:
        post_process = stock(od_config)
        if post_process is None:
            return None

        @wraps(post_process)  # vllm-omni looks which arguments it takes
        def call(output: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = isinstance(output, dict) and RESULT_KEY in (output.get("metadata") or {})
            return output if is_ours else post_process(output, *args, **kwargs)

        return call

    with_results.passes_results = True  # type: ignore[attr-defined]  # a mark on a function
    diffusion_engine.get_diffusion_post_process_func = with_results
