"""Measure rewards that wait for a server, and on a GPU a judge and CLIP's picture tower.

    python tools/bench_rewards.py                    # the scorer, on any CPU; about 90 s
    python tools/bench_rewards.py --gpu              # clip, then judge; about 150 s on an H100
    python tools/bench_rewards.py --gpu --tiny       # the same path with tiny models, on a CPU

scorer  128 pictures of 512² as 8 groups of 16, asked of a judge that takes 0.5 s a request, by
        64 and 32 threads of the reward's own and by 2 shared ones: seconds after the last sample.
        Then groups arrive over a rollout that takes longer: how much of the asking it hides.
clip    pictures/s of CLIP ViT-H/14's picture tower in float32, random weights.
judge   pictures/s of a LLaVA of 7 B, random weights, under the real vLLM server, 64 in flight; its
        seconds to sleep and wake, GPU memory, and answers alone and in a burst.

Each part is a process of its own with a time limit. Each figure is a JSON line as soon as it is
known, so nothing is lost when a later part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from subprocess import PIPE

import bench_judge
import httpx
import torch
from bench_machine import machine

from megadiff.config.rewards import RewardConfig
from megadiff.rewards.base import Reward, RewardContext, RewardSample
from megadiff.rewards.score import Scorer
from megadiff.rewards.vlm_client import picture_url
from megadiff.types import Prompt, RolloutGroup, Sampling

JUDGE_S = 0.5  # a request's seconds
SIDE = 512
GROUP_SIZE = 16
GROUPS = 8
ROLLOUT_GROUPS = 32  # of a recipe's step
GROUP_S = 1.0  # between two groups of a rollout
LIMITS_S = {"scorer": 300, "clip": 45, "judge": 170}
END_S = 15  # for a part to end its server, to show its server's log and remove its weights
VIT_H = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
VIT_H |= {"num_attention_heads": 16, "patch_size": 14, "image_size": 224}


def report(part: str, **figures: object) -> None:
    """Print one JSON line at once; numbers have four digits."""
    rounded = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }
    sys.stdout.write(json.dumps({"part": part, **rounded}) + "\n")
    sys.stdout.flush()


class AskingReward(Reward):
    """Ask the judge about one picture a call, as a vlm reward does."""

    samples_per_call = 1

    def __init__(self, *, url: str, workers: int | None) -> None:
        self.url = url
        self.workers = workers

    def open(self, context: RewardContext) -> None:
        limits = httpx.Limits(max_connections=self.workers, keepalive_expiry=3)
        self.http = httpx.Client(timeout=60, trust_env=False, limits=limits)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        (sample,) = samples
        url = picture_url(sample.pixels[0])
        return [float(self.http.post(self.url, json={"image": url}).text)]


def make_group(index: int) -> RolloutGroup:
    """Return a group of one picture's shifts: all are different, and quickly made."""
    picture = torch.from_numpy(bench_judge.picture(index, SIDE))
    pixels = torch.stack([picture.roll(8 * shift, dims=0) for shift in range(GROUP_SIZE)])
    return RolloutGroup(
        prompt=Prompt(text="a red cup", id=f"{index:016x}"),
        sampling=Sampling(height=SIDE, width=SIDE, num_inference_steps=1, sde_window_size=0),
        sample_indices=tuple(range(GROUP_SIZE)),
        window_start=1,
        latents_GSLC=torch.zeros(GROUP_SIZE, 1, 1, 1),
        log_probs_GW=torch.zeros(GROUP_SIZE, 0, dtype=torch.float64),
        pixels_GFHWC=pixels[:, None],
        schedule=torch.tensor([1.0, 0.0]),
        conditioning={},
        policy_version=0,
        replica="none",
    )


def scorer_of(url: str, workers: int | None) -> Scorer:
    args = {"url": url, "workers": workers}
    config = RewardConfig(type="bench_rewards:AskingReward", args=args)
    return Scorer({"judge": config}, num_workers=2)


def measure_scorer(*, is_tiny: bool) -> None:
    judge = Path(__file__).with_name("slow_judge.py")
    command = [sys.executable, str(judge), str(0.05 if is_tiny else JUDGE_S)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe was asked for"
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}/"
        _measure_scorer(url, is_tiny=is_tiny)


def _measure_scorer(url: str, *, is_tiny: bool) -> None:
    groups = [make_group(index) for index in range(2 if is_tiny else GROUPS)]
    waits = {}
    for workers in (64, 32, None):
        with closing(scorer_of(url, workers)) as scorer:
            scorer.score(groups[:1])  # threads and connections
            start = time.monotonic()
            scorer.score(groups)
            waits[workers] = time.monotonic() - start
        report(
            "scorer",
            own_threads=workers,
            shared_threads=None if workers else 2,
            pictures=len(groups) * GROUP_SIZE,
            s_after_last_sample=waits[workers],
        )
    report("scorer", times_as_fast={w: round(waits[None] / waits[w], 1) for w in (64, 32)})

    for workers in (64, 32):
        _measure_rollout(url, workers, groups, 2 if is_tiny else ROLLOUT_GROUPS)


def _measure_rollout(url: str, workers: int, groups: Sequence[RolloutGroup], count: int) -> None:
    """Report how long the loop waits when groups come one by one, a second apart."""
    with closing(scorer_of(url, workers)) as scorer:
        scorer.score(groups[:1])
        start = time.monotonic()
        scorer.score(groups[:1])
        group_s = time.monotonic() - start

        start = time.monotonic()
        for index in range(count):
            time.sleep(max(0.0, start + (index + 1) * GROUP_S - time.monotonic()))
            scorer.submit(groups[index % len(groups)])
        rollout_s = time.monotonic() - start
        scorer.collect()
        wait_s = time.monotonic() - start - rollout_s

    # What the loop would wait for if each group was asked when the one before was answered.
    report(
        "scorer",
        own_threads=workers,
        pictures=count * GROUP_SIZE,
        rollout_s=rollout_s,
        s_after_last_sample=wait_s,
        s_of_asking=group_s * count,
        hidden=1 - wait_s / (group_s * count),
    )


def measure_clip(*, is_tiny: bool) -> None:
    from transformers import CLIPConfig, CLIPModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = CLIPConfig(
        vision_config=TINY_VIT if is_tiny else VIT_H, projection_dim=1024, dtype="float32"
    )
    start = time.monotonic()
    with device:
        model = CLIPModel(config).eval()
    report("clip", build_s=time.monotonic() - start, device=str(device))

    for batch in (16, 64):
        pixels = torch.rand(batch, 3, 224, 224, device=device)
        for matmuls in ("float32", "tf32"):
            # CUDA's own products; a CPU computes both alike.
            torch.backends.cuda.matmul.allow_tf32 = matmuls == "tf32"
            seconds = _seconds(lambda pixels=pixels: model.get_image_features(pixel_values=pixels))
            report(
                "clip", batch=batch, matmuls=matmuls, seconds=seconds, images_per_s=batch / seconds
            )
    if device.type == "cuda":
        report("clip", peak_gib=torch.cuda.max_memory_allocated() / 2**30)


TINY_VIT = {**VIT_H, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY_VIT |= {"num_attention_heads": 2}


@torch.inference_mode()
def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the mean seconds of a call, after two that warm up."""
    for _ in range(2):
        call()
    _synchronize()
    start = time.monotonic()
    for _ in range(repeats):
        call()
    _synchronize()
    return (time.monotonic() - start) / repeats


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_judge(*, is_tiny: bool, weights: str) -> None:
    # At its limit a part gets SIGTERM, and must still clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the part was ended"))
    # Weights that were just written are read from memory, if they fit there.
    folder = Path(tempfile.mkdtemp(prefix="bench_judge_", dir=_roomy_folder(is_tiny)))
    try:
        bench_judge.run(
            lambda **figures: report("judge", **figures),
            folder=folder / "llava",
            is_tiny=is_tiny,
            weights=weights,
        )
    except BaseException:
        for log in folder.glob("*.log"):
            sys.stderr.write(log.read_text("utf-8", errors="replace")[-6000:])
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _roomy_folder(is_tiny: bool) -> str | None:
    """Return a folder in memory where it takes the weights, else None: the usual one."""
    memory = Path("/dev/shm")
    if is_tiny or not memory.exists() or shutil.disk_usage(memory).free < 24 << 30:
        return None
    return str(memory)


def run_part(part: str, options: Sequence[str], limit_s: float) -> bool:
    """Run a part in a process group of its own, and end all of it after limit_s."""
    command = [sys.executable, __file__, "--part", part, *options]
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_group(process)
    seconds = time.monotonic() - start
    if code is None:
        report(part, failed=f"took longer than {limit_s:g} s", part_s=seconds)
    elif code:
        report(part, failed=f"ended with {code}; its error is above", part_s=seconds)
    else:
        report(part, part_s=seconds)
    return code == 0


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the part and what it started, also what outlived it.

    A judge's server has a session of its own. It ends as it sees that the part is gone.
    """
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(END_S)
    except ProcessLookupError:
        return
    except subprocess.TimeoutExpired:
        pass
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure rewards; see the top of this file.")
    parser.add_argument("--gpu", action="store_true", help="the parts clip and judge")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few pictures")
    parser.add_argument("--parts", nargs="+", choices=LIMITS_S, help="these instead")
    parser.add_argument("--limit-s", type=float, help="of each part; default: its own")
    parser.add_argument(
        "--weights",
        choices=("random", "dummy"),
        default="random",
        help="dummy: vLLM makes them, 30 s sooner, but answers do not depend on the picture",
    )
    parser.add_argument("--part", choices=LIMITS_S, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    if args.part == "scorer":
        measure_scorer(is_tiny=args.tiny)
    elif args.part == "clip":
        measure_clip(is_tiny=args.tiny)
    elif args.part == "judge":
        measure_judge(is_tiny=args.tiny, weights=args.weights)
    if args.part:
        return 0

    report("machine", **machine())
    options = ["--weights", args.weights, *(["--tiny"] if args.tiny else [])]
    parts = args.parts or (["clip", "judge"] if args.gpu else ["scorer"])
    succeeded = [run_part(part, options, args.limit_s or LIMITS_S[part]) for part in parts]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    raise SystemExit(main())
