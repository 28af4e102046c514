"""Rate a step by the model's floating point operations: TFLOP/s, and their share of the peak."""

from __future__ import annotations

from collections.abc import Collection

import torch

# Dense bfloat16 products with float32 sums, TFLOP/s, as NVIDIA's data sheets have them. Of names
# that begin alike the longer one comes first. What a GPU reaches under its power limit is less.
PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GH200": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA L40S": 362.0,
}
# dense FP8 products to bfloat16's, in the same data sheets
FP8_SPEED = 2
STAGES = {"rollout": "time/rollout_s", "train": "time/train_s"}
IMAGES = "perf/images"  # of a step: pictures, frames of videos


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's peak; None for a CPU, or a GPU that the table does not have."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for start, peak in PEAK_TFLOPS.items() if name.startswith(start)), None)


def utilisation(
    metrics: dict[str, float], peak: float | None, *, in_fp8: Collection[str] = ()
) -> dict[str, float]:
    """Return `metrics` with rates in place of a step's work.

    perf/tflop_{rollout,train}: the work of one device, in TFLOP. It becomes perf/tflops_* (a
    second) and, where the peak is known, perf/mfu_* from 0 to 1, of bfloat16's peak. What is
    computed twice, such as activations or old log_probs, is no work of the model and does not
    count. in_fp8: stages that multiply in FP8; they have perf/mfu_fp8_* as well, of FP8's peak.
    perf/tokens_{rollout,train} of all devices become perf/tokens_per_s_*, and perf/images those a
    second of rollout.
    """
    rated = dict(metrics)

    for stage, seconds in STAGES.items():
        work = rated.pop(f"perf/tflop_{stage}", None)
        tokens = rated.pop(f"perf/tokens_{stage}", None)
        if tokens is not None and metrics.get(seconds):
            rated[f"perf/tokens_per_s_{stage}"] = tokens / metrics[seconds]
        if work is None or not metrics.get(seconds):
            continue

        rated[f"perf/tflops_{stage}"] = work / metrics[seconds]
        if peak is not None:
            rated[f"perf/mfu_{stage}"] = work / metrics[seconds] / peak
            if stage in in_fp8:
                rated[f"perf/mfu_fp8_{stage}"] = rated[f"perf/mfu_{stage}"] / FP8_SPEED

    images = rated.pop(IMAGES, None)
    if images is not None and metrics.get(STAGES["rollout"]):
        rated["perf/images_per_s"] = images / metrics[STAGES["rollout"]]
    return rated
