"""The engine benchmark as it is called, on the tiny model: one line a layout, a failure named."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import bench_engine  # noqa: E402

CONFIG = str(ROOT / "configs/quickstart.yaml")


def test_a_line_for_every_layout(tiny_model, tmp_path, capfd):
    options = ["--model", str(tiny_model), "--gpus", "1", "--size", "64", "--rows", "4", "--repeat", "1"]
    layouts = ["engine.backend=megatron", "parallel.sp=3"]
    arguments = [CONFIG, "run.device=cpu", *options, "--scratch", str(tmp_path)]
    code = bench_engine.main([*arguments, *(part for layout in layouts for part in ("--layout", layout))])
    done, failed = (json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{"))
    assert code == 1
    assert [each["layout"] for each in (done, failed)] == layouts
    assert done["update_s"] > 0 and done["grad_norm"] > 0 and done["rows"] == 4
    assert "world_size=1 is not a multiple of sp*tp = 3*1 = 3" in failed["failed"]
