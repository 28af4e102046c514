"""Answer what vllm-omni asks of a device, for host memory and plain PyTorch kernels."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import psutil
import torch
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

# How long who reads a queue between server and workers spins after a message, before it waits for
# the next. vLLM's own second takes a core from trainers that share this machine's few.
SPIN_S = 0.01
SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=SPIN_S)


def _always(answer: object) -> Any:
    """Return a class method that gives one answer, whatever it is asked with."""
    return classmethod(lambda cls, *args, **kwargs: answer)


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Run on the CPU. Memory figures are the host's, in bytes.

    torch.cpu lacks the device-memory functions, so each is answered here: vLLM's Platform would
    hand out None for them.
    """

    _omni_enum = OmniPlatformEnum.OOT

    get_diffusion_worker_cls = _always(
        "megadiff.rollout.worker.cpu_platform.worker.CpuDiffusionWorker"
    )
    get_diffusion_attn_backend_cls = _always(
        "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    )
    get_default_stage_config_path = _always("vllm_omni/deploy")
    get_torch_device = _always(torch.device("cpu"))
    # ranks that may share the host; vllm-omni checks world sizes against it
    get_device_count = _always(8)
    supports_torch_inductor = _always(False)
    supports_diffusion_dense_flash_attention = _always(False)
    supports_cpu_offload = _always(False)
    get_device_version = _always(None)
    synchronize = _always(None)
    empty_cache = _always(None)
    reset_peak_memory_stats = _always(None)

    @classmethod
    def get_device_memory(cls, device: object = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_free_memory(cls, device: object = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def memory_reserved(cls, device: object = None) -> int:
        return psutil.Process().memory_info().rss

    # torch's allocator of host memory keeps no peak
    max_memory_allocated = memory_reserved
    max_memory_reserved = memory_reserved
