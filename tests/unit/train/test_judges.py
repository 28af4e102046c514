"""Judges: what is refused before they start, and what becomes of one that does not live."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from megadiff.config.rewards import JudgeConfig, RewardConfig
from megadiff.config.schema import Config
from megadiff.parallel.collectives import AgreedError
from megadiff.rewards.base import ScoreFailed
from megadiff.rewards.http_pool import HttpPool
from megadiff.train import judge_server
from megadiff.train.check_judges import check_judges, server_command
from megadiff.train.judges import Judges, launch_judges
from tests.meshes import one_rank_mesh

# Stand for vLLM: each says how often and with what it was started, by its log.
pytestmark = pytest.mark.slow  # most of it waits for servers that do not answer

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"{}")
    def do_POST(self):
        print("told", self.path, flush=True)
        self.do_GET()
print("serving", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = "print('no such thing as a processor'); raise SystemExit(3)"
SLOW = "import time; print('loading', flush=True); time.sleep(60)"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    config.judge["qwen"] = JudgeConfig(model=str(tmp_path))
    config.reward["look"] = RewardConfig(type="vlm", args={"judge": "qwen"})
    return config


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda config: config.reward["look"].args.update(judge="qwem"),
            r"reward\.look\.args\.judge=qwem .*did you mean 'qwen'.*it has: qwen",
        ),
        (lambda config: config.reward.clear(), r"judge\.qwen: no reward asks it"),
        (lambda config: _set(config, gpus=[6, 7]), "names 2 GPUs.*replicas=1.*set .*replicas=2"),
        (lambda config: _set(config, gpus=[0, 1, 2], tp=2), "names 3 GPUs.* need 2; name 2 GPUs"),
        (lambda config: _set(config, gpus=[1, 1]), "each must be there once"),
        (lambda config: _set(config, tp=2), "tp=2 without GPUs"),
        (lambda config: _set(config, model="nowhere"), "model=nowhere is no folder"),
        (lambda config: _set(config, args={"port": 80}), r"args\.port: the run sets it"),
        (lambda config: _set(config, args={"served_model_name": "x"}), "the run sets it"),
        (lambda config: _write(config, "{"), "no config.json that can be read"),
        (
            lambda config: _write(config, '{"architectures": ["Qwen3ForCausalLM"]}'),
            "takes no pictures.*Qwen3ForCausalLM.*vision-language model",
        ),
    ],
)
def test_what_cannot_start_is_refused(config, change, text):
    check_judges(config)
    change(config)
    with pytest.raises(ValueError, match=text):
        check_judges(config)


def _set(config: Config, **values: object) -> None:
    for key, value in values.items():
        setattr(config.judge["qwen"], key, value)


def _write(config: Config, text: str) -> None:
    (Path(config.judge["qwen"].model) / "config.json").write_text(text)


def test_a_judge_may_be_asked_about_frames(config):
    config.reward["look"] = RewardConfig(
        type="frame", args={"reward": "vlm", "args": {"judge": "qwen"}, "frames": 3}
    )
    check_judges(config)
    config.reward["look"].args["args"]["judge"] = ["qwen"]
    with pytest.raises(ValueError, match=r"args\.judge=\['qwen'\] must be one name"):
        check_judges(config)


def test_an_evaluation_may_leave_judges_without_use(config):
    config.reward = {"color": RewardConfig(type="color")}
    check_judges(config, all_used=False)


def test_the_command_line_has_the_options_of_the_config_last():
    args = {"max_model_len": 4096, "enforce-eager": False, "dtype": "float16"}
    args |= {"limit-mm-per-prompt": {"image": 2}, "trust-remote-code": True, "lora-modules": [1, 2]}
    judge = JudgeConfig(model="m", args=args)
    _, _, _, _, _, *options = server_command("qwen", judge, port=5, parent_pid=1)
    assert options == (
        "--model m --served-model-name qwen --host 127.0.0.1 --port 5 --tensor-parallel-size 1 "
        "--dtype float16 --disable-uvicorn-access-log --max-model-len 4096"
    ).split() + ["--limit-mm-per-prompt", '{"image": 2}', "--trust-remote-code"] + [
        "--lora-modules",
        "1",
        "2",
    ]
    on_gpus = server_command(
        "q", JudgeConfig(model="m", gpus=[1], sleep=True), port=5, parent_pid=1
    )
    assert "--enable-sleep-mode" in on_gpus and "--enforce-eager" not in on_gpus


def _launch(config: Config, code: str, folder: Path, stack: ExitStack, monkeypatch) -> Judges:
    monkeypatch.setattr(
        judge_server,
        "server_command",
        lambda name, judge, *, port, parent_pid: [sys.executable, "-c", code, str(port)],
    )
    return launch_judges(config, one_rank_mesh(), folder, stack)


@pytest.mark.parametrize(
    ("code", "limit_s", "text"),
    [
        (BROKEN, 30.0, r"judge_qwen_0 \(pid \d+\) exited with code 3; the end of"),
        (SLOW, 0.7, r"not healthy after 0.7 s; raise rollout.start_timeout_s; the end of"),
    ],
)
def test_a_judge_that_does_not_come_up_is_named(config, tmp_path, monkeypatch, code, limit_s, text):
    config.rollout.start_timeout_s = limit_s
    with ExitStack() as stack:
        judges = _launch(config, code, tmp_path, stack, monkeypatch)
        with pytest.raises(AgreedError, match=text) as error:
            judges.wait()
        last_line = (tmp_path / "logs" / "judge_qwen_0.log").read_text().splitlines()[-1]
        assert f"  | {last_line}" in str(error.value)
    assert judges.servers[0].process.process.poll() is not None


def test_gpus_that_the_node_does_not_have(config, tmp_path, monkeypatch):
    _set(config, gpus=[3])
    with ExitStack() as stack, pytest.raises(AgreedError, match=r"gpus=\[3\].* see 0 GPUs"):
        _launch(config, HEALTHY, tmp_path, stack, monkeypatch)


def test_the_dead_are_started_again_once_and_then_answer_that_they_are_dead(
    config, tmp_path, monkeypatch, caplog
):
    config.reward["look"].on_failure = "drop"
    _set(config, replicas=2, sleep=True)
    caplog.set_level(logging.INFO)
    with ExitStack() as stack:
        judges = _launch(config, HEALTHY, tmp_path, stack, monkeypatch)
        judges.wait()
        first, second = judges.servers
        assert judges.urls == {"qwen": [first.url, second.url]}
        for tell in (judges.sleep, judges.sleep, judges.wake, judges.wake):
            tell()
        log = (tmp_path / "logs" / "judge_qwen_1.log").read_text()
        assert log.count("told /sleep") == log.count("told /wake_up") == 1

        old = first.process.process
        old.kill()
        _wait_for(lambda: first.process.process is not old)
        assert "judge.qwen is started again: judge_qwen_0" in caplog.text
        with closing(HttpPool(first.url, deadline_s=60.0)) as pool:
            assert pool.get("/v1/models") == {}  # it waits until the new one answers
            judges.sleep()
            first.process.process.kill()
            time.sleep(1.5)
            assert not first.is_buried  # while it sleeps the trainer has its memory
            judges.wake()
            started = time.monotonic()
            with pytest.raises(
                ScoreFailed, match=r"answered 410: judge_qwen_0 .* SIGKILL; see .*restart.log"
            ):
                pool.post("/v1/chat/completions", json={"picture": "x" * 10**6})
        assert time.monotonic() - started < 5
        judges.sleep()  # of the dead one nothing is expected
        judges.wake()
        processes = [server.process.process for server in judges.servers]
    assert all(process.poll() is not None for process in processes)


def _wait_for(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_a_judge_ends_with_its_run_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    command = server_command("q", JudgeConfig(model="m"), port=0, parent_pid=parent.pid)
    start = command.index("vllm.entrypoints.openai.api_server")
    judge = subprocess.Popen([*command[:start], "http.server", "0"], stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: psutil.Process(judge.pid).net_connections())
        parent.kill()
        parent.wait()
        assert judge.wait(10) == -9
    finally:
        for process in (parent, judge):
            process.kill()
            process.wait()


def test_a_judge_that_dies_while_it_is_told_to_sleep_is_left_to_the_watch(
    config, tmp_path, monkeypatch
):
    """Its connection breaks a moment before its process is gone."""
    _set(config, sleep=True)
    dies = HEALTHY.replace('print("told", self.path, flush=True)', "self.die()").replace(
        "    def do_POST",
        "    def die(self):\n"
        "        import os, time; self.connection.shutdown(2); time.sleep(0.4); os._exit(9)\n"
        "    def do_POST",
    )
    with ExitStack() as stack:
        judges = _launch(config, dies, tmp_path, stack, monkeypatch)
        judges.wait()
        judges.sleep()
        time.sleep(1.5)
        assert not judges.servers[0].is_buried  # nor started again: the trainer has its memory
        judges.wake()
        _wait_for(lambda: judges.servers[0].is_buried)
    with ExitStack() as stack:
        refuses = HEALTHY.replace(
            'print("told", self.path, flush=True)', "self.connection.shutdown(2)"
        )
        judges = _launch(config, refuses, tmp_path, stack, monkeypatch)
        judges.wait()
        with pytest.raises(AgreedError, match=r"judge\.qwen: POST http.*/sleep failed"):
            judges.sleep()
