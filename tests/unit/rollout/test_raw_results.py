"""Our results go past vllm-omni's post-processing; all else takes it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from megadiff.models.pipeline_base import RESULT_KEY
from megadiff.rollout.server.raw_results import pass_results_untouched


def _post_process(video: object, output_type: str = "np", sampling_params: object = None) -> tuple:
    return ("processed", video, output_type, sampling_params)


def test_only_our_results_pass() -> None:
    module = SimpleNamespace(
        get_diffusion_post_process_func=lambda config: _post_process if config else None
    )
    pass_results_untouched(module)
    once = module.get_diffusion_post_process_func
    pass_results_untouched(module)
    assert module.get_diffusion_post_process_func is once
    post_process = once("wan")
    ours = {"payload": {}, "metadata": {RESULT_KEY: {}}}
    assert post_process(ours, sampling_params="p") is ours
    for other in ({"payload": {}, "metadata": None}, {"payload": {}}, [1.0]):
        assert post_process(other, sampling_params="p") == ("processed", other, "np", "p")
    assert "sampling_params" in inspect.signature(post_process).parameters  # vllm-omni asks
    assert once("") is None
