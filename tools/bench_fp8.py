"""Train the same blocks in bfloat16 and in FP8, and compare losses and gradients.

See docs/performance.md.

    python tools/bench_fp8.py [CONFIG.yaml …] [--layers 4] [--updates 200] [--every 50] \\
        [--fp8 tensorwise rowwise] [key=value …]

Every run begins with the same random weights at the model's full width and sees the same batches:
flow matching on --captions random images, each with its own random text. It makes --updates
updates through the VeOmni engine as a run would: FSDP2, recomputation and compilation as the config
has them. After every --every updates the gradient of one more batch is taken twice at the weights
of then, by FP8 products and by bfloat16's, and their cosine and ratio of norms are printed. Prints
a table and one JSON line a run: loss of the first and last --every updates, cosines, median seconds
of an update. Without a GPU it runs on the CPU (give --model a tiny pipeline folder).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_machine import RECIPE, machine, tool_parser, with_default
from random_weights import transformer_with_weights
from torch import Tensor, nn

from megadiff.algorithms.flow_matching import flow_matching
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.train.sampling import sampling_of
from megadiff.types import FlowBatch

LOSS = "loss/flow_matching"
SPREAD = 0.1  # of the images of one caption around their mean
PROBE = 10**6  # the number of the batch that gradients are compared on, beyond any update's


@dataclass(frozen=True, kw_only=True)
class Images:
    """Draw batches: rows of random captions, each an image near its caption's own."""

    config: Config
    adapter: ModelAdapter
    rows: int
    captions: int
    text_tokens: int

    def batch(self, number: int) -> FlowBatch:
        """Return the batch of that number, the same for every run."""
        sampling = sampling_of(self.config.rollout)
        shape = self.adapter.latents_shape(sampling)
        fixed = torch.Generator().manual_seed(0)
        mean_PLC = torch.randn(self.captions, *shape, generator=fixed)
        conditioning = {
            name: value.expand(self.captions, *value.shape[1:])
            if value.dtype == torch.bool
            else torch.randn(self.captions, *value.shape[1:], generator=fixed)
            for name, value in self.adapter.blank_text(self.text_tokens).items()
        }

        drawn = torch.Generator().manual_seed(1 + number)
        caption_N = torch.randint(self.captions, (self.rows,), generator=drawn)
        deviation_NLC = torch.randn(self.rows, *shape, generator=drawn)
        return FlowBatch(
            latents_NLC=mean_PLC[caption_N] + SPREAD * deviation_NLC,
            noise_NLC=torch.randn(self.rows, *shape, generator=drawn),
            # above 0, where a row has no noise
            sigma_N=torch.rand(self.rows, generator=drawn).clamp_min(0.01),
            advantages_N=torch.ones(self.rows),
            weights_N=torch.ones(self.rows),
            group_index_N=caption_N,
            conditioning=conditioning,
            sampling=sampling,
            denominator=float(self.rows),
        )


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    configs = with_default(options.config, [RECIPE])
    with tempfile.TemporaryDirectory(prefix="bench_fp8_", dir=options.scratch) as scratch:
        model, _ = transformer_with_weights(options.model, Path(scratch), num_layers=options.layers)
        print(json.dumps(machine()), flush=True)

        reports = []
        for fp8 in ("none", *options.fp8):
            arguments = [*configs, f"model.path={model}", f"engine.fp8={fp8}", "run.name=bench"]
            reports.append(measure(load_config(arguments), options))
            print(json.dumps(reports[-1]), flush=True)
    print(table(reports))
    return 0


def measure(config: Config, options: argparse.Namespace) -> dict:
    """Train one engine from the model folder's weights."""
    mesh = init_mesh(
        resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1), config.run.device
    )
    adapter = build_adapter(Path(config.model.path), config.model.family)
    images = Images(
        config=config,
        adapter=adapter,
        rows=options.rows,
        captions=options.captions,
        text_tokens=options.text_tokens,
    )
    engine = build_engine(config, mesh, adapter)

    losses: list[float] = []
    seconds: list[float] = []
    cosines: dict[int, float] = {}
    ratios: dict[int, float] = {}
    for update in range(options.updates + 1):
        if config.engine.fp8 != "none" and update % options.every == 0:
            cosines[update], ratios[update] = compare_gradients(engine, images.batch(PROBE))
        if update == options.updates:
            break
        batch = images.batch(update)
        start = time.perf_counter()
        # it reads the gradient's norm, so the device has come up to there
        losses.append(engine.update(batch, flow_matching)[LOSS])
        seconds.append(time.perf_counter() - start)

    del engine
    gc.collect()  # the next engine needs the memory
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "fp8": config.engine.fp8,
        "loss_first": statistics.fmean(losses[: options.every]),
        "loss_last": statistics.fmean(losses[-options.every :]),
        "gradient_cosine": cosines,
        "gradient_norm_ratio": ratios,
        "update_s": round(statistics.median(seconds), 4),
        "losses": [round(loss, 6) for loss in losses],
    }


def compare_gradients(engine: Engine, batch: FlowBatch) -> tuple[float, float]:
    """Return cosine and ratio of norms of the gradient by FP8 and by engine.dtype."""
    fp8 = gradient(engine, batch)
    (member,) = engine.members.values()
    with without_fp8(member.transformer):
        plain = gradient(engine, batch)

    def dot(first: list[Tensor], second: list[Tensor]) -> float:
        pairs = zip(first, second, strict=True)
        return sum(float((one.double() * other.double()).sum()) for one, other in pairs)

    of_fp8 = dot(fp8, fp8) ** 0.5
    of_plain = dot(plain, plain) ** 0.5
    return dot(fp8, plain) / (of_fp8 * of_plain), of_fp8 / of_plain


def gradient(engine: Engine, batch: FlowBatch) -> list[Tensor]:
    """Return the gradient of every weight, without an optimizer step."""
    (member,) = engine.members.values()
    rows = engine._component_rows(batch)[member.component]
    try:
        with member._in_use():
            member._backward(batch, flow_matching, rows, 1 / batch.denominator)
            return [gradient.clone() for gradient in member._reduced_gradients().values()]
    finally:
        member._drop_gradients()


@contextmanager
def without_fp8(module: nn.Module) -> Iterator[None]:
    """Make torchao's linears plain ones within the context. Compiled code sees their class."""
    from torchao.float8.float8_linear import Float8Linear

    linears = [linear for linear in module.modules() if isinstance(linear, Float8Linear)]
    for linear in linears:
        linear.__class__ = nn.Linear  # type: ignore[assignment]  # it has the same parameters
    try:
        yield
    finally:
        for linear in linears:
            linear.__class__ = Float8Linear


def table(reports: list[dict]) -> str:
    """Return markdown: a row a run."""
    lines = [
        "| engine.fp8 | loss at first | at last | cosine of the gradients, lowest | update s |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        cosine = min(report["gradient_cosine"].values(), default=1.0)
        lines.append(
            f"| {report['fp8']} | {report['loss_first']:.4f} | {report['loss_last']:.4f} | "
            f"{cosine:.4f} | {report['update_s']:.3f} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "config", nargs="*", help=f"yaml files and key=value overrides (default {RECIPE})"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("assets/qwen_image"), help="config files are enough"
    )
    parser.add_argument("--layers", type=int, default=4, help="blocks; 0: the model's own")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="updates between two comparisons")
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--captions", type=int, default=16)
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument(
        "--fp8", nargs="*", default=["tensorwise", "rowwise"], help="beside bfloat16"
    )
    parser.add_argument("--scratch", type=Path, help="folder for the random weights")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
