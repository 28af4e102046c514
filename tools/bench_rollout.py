"""Images a second of rollout and of plain sampling, on one GPU, in one run.

See docs/performance.md.

    python tools/bench_rollout.py [--images 16] [--size 512] [--steps 10] [--true-cfg-scale 1]
        [--replicas eager compiled fp8] [--ways images rollout …] [--same-noise] [--out FILE.json]

The same images by every way: `diffusers` (its own pipeline, eager, all images in one call),
`images` (the replica's OpenAI route, as many images a request as it takes), `images, one a request`
(as many requests at once as it takes), and `rollout` (what training uses: one call, with latents,
log_probs and pixels back in this process). --replicas: one that is eager, one with compiled blocks,
one that is compiled and multiplies in FP8. --ways: some of them only. Medians of --repeat calls
after a first one that is told apart. --same-noise: also a rollout whose samples share their noise,
and so their steps before the window. Calls take the window's places in turn; `forwards` is the
mean. Prints a line of JSON for each, a table with ratios to
`images`, and writes all to --out. A model folder that holds configs only is filled with random
weights in --scratch.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from bench_machine import add_depths, cpu_name, tool_parser, versions, visible_gpus
from bench_replica import served_model, start_replica
from diffusers import DiffusionPipeline

from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.processes import environment_token
from megadiff.rollout.limits import Limits
from megadiff.types import DTYPES, Prompt, RolloutRequest, Sampling

PROMPT = "a red star left of a blue circle in the sky"
LIMITS = Limits()  # of the replicas that are started here
WINDOW = (2, (0, 5))  # size and range, in steps
SAME_NOISE = "rollout, same noise"
WAYS = ("diffusers", "images", "images, one a request", "rollout")
REPLICAS = {"eager": {}, "compiled": {"compile": True}, "fp8": {"compile": True, "fp8": True}}


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if {"images", "images, one a request"} & set(options.ways):
        try:
            images_a_request(options.size, options.steps)
        except ValueError as error:
            parser.error(str(error))
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {
        "command": shlex.join(["python", "tools/bench_rollout.py", *argv]),
        "gpu": (visible_gpus() or [(0, None)])[0][1],
        "cpu": cpu_name(),
        "versions": versions(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="bench_rollout_", dir=options.scratch) as folder:
        scratch = Path(folder)
        layers = {"layers": options.layers, "text_layers": options.text_layers}
        model = served_model(options.model, scratch, device=device, **layers)
        for name, seconds, forwards in _measured(model, scratch, device, options):
            row = {
                "way": name,
                "first_s": round(seconds[0], 3),
                "s": round(statistics.median(seconds[1:]), 3),
            }
            if forwards:
                row["forwards"] = statistics.fmean(forwards[1:])
            row["images_per_s"] = round(options.images / row["s"], 3)
            row["sample_steps_per_s"] = round(options.images * options.steps / row["s"], 2)
            report["rows"].append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    sys.stdout.write(table(report["rows"]))
    return 0


def table(rows: list[dict]) -> str:
    """Return a markdown table, a line for each way.

    The ratio is to plain images of the same replica, or the eager one's for diffusers; - where they
    were not measured.
    """
    speed = {row["way"]: row["images_per_s"] for row in rows}
    lines = ["", "| way | s | images/s | sample-steps/s | of `images` |", "|---|---|---|---|---|"]
    for row in rows:
        kind = next((kind for kind in REPLICAS if row["way"].endswith(f", {kind}")), "")
        plain = speed.get(f"images, {kind}" if kind else "images")
        ratio = f"{row['images_per_s'] / plain:.2f}" if plain else "-"
        cells = [row["way"], row["s"], row["images_per_s"], row["sample_steps_per_s"], ratio]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _measured(
    model: Path, scratch: Path, device: str, options: argparse.Namespace
) -> Iterator[tuple[str, list[float], list[int]]]:
    """Yield (way, seconds of each call, forwards of each where it is a rollout).

    The GPU holds one model at a time.
    """
    if "diffusers" in options.ways:
        yield "diffusers", _diffusers(model, device, options), []
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for kind in options.replicas:
        with ExitStack() as stack:
            how = {
                "dtype": options.dtype,
                "device": device,
                "gpus": (options.gpu,),
                **REPLICAS[kind],
            }
            _, client = start_replica(model, scratch / kind, stack, **how)
            ways = {
                "images": lambda _, client=client: _images(client, _full(options), options),
                "images, one a request": lambda _, client=client: _images(
                    client, [1] * options.images, options
                ),
            }
            suffix = "" if kind == "eager" else f", {kind}"
            for name in [name for name in ways if name in options.ways]:
                yield name + suffix, _timed(ways[name], options.repeat), []
            if "rollout" in options.ways:
                yield "rollout" + suffix, *_rollouts(client, options, same_noise=False)
            if options.same_noise:
                yield SAME_NOISE + suffix, *_rollouts(client, options, same_noise=True)


def _diffusers(model: Path, device: str, options: argparse.Namespace) -> list[float]:
    where = f"cuda:{options.gpu}" if device == "cuda" else device
    pipeline = DiffusionPipeline.from_pretrained(model, torch_dtype=DTYPES[options.dtype]).to(where)
    pipeline.set_progress_bar_config(disable=True)
    guidance = {"true_cfg_scale": options.true_cfg_scale}
    if options.true_cfg_scale > 1:
        guidance["negative_prompt"] = " "
    size = {"height": options.size, "width": options.size, "num_inference_steps": options.steps}
    images = {"num_images_per_prompt": options.images}
    return _timed(lambda _: pipeline(PROMPT, **images, **size, **guidance), options.repeat)


def images_a_request(size: int, steps: int) -> int:
    """Return how many images of size x size pixels one request may ask for.

    Raises ValueError where not even one is taken.
    """
    if size > LIMITS.side or steps > LIMITS.image_steps:
        raise ValueError(
            f"--size {size} --steps {steps}: the images API takes sides of at most {LIMITS.side} "
            f"pixels and {LIMITS.image_steps} steps; ask for less, or choose --ways"
        )
    num_pixels = size * size
    by_work = LIMITS.image_work // (num_pixels * steps)
    most = min(LIMITS.images, LIMITS.image_pixels // num_pixels, by_work)
    if most < 1:
        raise ValueError(
            f"--size {size} --steps {steps}: an image is {num_pixels * steps} pixels x steps, the "
            f"images API takes at most {LIMITS.image_work}; ask for less, or choose --ways"
        )
    return most


def _full(options: argparse.Namespace) -> list[int]:
    """Return how many images each request asks for, with as few requests as the bounds allow."""
    return _shares(options.images, images_a_request(options.size, options.steps))


def _images(client: ReplicaClient, counts: list[int], options: argparse.Namespace) -> None:
    """Send requests of so many images each, as many at once as the replica takes.

    Raises RuntimeError with the replica's words where it refuses one.
    """
    body = {
        "prompt": PROMPT,
        "size": f"{options.size}x{options.size}",
        "num_inference_steps": options.steps,
        "true_cfg_scale": options.true_cfg_scale,
        "response_format": "b64_json",
    } | ({"negative_prompt": " "} if options.true_cfg_scale > 1 else {})

    token = environment_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(index: int) -> int:
        url = f"{client.url}/v1/images/generations"
        value = body | {"n": counts[index], "seed": index}
        answer = httpx.post(url, json=value, headers=headers, timeout=600, trust_env=False)
        if answer.status_code != 200:
            raise RuntimeError(
                f"{client.name} answered {answer.status_code} to a request for {counts[index]} "
                f"images: {answer.text[:500]}"
            )
        return len(answer.json()["data"])

    with ThreadPoolExecutor(min(len(counts), LIMITS.image_calls)) as pool:
        received = list(pool.map(ask, range(len(counts))))
    if received != counts:
        raise RuntimeError(f"the replica answered {received} images to requests of {counts}")


def _rollouts(
    client: ReplicaClient, options: argparse.Namespace, *, same_noise: bool
) -> tuple[list[float], list[int]]:
    """Return the seconds and the forwards of each call."""
    size, (low, high) = WINDOW
    num_places = high - size - low + 1
    repeat = options.repeat
    if options.same_noise:
        # a call's forwards depend on where its window is: all places come equally often
        repeat = -(-repeat // num_places) * num_places
    forwards: list[int] = []

    def draw(call: int) -> None:
        start = low + call % num_places
        window = (start, start + size)
        forwards.append(_rollout(client, call, options, window, same_noise=same_noise))

    return _timed(draw, repeat), forwards


def _rollout(
    client: ReplicaClient,
    call: int,
    options: argparse.Namespace,
    window: tuple[int, int],
    *,
    same_noise: bool,
) -> int:
    """Draw one group; return how many forwards of one sample it took."""
    sampling = Sampling(
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        true_cfg_scale=options.true_cfg_scale,
        eta=1.2,
        sde_window_size=WINDOW[0],
        sde_window_range=window,
        same_noise=same_noise,
    )
    request = RolloutRequest(
        prompt=Prompt(text=PROMPT, id="0" * 16),
        sampling=sampling,
        sample_indices=tuple(range(options.images)),
        seed=0,
        step=call,
    )
    group = client.generate(request)
    num_samples, _, height, *_ = group.pixels_GFHWC.shape
    if num_samples != options.images or height != options.size:
        raise RuntimeError(f"the replica answered {num_samples} of {options.images} samples")
    return group.num_forwards


def _timed(call: Callable[[int], object], repeat: int) -> list[float]:
    """Return the seconds of 1 + repeat calls, each of which ends with its result on the host."""
    seconds = []
    for place in range(1 + repeat):
        start = time.perf_counter()
        call(place)
        seconds.append(time.perf_counter() - start)
    return seconds


def _shares(total: int, most: int) -> list[int]:
    """Divide total into as few equal parts of at most `most` as there can be."""
    count = -(-total // most)
    return [total // count + (place < total % count) for place in range(count)]


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path("assets/qwen_image"), help="config files are enough"
    )
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--size", type=int, default=512, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--true-cfg-scale", type=float, default=1.0)
    parser.add_argument("--replicas", nargs="+", choices=REPLICAS, default=["eager"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--same-noise", action="store_true", help="also a rollout that shares it")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add_depths(parser)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="folder for random weights")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
