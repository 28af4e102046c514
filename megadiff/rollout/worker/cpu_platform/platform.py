"""The CPU platform: what vllm-omni asks of a device, answered for host memory and plain PyTorch kernels."""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Memory figures are the host's, in bytes. torch.cpu lacks the device-memory functions, so each is answered here
    (vLLM's Platform would otherwise hand out None for them)."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "megadiff.rollout.worker.cpu_platform.worker.CpuDiffusionWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: object, **kwargs: object) -> str:
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 8  # ranks that may share the host; vllm-omni checks world sizes against it

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls, device: object = None) -> None:
        pass

    @classmethod
    def get_free_memory(cls, device: object = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_device_memory(cls, device: object = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def max_memory_allocated(cls, device: object = None) -> int:
        return psutil.Process().memory_info().rss

    @classmethod
    def max_memory_reserved(cls, device: object = None) -> int:
        return psutil.Process().memory_info().rss

    @classmethod
    def memory_reserved(cls, device: object = None) -> int:
        return psutil.Process().memory_info().rss
