"""Ask a yes / no judge of real size, served as a run of `judge.NAME` serves it.

Started by bench_rewards.py, which says how. The GPU is the server's alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megadiff.config.rewards import JudgeConfig
from megadiff.rewards.vlm_client import picture_url
from megadiff.train.judge_server import JudgeServer

Report = Callable[..., None]
JUDGE = "bench"
IN_FLIGHT = 64
ALONE = 32  # requests whose answers alone and in a burst are compared
START_S = 300.0
TOKEN_IDS = "token_id:"  # how the server writes a token under return_tokens_as_token_ids


def picture(number: int, side: int) -> NDArray[np.uint8]:
    """Return a picture of its own, [side, side, 3]: soft shapes with grain, as a photograph."""
    noise = np.random.default_rng(number)
    coarse = noise.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
    return soft // 2 + 60 + noise.integers(0, 8, (side, side, 1), dtype=np.uint8)


class Judge:
    """Ask the server for one token a picture, with the probabilities of yes and no."""

    def __init__(self, url: str, side: int) -> None:
        limits = httpx.Limits(max_connections=IN_FLIGHT, keepalive_expiry=3)
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False, limits=limits)
        self.side = side
        self.token_ids: list[int] = []
        self.num_partial = 0  # answers without both tokens
        self.prompt_tokens = 0  # of the last question, its picture's included

    def find_tokens(self) -> None:
        for word in ("yes", "no"):
            body = {"model": JUDGE, "prompt": word, "add_special_tokens": False}
            (token,) = self._post("/tokenize", body)["tokens"]
            self.token_ids.append(token)

    def body(self, number: int) -> dict[str, Any]:
        question = f'Does this image show "a red cup number {number}"? Please answer yes or no.'
        content = [
            {"type": "image_url", "image_url": {"url": picture_url(picture(number, self.side))}},
            {"type": "text", "text": question},
        ]
        return {
            "model": JUDGE,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "logprob_token_ids": self.token_ids,
            "return_tokens_as_token_ids": True,
        }

    def ask(self, body: dict[str, Any]) -> float:
        """Return log P(yes) − log P(no), or without both the first token's own log-probability."""
        answer = self._post("/v1/chat/completions", body)
        self.prompt_tokens = answer["usage"]["prompt_tokens"]
        (first,) = answer["choices"][0]["logprobs"]["content"]
        by_token = {entry["token"]: entry["logprob"] for entry in first["top_logprobs"]}
        yes, no = (by_token.get(f"{TOKEN_IDS}{token}") for token in self.token_ids)
        if yes is None or no is None:
            self.num_partial += 1
            return first["logprob"]
        return yes - no

    def ask_all(self, bodies: Sequence[dict[str, Any]], in_flight: int) -> NDArray[np.float64]:
        with ThreadPoolExecutor(in_flight) as pool:
            return np.array(list(pool.map(self.ask, bodies)))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self.http.post(path, json=body)
        response.raise_for_status()
        return response.json() if response.content else None

    def switch(self, path: str) -> float:
        """POST a path without an answer and return its seconds."""
        start = time.monotonic()
        self._post(path)
        return time.monotonic() - start


def used_gib() -> float | None:
    """Return the memory in use of the first GPU, by all processes; None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return int(text.split()[0]) / 1024


@contextmanager
def server(folder: Path, *, on_gpu: bool, options: Mapping[str, object]) -> Iterator[str]:
    """Serve the folder, with a log beside it, and yield the url. options: of vLLM's server."""
    # compiled at the first request where it is not cached, and greedy needs no sampler
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    args = {"max-model-len": 2048, "max-num-seqs": IN_FLIGHT, "enforce-eager": True}
    # Every picture of a rollout is new, so what is cached would only flatter the figures.
    args |= {"no-enable-prefix-caching": True, "mm-processor-cache-gb": 0, **options}
    config = JudgeConfig(model=str(folder), gpus=[0] if on_gpu else [], sleep=True, args=args)
    judge = JudgeServer(
        JUDGE,
        config,
        index=0,
        logs=folder.parent,
        num_threads=len(os.sched_getaffinity(0)),
        may_restart=False,
    )
    try:
        end = time.monotonic() + START_S
        while not judge.is_healthy():
            if time.monotonic() > end:
                raise RuntimeError(f"no server after {START_S:g} s")
            time.sleep(0.2)
        yield judge.url
    finally:
        judge.process.stop()
        judge.close()


def run(report: Report, *, folder: Path, is_tiny: bool, weights: str) -> None:
    """Report every figure of the judge part as soon as it is known."""
    side = 64 if is_tiny else 512
    counts = (16, 32) if is_tiny else (128, 512)
    device = "cuda" if shutil.which("nvidia-smi") else "cpu"
    options: dict[str, object] = {}
    if device == "cuda":
        options["gpu-memory-utilization"] = 0.5
    if weights == "dummy":
        options["load-format"] = "dummy"

    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("random_llava.py")), str(folder)]
    command += ["--tiny"] if is_tiny else []
    command += ["--no-weights"] if weights == "dummy" else []
    command += ["--device", device]
    # In a process of its own, so that its memory is not counted.
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report(folder_s=time.monotonic() - start)
    report(gpu_gib_before=used_gib())

    start = time.monotonic()
    with server(folder, on_gpu=device == "cuda", options=options) as url:
        report(start_s=time.monotonic() - start, gpu_gib_ready=used_gib())
        judge = Judge(url, side)
        judge.find_tokens()
        Measurement(report, judge, counts).run(compares=weights == "random")


class Measurement:
    """Make every measurement, also after one that failed.

    Each question has a picture of its own: `compared` are asked again and again, `warm` in between.
    """

    def __init__(self, report: Report, judge: Judge, counts: Sequence[int]) -> None:
        self.report = report
        self.judge = judge
        start = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            bodies = list(pool.map(judge.body, range(ALONE + sum(counts) + IN_FLIGHT)))
        report(encode_s=time.monotonic() - start, pictures=len(bodies))
        self.compared = bodies[:ALONE]
        self.warm = bodies[-IN_FLIGHT:]
        self.timed = []
        first = ALONE
        for count in counts:
            self.timed.append(bodies[first : first + count])
            first += count
        self.alone: NDArray[np.float64] | None = None

    def run(self, *, compares: bool) -> None:
        """compares: dummy weights are so small that answers do not depend on the picture."""
        steps = [self.throughput, self.sleep]
        if compares:
            steps.insert(1, self.compare)
        errors = []
        for step in steps:
            try:
                step()
            except Exception as error:  # the next figure may still be had
                errors.append(error)
                self.report(failed=f"{step.__name__}: {type(error).__name__}: {error}")
        if errors:
            raise errors[0]

    def throughput(self) -> None:
        start = time.monotonic()
        self.judge.ask(self.warm[0])
        self.report(
            first_request_s=time.monotonic() - start, prompt_tokens=self.judge.prompt_tokens
        )
        self.judge.ask_all(self.warm, IN_FLIGHT)

        for bodies in self.timed:
            start = time.monotonic()
            scores = self.judge.ask_all(bodies, IN_FLIGHT)
            seconds = time.monotonic() - start
            self.report(
                requests=len(bodies),
                in_flight=IN_FLIGHT,
                seconds=seconds,
                images_per_s=len(bodies) / seconds,
                spread_over_images=float(scores.std()),
                answers_without_both=self.judge.num_partial,
            )

    def compare(self) -> None:
        """Report how far answers in a burst are from the same ones alone."""
        self.alone = self._ask_compared(1)
        start = time.monotonic()
        self.judge.ask(self.warm[0])
        self.report(one_request_s=time.monotonic() - start)
        gaps = np.abs(self._ask_compared(ALONE) - self.alone)
        self.report(
            gap_alone_burst_max=float(gaps.max()),
            gap_alone_burst_median=statistics.median(gaps.tolist()),
            spread_of_compared=float(self.alone.std()),
        )

    def _ask_compared(self, in_flight: int) -> NDArray[np.float64]:
        # Others first, so that no picture's features are still cached.
        self.judge.ask_all(self.warm, IN_FLIGHT)
        return self.judge.ask_all(self.compared, in_flight)

    def sleep(self) -> None:
        self.report(sleep_s=self.judge.switch("/sleep?level=1"))
        time.sleep(1)  # until nvidia-smi sees what the driver took back
        self.report(gpu_gib_asleep=used_gib())
        self.report(wake_s=self.judge.switch("/wake_up"), gpu_gib_awake=used_gib())
        start = time.monotonic()
        self.judge.ask(self.warm[0])
        self.report(first_after_wake_s=time.monotonic() - start)
        if self.alone is not None:
            gaps = np.abs(self._ask_compared(1) - self.alone)
            self.report(gap_after_wake_max=float(gaps.max()))
        self.report(
            sleep_again_s=self.judge.switch("/sleep?level=1"),
            wake_again_s=self.judge.switch("/wake_up"),
        )
