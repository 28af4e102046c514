"""Tensor parallelism under NCCL, in bfloat16 and FP8, at the real width of Qwen-Image: against
float32, unsharded.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.tensors.shards import Shard
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(height=272, width=256, num_inference_steps=4)  # 17 × 16 latent tokens
TEXT_LENGTHS = (19, 33)
MOST_FP8_ERROR = (
    0.1  # of velocity and gradient, relative to their norm: FP8 keeps 2 or 3 bits of mantissa
)


def test_bfloat16_under_nccl_is_no_worse_than_unsharded(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} visible")
    errors = _errors(tmp_path, world_size=2, fp8="")
    for kind in ("velocity", "gradient", "worst_gradient"):
        assert 0 < errors["sharded"][kind] <= 1.25 * errors["unsharded"][kind], errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp8_stays_close(tmp_path, world_size):
    if not importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is not installed")
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, {torch.cuda.device_count()} visible")
    errors = _errors(tmp_path, world_size=world_size, fp8="tensorwise")
    for kind in (
        "velocity",
        "gradient",
    ):  # FP8 emulated on a CPU: 1.7 and 2.5 times the error of bfloat16
        assert 1.2 * errors["unsharded"][kind] < errors["sharded"][kind] < MOST_FP8_ERROR, errors


def _errors(folder: Path, *, world_size: int, fp8: str) -> dict[str, dict[str, float]]:
    """Relative to the unsharded float32 model: of the unsharded one in bfloat16, and of the
    sharded.
    """
    from random_weights import write_random_transformer

    write_random_transformer(
        ROOT / "assets" / "qwen_image", folder / "model", device="cuda", num_layers=2
    )
    run_ranks(measure, world_size, folder, "cuda", fp8, start_method="spawn")
    errors = json.loads((folder / "errors.json").read_text())
    print(json.dumps({"world_size": world_size, "fp8": fp8, **errors}))
    return errors


def measure(folder: Path, device: str, fp8: str) -> None:
    """On every rank of a tensor-parallel world; rank 0 writes errors.json."""
    from megadiff.parallel.mesh import world_size_from_env

    world_size = world_size_from_env()
    mesh = init_mesh(
        resolve_layout(dp=0, sp=1, tp=world_size, dp_replicate=1, world_size=world_size), device
    )
    adapter = QwenImageAdapter(folder / "model")
    stock = QwenImageTransformer2DModel.from_pretrained(
        folder / "model" / "transformer", torch_dtype=torch.float32, low_cpu_mem_usage=False
    ).to(mesh.device)
    exact = _velocity_and_gradients(stock, adapter, mesh)
    unsharded = _velocity_and_gradients(stock.to(torch.bfloat16), adapter, mesh)
    del stock
    sharded = _velocity_and_gradients(_sharded(adapter, mesh, fp8), adapter, mesh)
    if mesh.rank == 0:
        errors = {"unsharded": _compared(unsharded, exact), "sharded": _compared(sharded, exact)}
        (folder / "errors.json").write_text(json.dumps(errors))
    torch.distributed.barrier()


def _sharded(adapter: QwenImageAdapter, mesh: Mesh, fp8: str) -> nn.Module:
    from megadiff.parallel.tensor_parallel import init_parallel_state, parallelize

    init_parallel_state(mesh)
    module = parallelize(
        adapter.empty_transformer(),
        adapter.plan,
        mesh=mesh,
        attention=adapter.attention,
        dtype=torch.bfloat16,
        activation_memory_budget=0,
        fp8=fp8,
    )
    source = SourceFolder(adapter.model_folder / "transformer")
    for name, parameter in module.named_parameters():
        place = parameter.placement
        source.read_into(
            name, Shard(local=parameter.detach(), offsets=place.offsets, shape=place.shape)
        )
    return module


def _velocity_and_gradients(
    module: nn.Module, adapter: QwenImageAdapter, mesh: Mesh
) -> dict[str, Tensor]:
    """On the CPU, in float32: the velocity, and the whole gradient of every parameter that has
    one.
    """
    generator = torch.Generator().manual_seed(1)
    num_tokens, channels = adapter.latents_shape(SAMPLING)
    draw = [
        torch.randn(2, num_tokens, channels, generator=generator).to(mesh.device) for _ in range(2)
    ]
    embeds_BTD = torch.randn(2, max(TEXT_LENGTHS), 3584, generator=generator)
    mask_BT = torch.arange(max(TEXT_LENGTHS)) < torch.tensor(TEXT_LENGTHS)[:, None]
    conditioning = {"prompt_embeds": embeds_BTD, "prompt_mask": mask_BT}
    module.zero_grad()
    velocity_BLC = adapter.velocity(
        module, draw[0], torch.tensor([0.9, 0.4]), conditioning, SAMPLING
    )
    (velocity_BLC * draw[1]).mean().backward()
    found = {"velocity": velocity_BLC.detach().float().cpu()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[name] = _whole(parameter, mesh).to("cpu", torch.float32, copy=True)
    return found


def _whole(parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    gradient, place = parameter.grad, getattr(parameter, "placement", None)
    if place is None or mesh.tp == 1:
        return gradient
    if place.sharded_dim is None:
        if place.sum_over_tp:
            torch.distributed.all_reduce(gradient)
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(mesh.tp)]
    torch.distributed.all_gather(parts, gradient.contiguous())
    return torch.cat(parts, place.sharded_dim)


def _compared(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Errors relative to the norm: of the velocity, of all gradients together, and the worst of
    those of one weight.
    """
    names = [name for name in exact if name != "velocity"]
    largest = max(float(exact[name].norm()) for name in names)
    squares = {name: float((found[name] - exact[name]).norm()) for name in names}
    whole = sum(float(exact[name].norm()) ** 2 for name in names) ** 0.5
    return {
        "velocity": float(
            (found["velocity"] - exact["velocity"]).norm() / exact["velocity"].norm()
        ),
        "gradient": sum(value**2 for value in squares.values()) ** 0.5 / whole,
        "worst_gradient": max(
            squares[name] / max(float(exact[name].norm()), 1e-3 * largest) for name in names
        ),
    }
