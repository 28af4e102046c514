"""Run vllm-omni on a machine without an accelerator, as an out-of-tree platform plugin.

Found through the entry point `vllm_omni.platform_plugins`. Inert unless vLLM itself is a CPU build.
Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations


def register() -> str | None:
    """Return the platform class's dotted name on a CPU build of vLLM, else None: no change."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from megadiff.rollout.worker.cpu_platform.stubs import install_stubs

    install_stubs()
    return "megadiff.rollout.worker.cpu_platform.platform.CpuOmniPlatform"
