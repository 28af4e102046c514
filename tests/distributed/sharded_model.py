"""A model under tensor parallelism, sequence parallelism and Ulysses, compared with what it answers
unsharded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megadiff.diffusion import sde
from megadiff.engines.compiling import compile_blocks
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.tensors.shards import Shard
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks

# Of outputs, and of gradients. CPUs differ in float32. So a tensor may be off by as much more as it
# is on this machine when the unsharded model computes its samples one at a time, up to twice this.
TOLERANCES = {torch.float32: (2e-6, 5e-6), torch.float64: (1e-12, 1e-12)}
# They are relative to a tensor's largest element; of gradients, to at least this share of the
# largest of all, as some are zero (the last block's text queries, which nobody reads).
FLOOR = 1e-4
GRADIENT = "gradient/"  # before the names of weights
NUM_SAMPLES = 4
SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
STEPS = torch.tensor([0, 1, 2, 1])  # of the samples
SAMPLING = Sampling(height=32, width=32, num_inference_steps=4)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Of some of NUM_SAMPLES samples, the same numbers in every dtype.

    weight_BLC: of a weighted sum of outputs.
    """

    latents_BLC: Tensor
    prev_BLC: Tensor
    weight_BLC: Tensor
    sigma_B: Tensor
    sigma_next_B: Tensor

    def log_probs(self, velocity_BLC: Tensor) -> Tensor:
        """Of prev_BLC, [B]."""
        step = sde.SdeStep(SAMPLING, SIGMAS, self.sigma_B, self.sigma_next_B)
        mean_BLC = sde.step_mean(step, self.latents_BLC, velocity_BLC)
        return sde.log_prob(step, self.prev_BLC, mean_BLC)


def draw_inputs(shape: tuple[int, int], *, dtype: torch.dtype, samples: slice) -> Inputs:
    """shape: of one sample's latents."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64)[
            samples
        ].to(dtype)

    latents_BLC, prev_BLC, weight_BLC = (draw(*shape) for _ in range(3))
    return Inputs(
        latents_BLC=latents_BLC,
        prev_BLC=prev_BLC,
        weight_BLC=weight_BLC,
        sigma_B=SIGMAS[STEPS][samples],
        sigma_next_B=SIGMAS[STEPS + 1][samples],
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """dp is what the world leaves. budget, num_microbatches: how the gradient is computed.

    compiled: each block, in one graph, which then has the budget, or in several.
    """

    tp: int = 1
    sp: int = 1
    sequence_parallel: bool = True
    budget: float = 0.0
    num_microbatches: int = 1
    compiled: bool = False
    in_one_graph: bool = True


class Result(Protocol):
    def __call__(
        self,
        transformer: nn.Module,
        adapter: ModelAdapter,
        dtype: torch.dtype,
        samples: slice,
        *,
        backward: bool = True,
    ) -> dict[str, Tensor]:
        """Outputs and `log_prob` of the samples; backward adds the gradient of a sum of all to the
        weights.
        """


@dataclass(frozen=True, kw_only=True)
class Case:
    """adapter: of a pipeline folder. A log_prob is of float32 velocities always."""

    adapter: Callable[[Path], ModelAdapter]
    result: Result


def write_references(
    transformer: nn.Module, case: Case, folder: Path, *, dtypes: list[torch.dtype]
) -> None:
    """What the module answers unsharded, and its gradients: folder/reference_DTYPE.safetensors.

    `rounding/NAME`: how far each is off, relatively, when samples are computed one at a time.
    """
    for dtype in dtypes:
        transformer = transformer.to(dtype)
        reference = _unsharded(transformer, case, folder, dtype, [slice(0, NUM_SAMPLES)])
        single = [slice(sample, sample + 1) for sample in range(NUM_SAMPLES)]
        again = _unsharded(transformer, case, folder, dtype, single)
        floor = _floor(reference)
        rounding = {
            f"rounding/{name}": torch.tensor(_relative_error(again[name], expected, floor))
            for name, expected in reference.items()
        }
        save_file(reference | rounding, _reference_file(folder, dtype))


def _unsharded(
    transformer: nn.Module, case: Case, folder: Path, dtype: torch.dtype, parts: list[slice]
) -> dict[str, Tensor]:
    """Outputs and `log_prob` of all samples, and `gradient/NAME` of each weight.

    parts: the samples that are computed at once.
    """
    results = [case.result(transformer, case.adapter(folder), dtype, part) for part in parts]
    outputs = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    gradients = {
        f"{GRADIENT}{name}": p.grad.clone()
        for name, p in transformer.named_parameters()
        if p.grad is not None
    }
    transformer.zero_grad()
    return outputs | gradients


def _floor(reference: Mapping[str, Tensor]) -> float:
    return FLOOR * max(
        float(value.abs().max()) for name, value in reference.items() if name.startswith(GRADIENT)
    )


def _relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """floor: the least that an error is relative to."""
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), floor)


def tolerance(reference: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> float:
    """name: of an output, or `gradient/NAME`."""
    outputs, gradients = TOLERANCES[torch.float32 if name == "log_prob" else dtype]
    rounding = float(reference[f"rounding/{name}"])
    limit = gradients if name.startswith(GRADIENT) else outputs
    return limit + min(rounding, limit)


def check_parity(
    case: Case, pipeline: Path, layouts: list[Layout], dtypes: list[torch.dtype], world_size: int
) -> None:
    run_ranks(_parity_worker, world_size, case, pipeline, layouts, dtypes)


def _parity_worker(
    case: Case, pipeline: Path, layouts: list[Layout], dtypes: list[torch.dtype]
) -> None:
    for layout in layouts:
        for dtype in dtypes:
            with Ranks(case, pipeline, layout, dtype) as ranks:
                ranks.check_result()
                wrong = ranks.wrong_gradients()
                assert not wrong, f"{layout}, {dtype}: {wrong}"


def check_veomni(case: Case, pipeline: Path, sp: int) -> None:
    """On each rank: the module of the real VeOmni engine, FSDP2 over dp and sp."""
    from tests.distributed.engines import build

    engine = build(pipeline, {"sp": sp}, backend="veomni", adapter=case.adapter(pipeline))
    member = engine.members["transformer"]
    size = NUM_SAMPLES // engine.mesh.dp
    samples = slice(engine.mesh.dp_rank * size, (engine.mesh.dp_rank + 1) * size)
    reference = load_file(_reference_file(pipeline, torch.float32))

    result = case.result(member.transformer, engine.adapter, torch.float32, samples)
    for name, value in result.items():
        expected = reference[name][samples]
        error = _relative_error(value, expected)
        limit = tolerance(reference, name, torch.float32)
        assert error <= limit, f"sp={sp}: {name} differs by {error} > {limit}"

    # FSDP2 averages over its ranks what each has of its samples and tokens
    gradients = {
        f"{GRADIENT}{name}": parameter.grad.full_tensor() * member.gradient_scale
        for name, parameter in member.transformer.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == {name for name in reference if name.startswith(GRADIENT)}
    floor = _floor(reference)
    for name, gradient in gradients.items():
        error = _relative_error(gradient, reference[name], floor)
        limit = tolerance(reference, name, torch.float32)
        assert error <= limit, f"sp={sp}: {name} differs by {error} > {limit}"


class Ranks:
    """This rank's part of the model under a layout, and its result.

    A context; collective over the world.
    """

    def __init__(self, case: Case, pipeline: Path, layout: Layout, dtype: torch.dtype) -> None:
        self.case, self.layout, self.dtype = case, layout, dtype
        self.adapter = case.adapter(pipeline)
        self.source = SourceFolder(pipeline / "transformer")
        self.reference = load_file(_reference_file(pipeline, dtype))

    def __enter__(self) -> Ranks:
        from megadiff.parallel.tensor_parallel import init_parallel_state, parallelize

        layout = self.layout
        sizes = resolve_layout(
            dp=0, sp=layout.sp, tp=layout.tp, dp_replicate=1, world_size=world_size()
        )
        mesh = init_mesh(sizes, "cpu")
        init_parallel_state(mesh)
        self.module = parallelize(
            self.adapter.empty_transformer(),
            self.adapter.plan,
            mesh=mesh,
            attention=self.adapter.attention,
            dtype=self.dtype,
            sequence_parallel=layout.sequence_parallel,
            activation_memory_budget=1.0 if self._within_blocks else layout.budget,
            compile_blocks=self._compile_blocks if layout.compiled else None,
        )
        size = NUM_SAMPLES // mesh.dp
        self.samples = range(mesh.dp_rank * size, (mesh.dp_rank + 1) * size)
        self.parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            self.source.read_constants(self.module, self.adapter.plan.constants)
            for name, p in self.parameters.items():
                self.source.read_into(
                    name, Shard(local=p, offsets=p.placement.offsets, shape=p.placement.shape)
                )
        return self

    def __exit__(self, *error: object) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    @property
    def _within_blocks(self) -> bool:
        return self.layout.compiled and self.layout.in_one_graph

    def _compile_blocks(self, module: nn.Module) -> None:
        plan = self.adapter.plan
        compile_blocks(
            module,
            plan,
            microbatch_size=NUM_SAMPLES,
            budget=self.layout.budget if self._within_blocks else 1.0,
            in_one_graph=self.layout.in_one_graph,
        )

    def check_result(
        self, without: Callable[[nn.Module], AbstractContextManager] = nullcontext
    ) -> None:
        """Outputs and log_probs of this rank's samples, with and without gradient; leaves
        gradients, summed.
        """
        from megatron.core import parallel_state

        from megadiff.parallel import regions

        size = len(self.samples) // min(self.layout.num_microbatches, len(self.samples))
        pieces = [
            slice(first, first + size)
            for first in range(self.samples.start, self.samples.stop, size)
        ]
        with without(self.module):
            for piece in pieces:
                found = self.case.result(self.module, self.adapter, self.dtype, piece)
                for name, value in found.items():
                    self._check_close(value, self.reference[name][piece], name)
            with torch.no_grad():
                silent = self.case.result(
                    self.module, self.adapter, self.dtype, piece, backward=False
                )
            for name, value in found.items():
                if self.layout.compiled:  # other code, which may add up in another order
                    self._check_close(silent[name], self.reference[name][piece], name)
                else:
                    assert torch.equal(value, silent[name])
            group = parallel_state.get_tensor_model_parallel_group()
            regions.sum_over_tp(self.parameters.values(), group)
            for p in self.parameters.values():
                if p.grad is not None:
                    sum_over_data_parallel(p.grad)

    def wrong_gradients(self) -> dict[str, float]:
        """name → relative error, of those above the tolerance on any rank."""
        trained = {name for name, p in self.parameters.items() if p.requires_grad}
        assert {f"{GRADIENT}{name}" for name in trained} == {
            name for name in self.reference if name.startswith(GRADIENT)
        }
        floor = _floor(self.reference)
        errors = {}
        for name in sorted(trained):
            full, p = self.reference[f"{GRADIENT}{name}"], self.parameters[name]
            place = tuple(
                slice(at, at + size) for at, size in zip(p.placement.offsets, p.shape, strict=True)
            )
            scale = max(float(full.abs().max()), floor)
            errors[name] = float((p.grad - full[place]).abs().max()) / scale
        worst = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return {
            name: error
            for name, error in zip(errors, worst.tolist(), strict=True)
            if not error <= tolerance(self.reference, f"{GRADIENT}{name}", self.dtype)
        }

    def _check_close(self, found: Tensor, expected: Tensor, name: str) -> None:
        limit = tolerance(self.reference, name, self.dtype)
        error = _relative_error(found, expected)
        assert error <= limit, f"{self.layout}: {name} differs by {error} > {limit}"


def sum_over_data_parallel(gradient: Tensor) -> None:
    from megatron.core import parallel_state

    dist.all_reduce(
        gradient, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _reference_file(folder: Path, dtype: torch.dtype) -> Path:
    return folder / f"reference_{str(dtype).removeprefix('torch.')}.safetensors"
