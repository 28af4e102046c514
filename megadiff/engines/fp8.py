"""FP8 matrix products of the VeOmni engine, by torchao: compute only, no weight is stored in FP8.

The linears that ParallelPlan.fp8_weights lists become torchao's Float8Linear. Parameters, their
names and their masters stay: checkpoints, optimizer and replicas see no difference. Each product's
two inputs are cast just before it, e4m3 in forward, and scaled to their largest magnitude:
- tensorwise: of the whole tensor; gradients are e5m2, which has more range and one bit less.
- rowwise: of each row of the left and column of the right factor; gradients are e4m3 too.

A scale is rounded down to a power of two, here as in replicas (rollout/worker/fp8.py). A number
then becomes the same FP8 value whatever shares its scale, down to 1/14336 of the largest one; below
that FP8 has fewer bits. So a sample's velocity hardly depends on its microbatch or the layout, and
trainer and replicas round alike under either scaling. Linears see weights as FSDP2 has gathered
them, so a weight's scale is the same under every layout.

LoRA's own products stay in bfloat16, beside a linear in FP8. Compiled, no gradient of a frozen
weight is computed; eager, torchao computes it and it is dropped.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.plan import (
    FP8_CAPABILITY,
    FP8_MULTIPLE,
    ParallelPlan,
    module_of,
)
from megadiff.process.versions import TORCHAO, check_version
from megadiff.tensors.stored_tensors import listed

if TYPE_CHECKING:  # imported where it is used: a run without FP8 needs no torchao
    from torchao.float8 import Float8LinearConfig

logger = logging.getLogger(__name__)


def check_torchao(config: Config) -> None:
    """Raise ValueError where engine.fp8 lacks torchao 0.18, or a GPU that multiplies in FP8."""
    fp8 = config.engine.fp8
    if fp8 == "none":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            f"engine.fp8={fp8} with engine.backend=veomni needs torchao, which is not installed; "
            f"install torchao=={TORCHAO[0]}, or set engine.fp8=none"
        )
    check_version("torchao", tested=TORCHAO)

    if config.run.device == "cpu" or not torch.cuda.is_available():
        return  # emulated there
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        major, minor = capability
        raise ValueError(
            f"engine.fp8={fp8} needs a GPU of compute capability 8.9 or more, this one has "
            f"{major}.{minor}; set engine.fp8=none"
        )


def check_fp8_fits(config: Config, adapter: ModelAdapter) -> None:
    """Raise ValueError where engine.fp8 is set and a weight of the blocks has a size FP8 refuses.

    Sizes that tensor parallelism makes are parallel/tensor_parallel.py's to check.
    """
    if config.engine.fp8 == "none":
        return

    for component in adapter.components:
        parameters = adapter.empty_transformer(component).named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        odd = []
        for name in adapter.plan.fp8_weights(shapes):
            rows, columns = shapes[name]
            if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
                odd.append(f"{name} {rows} × {columns}")
        if odd:
            raise ValueError(
                f"engine.fp8={config.engine.fp8}: FP8 products need weights whose sizes are "
                f"multiples of {FP8_MULTIPLE}, and {component} has {listed(odd)}; "
                "set engine.fp8=none"
            )


def scaling_config(scaling: str, *, emulate: bool) -> Float8LinearConfig:
    """Return torchao's recipe of that name, with scales that are powers of two.

    The backward of a weight sums over tokens. Where their number is no multiple of 16 torchao pads
    it by zeros, as texts need.
    emulate: multiply the FP8 numbers in float32, as torch's kernels for CPUs take a hundred times
    longer for a tensor's scale.
    """
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(scaling),
        round_scales_to_power_of_2=True,
        pad_inner_dim=True,
        emulate=emulate,
    )


def multiply_in_fp8(
    module: nn.Module, plan: ParallelPlan, *, scaling: str, device: torch.device
) -> None:
    """Replace the blocks' linears by torchao's, in place, with the same parameters.

    module: diffusers' transformer, or a class made from it, before FSDP2 wraps it.
    scaling: tensorwise or rowwise. device: where it will be; on a CPU products are emulated.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    names = plan.fp8_weights(name for name, _ in module.named_parameters())
    linears = {module_of(name) for name in names}
    convert_to_float8_training(
        module,
        config=scaling_config(scaling, emulate=device.type == "cpu"),
        module_filter_fn=lambda _, name: name in linears,
    )

    plain = [name for name in linears if not isinstance(module.get_submodule(name), Float8Linear)]
    assert not plain, f"the plan's columns and rows are nn.Linear, but not {plain[:4]}"
    logger.info("%d linears multiply in FP8, scaled %s", len(linears), scaling)
