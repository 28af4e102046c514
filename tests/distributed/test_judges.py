"""A node's first rank starts the judges, and all of its ranks know where they are."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from megadiff.config.schema import Config, JudgeConfig, RewardConfig
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.rewards.http_pool import HttpPool
from megadiff.train import judge_server
from megadiff.train.judges import launch_judges
from tests.distributed.ranks import run_ranks
from tests.unit.train.test_judges import HEALTHY


def _rank(folder: Path) -> None:
    judge_server.server_command = lambda name, judge, *, port, parent_pid: [
        sys.executable, "-c", HEALTHY, str(port)
    ]  # fmt: skip
    config = Config()
    config.rollout.start_timeout_s = 60.0
    config.judge["tiny"] = JudgeConfig(model="m", sleep=True)
    config.judge["idle"] = JudgeConfig(model="m")
    config.reward["look"] = RewardConfig(type="vlm", args={"judge": "tiny"})
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=2)
    mesh = init_mesh(layout, "cpu")
    with ExitStack() as stack:
        judges = launch_judges(config, mesh, folder, stack)
        judges.wait()
        pool = HttpPool(judges.urls["tiny"])
        answer = pool.get("/v1/models")
        pool.close()
        judges.sleep()
        judges.wake()
        pids = [server.process.process.pid for server in judges.servers]
        told = {"urls": judges.urls, "pids": pids, "answer": answer}
        (folder / f"rank_{mesh.rank}.json").write_text(json.dumps(told))


def test_ranks_of_a_node_share_its_judges(tmp_path):
    run_ranks(_rank, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first["urls"] == second["urls"] and list(first["urls"]) == ["tiny"]
    assert first["answer"] == second["answer"] == {}
    assert len(first["pids"]) == 1 and second["pids"] == []
    assert not Path(f"/proc/{first['pids'][0]}").exists()
    log = (tmp_path / "logs" / "judge_tiny_0.log").read_text()
    assert log.count("told /sleep") == log.count("told /wake_up") == 1
