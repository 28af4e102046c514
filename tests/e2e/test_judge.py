"""A run that starts a judge, real vLLM with a tiny LLaVA, trains by its answers, and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from random_llava import write_llava

from megadiff.checkpoint.run_folders import whole_looking
from megadiff.config.rewards import RewardConfig
from megadiff.rewards.base import RewardContext, RewardSample, build_reward
from megadiff.types import Prompt
from tests.distributed.ranks import Command
from tests.e2e.conftest import ENVIRONMENT, Trainer
from tests.e2e.test_rescue import forked_trainer, give_replicas_back
from tests.tiny_clip import random_state, write_transformers

SERVER = "vllm.entrypoints.openai.api_server"
START_S = 240


@dataclass(frozen=True)
class JudgedRun:
    """A trainer in the background."""

    process: Command
    folder: Path
    stderr: Path

    @property
    def rows(self) -> list[dict]:
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def scores(self) -> list[float]:
        files = sorted(self.folder.glob("samples/*/samples.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [json.loads(line)["rewards"]["look"] for line in lines]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()[-3000:]
            assert time.monotonic() < deadline, self.stderr.read_text()[-3000:]
            time.sleep(0.2)

    def wait_for_rows(self, count: int) -> None:
        self.wait_for(lambda: len(self.rows) >= count)

    def judge(self) -> psutil.Process:
        """Return the process of the judge's server that leads its group."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (leader,) = [
            child
            for child in children
            if SERVER in child.cmdline() and os.getpgid(child.pid) == child.pid
        ]
        return leader


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny_model, registry) -> Iterator[Callable[..., JudgedRun]]:
    """(name, *overrides) → a run by a judge's yes or no; what tests leave of it is killed."""
    folder = tmp_path_factory.mktemp("judged")
    model = folder / "llava"
    write_llava(model, is_tiny=True)
    runs = []

    def start_run(name: str, *overrides: str) -> JudgedRun:
        command = Trainer(folder, tiny_model).command(
            "train.num_steps=1000",
            "train.updates_per_step=1",
            "sample_every=1",
            "rollout.mode=separate",
            f"rollout.registry={registry}",
            f"judge.tiny.model={model}",
            "judge.tiny.args={max-model-len: 2048, max-num-seqs: 32}",
            "reward.look.type=vlm",
            "reward.look.args.judge=tiny",
            *overrides,
            name=name,
        )
        stderr = folder / f"{name}.stderr"
        process = forked_trainer(command, folder, stderr)
        runs.append(JudgedRun(process=process, folder=folder / name, stderr=stderr))
        return runs[-1]

    yield start_run
    for run in runs:
        run.process.kill()
        run.process.wait(30)
    give_replicas_back(registry)


@pytest.fixture(scope="module")
def judged(start) -> JudgedRun:
    """A run that stops where its judge dies, in its fourth step or later."""
    run = start("stops")
    run.wait_for_rows(3)
    return run


def _family(run: JudgedRun) -> list[psutil.Process]:
    return psutil.Process(run.process.pid).children(recursive=True)


def test_answers_are_bit_equal_alone_and_in_a_burst_of_32(judged):
    port = judged.judge().cmdline()[judged.judge().cmdline().index("--port") + 1]
    args = {"url": f"http://127.0.0.1:{port}", "model": "tiny"}
    reward = build_reward("burst", RewardConfig(type="vlm", args=args))
    reward.open(RewardContext(device=torch.device("cpu")))
    pixels = np.random.default_rng(0)
    samples = []
    for index in range(32):
        side = (64, 96, 128)[index % 3]
        picture = pixels.integers(0, 256, (1, side, side, 3), dtype=np.uint8)
        prompt = Prompt(text=f"a cup number {index}", id=f"{index:016x}")
        samples.append(RewardSample(pixels=picture, prompt=prompt, sample_index=0))

    def score(sample: RewardSample) -> float:
        (value,) = reward.score([sample])
        return value

    alone = [score(sample) for sample in samples]
    with ThreadPoolExecutor(32) as threads:
        burst = list(threads.map(score, samples))
    reward.close()
    assert alone == burst
    assert len(set(alone)) > 16 and 0 < min(alone) and max(alone) < 1


def test_a_dead_judge_is_named_and_no_sample_scores_0(judged):
    children = _family(judged)
    judge = judged.judge()
    judge.kill()
    killed = time.monotonic()
    assert judged.process.wait(60) == 1
    assert time.monotonic() - killed < 30
    stderr = judged.stderr.read_text()
    assert f"judge.tiny is dead: judge_tiny_0 (pid {judge.pid}) was killed by SIGKILL" in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "reward 'look' on sample" in line
    assert f"judge_tiny_0 (pid {judge.pid}) was killed by SIGKILL; see " in line
    log = judged.folder / "logs" / "judge_tiny_0.log"
    # The log's last lines. What the dead judge's own processes write as they end may come later.
    lines = log.read_text().splitlines()
    assert [line for line in lines if not line.startswith(("(EngineCore", "(Worker"))][-1] in stderr

    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    rows = judged.rows
    assert whole_looking(judged.folder / "checkpoints")[-1].name == f"step_{rows[-1]['step']:06d}"
    assert len(judged.scores) >= 3 and min(judged.scores) > 0.01
    assert all(0 < row["reward/look/mass"] < 1 for row in rows)


@pytest.fixture
def far(tmp_path) -> Iterator[str]:
    """The address of a `megadiff score` that serves jpeg_size."""
    command = [sys.executable, "-m", "megadiff.cli.main", "score", "reward.size.type=jpeg_size"]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    yield process.stdout.readline().split()[-1]
    process.kill()
    process.wait(30)


def test_four_kinds_of_rewards_and_a_judge_that_is_started_again(start, judged, far, tmp_path):
    """ocr, clip, vlm and remote from one yaml; two of them are asked about some prompts only."""
    assert judged.process.poll() is not None  # it has given the replicas back
    prompts = tmp_path / "signs.jsonl"
    texts = ["a red cat that says 'red'", "a blue dog that says 'dog'"]
    rows = [{"prompt": texts[index % 2], "task": "ab"[index // 2]} for index in range(4)]
    lines = [json.dumps(row | {"prompt": f"{row['prompt']} {row['task']}"}) for row in rows]
    prompts.write_text("\n".join(lines))
    clip = write_transformers(tmp_path / "clip", random_state())
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text(
        f"""
algorithm: {{advantage: gdpo}}
reward:
  look: {{on_failure: drop}}
  text: {{type: ocr, weight: 0.5, only: {{task: a}}}}
  pick: {{type: clip, args: {{score: pickscore, path: {clip}}}, only: {{task: b}}}}
  far: {{type: remote, args: {{url: "{far}"}}}}
judge:
  tiny: {{sleep: true}}
"""
    )
    run = start("drops", str(rewards), f"data.prompts={prompts}")
    run.wait_for_rows(1)
    first = run.judge()
    first.send_signal(signal.SIGKILL)
    killed_at = len(run.rows)
    run.wait_for_rows(killed_at + 3)
    stderr = run.stderr.read_text()
    assert "judge.tiny is started again: judge_tiny_0" in stderr
    assert run.judge().pid != first.pid
    children = _family(run)
    (run.folder / "stop").write_text("")
    assert run.process.wait(60) == 75

    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert sum(row.get("reward/look/retries", 0) for row in run.rows) > 0
    assert not any("reward/look/dropped" in row for row in run.rows)
    for name in ("look", "text", "pick", "far"):
        assert all(f"reward/{name}/share_of_advantage" in row for row in run.rows), name
    assert all(0 < row["reward/far"] < 1 and row["reward/pick"] for row in run.rows)
    assert min(run.scores) > 0.01
    log = (run.folder / "logs" / "judge_tiny_0.log").read_text()
    assert log.count("to fall asleep") >= 2 and log.count("to wake up") >= 1
