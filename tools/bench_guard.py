"""Guard a step against slower commits: its seconds over those of a plain loop, in one run.

See docs/measuring.md.

    python tools/bench_guard.py [CONFIG.yaml …] [--layers 4] [--steps 3] [--update] [key=value …]

First bench_step.py measures whole steps of the config with so many random blocks. Then the stock
diffusers transformer does the same work in this process, with nothing around it: its forwards, as a
replica batches them, and forward with backward of its microbatches. Blocks are compiled and
activations kept as the config says. Prints

    rollout   seconds of sampling and scoring / seconds of the plain forwards
    train     seconds of training / seconds of the plain forwards and backwards

A ratio hardly depends on the GPU's clock, and names what is ours: text encoder, VAE, transport,
sharding, optimizer. It is compared with the one stored for this GPU in tools/guard.json.
Exit codes: 0 no ratio is more than --tolerance above its stored one; 1 one is, or the run failed;
2 something asked for is wrong, or none is stored for this GPU and these settings. --update stores
them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch._functorch.config
from bench_machine import RECIPE, gpu_name, is_override, tool_parser, with_default
from torch import Tensor, nn

from megadiff.algorithms import build_algorithm
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter
from megadiff.train.components import forwards_per_sample
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.train.sampling import sampling_of
from megadiff.types import DTYPES, Sampling

STORE = Path(__file__).with_name("guard.json")
STAGES = {"rollout": "time/sample_s", "train": "time/train_s"}  # and bench_step.py's names
WARMUP = 3  # calls before those that count: compilation, then the clocks

Ratios = dict[str, float]


def main(argv: list[str]) -> int:
    options, arguments = _parser().parse_known_args(argv)
    configs = with_default(options.config, [RECIPE])
    try:
        config = load_config([*configs, *arguments])
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="bench_guard_", dir=options.scratch) as scratch:
        ours = step_seconds(configs, arguments, options, out=Path(scratch) / "step.json")
        if ours is None:
            return 1
    plain = plain_seconds(config, options, device=_device(config))
    ratios = {stage: ours[key] / plain[stage] for stage, key in STAGES.items()}

    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    key = settings(configs, arguments, num_layers=options.layers)
    sys.stdout.write(table(ours, plain, ratios, stored.get(key, {})))
    if options.update:
        stored[key] = {stage: round(ratio, 3) for stage, ratio in ratios.items()}
        STORE.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return 0
    if key not in stored:
        sys.stderr.write(f"error: {STORE.name} has nothing for {key!r}; store it with --update\n")
        return 2
    slower = found_slower(ratios, stored[key], tolerance=options.tolerance)
    sys.stderr.write("".join(f"error: {line}\n" for line in slower))
    return int(bool(slower))


def settings(configs: list[str], arguments: list[str], *, num_layers: int) -> str:
    """Return the key of stored ratios: what was measured, and on what. Folders do not count."""
    names = [Path(config).name for config in configs if not is_override(config)]
    overrides = [*filter(is_override, configs), *arguments]
    kept = [text for text in overrides if not text.startswith("model.path=")]
    return " · ".join([gpu_name(), *names, f"{num_layers} blocks", *kept])


def found_slower(ratios: Ratios, stored: Mapping[str, float], *, tolerance: float) -> list[str]:
    """Return a line for each ratio that is above its stored one by more than the tolerance."""
    return [
        f"{stage} takes {ratio:.3f} of the plain loop's time, stored is {stored[stage]:.3f}: "
        f"{ratio / stored[stage] - 1:+.1%}, allowed {tolerance:+.0%}"
        for stage, ratio in ratios.items()
        if ratio > stored[stage] * (1 + tolerance)
    ]


def table(
    ours: Mapping[str, float],
    plain: Mapping[str, float],
    ratios: Ratios,
    stored: Mapping[str, float],
) -> str:
    """Return markdown: a row a stage."""
    lines = ["| stage | ours s | plain s | ratio | stored |", "|---|---|---|---|---|"]
    for stage, key in STAGES.items():
        before = f"{stored[stage]:.3f}" if stage in stored else "–"
        lines.append(
            f"| {stage} | {ours[key]:.3f} | {plain[stage]:.3f} | {ratios[stage]:.3f} | {before} |"
        )
    return "\n".join(lines) + "\n"


def step_seconds(
    configs: list[str], arguments: list[str], options: argparse.Namespace, *, out: Path
) -> dict[str, float] | None:
    """Return bench_step.py's median seconds by stage; None where it failed and said why."""
    command = [sys.executable, str(Path(__file__).with_name("bench_step.py")), *configs]
    command += [f"--steps={options.steps}", "--warmup=2", f"--layers={options.layers}"]
    command += [f"--text-layers={options.text_layers}", f"--out={out}"]
    command += [f"--text-tokens={options.text_tokens}"]
    command += [f"--scratch={options.scratch}"] if options.scratch else []
    if subprocess.run([*command, *arguments], check=False).returncode:
        return None
    return json.loads(out.read_text())["seconds"]


def plain_seconds(config: Config, options: argparse.Namespace, *, device: str) -> Ratios:
    """Return stage → seconds that the stock transformer needs for a step's passes.

    Weights are random, in model.dtype for both stages, and nothing is sharded or updated.
    """
    adapter = build_adapter(Path(config.model.path), config.model.family)
    algorithm = build_algorithm(config.algorithm)
    groups = config.train.prompts_per_step
    samples = groups * config.algorithm.group_size
    forwards = samples * forwards_per_sample(config, adapter)
    rows = groups * rows_per_group(config, algorithm)
    batch, micro = config.rollout.batch_size, config.train.microbatch_size
    transformer = plain_transformer(config, adapter, num_layers=options.layers, device=device)

    def velocity(num_rows: int, sampling: Sampling) -> Callable[[], Tensor]:
        return one_velocity(
            transformer, adapter, sampling, num_rows=num_rows, num_tokens=options.text_tokens
        )

    forward = velocity(batch, sampling_of(config.rollout))
    backward = velocity(micro, train_sampling(config, algorithm))

    def without_gradient() -> None:
        with torch.no_grad():
            forward()

    def with_gradient() -> None:
        backward().square().mean().backward()
        transformer.zero_grad(set_to_none=False)

    calls = options.calls
    return {
        "rollout": forwards / batch * seconds_a_call(without_gradient, calls, device=device),
        "train": rows / micro * seconds_a_call(with_gradient, calls, device=device),
    }


def plain_transformer(
    config: Config, adapter: ModelAdapter, *, num_layers: int, device: str
) -> nn.Module:
    """Return diffusers' own module with random weights, its blocks compiled if the engine's are."""
    component = adapter.components[0]
    stock = adapter.module_class()
    shape = dict(stock.load_config(Path(config.model.path) / component))
    if num_layers:
        shape["num_layers" if "num_layers" in shape else "n_layers"] = num_layers
    torch.manual_seed(0)
    with torch.device(device):
        transformer = stock.from_config(shape).to(DTYPES[config.model.dtype])
    if config.engine.compile:
        torch._functorch.config.activation_memory_budget = config.engine.activation_memory_budget
        for name, module in transformer.named_modules():
            if adapter.plan.is_block(name):
                module.compile(dynamic=False)
    else:
        transformer.enable_gradient_checkpointing()
    return transformer.train()


def one_velocity(
    transformer: nn.Module,
    adapter: ModelAdapter,
    sampling: Sampling,
    *,
    num_rows: int,
    num_tokens: int,
) -> Callable[[], Tensor]:
    """Return a call of the adapter's velocity on num_rows rows of noise."""
    parameter = next(transformer.parameters())
    latents = torch.randn(num_rows, *adapter.latents_shape(sampling), device=parameter.device)
    sigma = torch.full((num_rows,), 0.5, device=parameter.device)
    text = adapter.blank_text(num_tokens)
    if adapter.is_guided(sampling):
        text |= {f"negative_{name}": value for name, value in text.items()}
    conditioning = {
        name: value.expand(num_rows, *value.shape[1:]).to(parameter.device)
        if value.is_floating_point()
        else value.expand(num_rows, *value.shape[1:])
        for name, value in text.items()
    }

    def call() -> Tensor:
        return adapter.velocity(
            transformer, latents, sigma, conditioning, sampling, component=adapter.components[0]
        )

    return call


def seconds_a_call(call: Callable[[], None], calls: int, *, device: str) -> float:
    """Return the mean seconds of so many calls, after a warm-up."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = math.nan
    for count in (WARMUP, calls):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        seconds = (time.perf_counter() - start) / count
    return seconds


def _device(config: Config) -> str:
    return "cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("config", nargs="*", help="yaml files, and key=value after the options")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the transformer")
    parser.add_argument("--text-layers", type=int, default=2, help="of the text encoder")
    parser.add_argument("--text-tokens", type=int, default=64, help="of a prompt")
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--calls", type=int, default=20, help="of the plain loop, of each kind")
    parser.add_argument("--tolerance", type=float, default=0.03, help="share that may be slower")
    parser.add_argument("--update", action="store_true", help="store the ratios for this GPU")
    parser.add_argument("--scratch", help="folder with room for the weights")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
