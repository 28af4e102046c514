"""`megadiff doctor` on a host with GPUs."""

from __future__ import annotations

import json

import pytest
import torch

from megadiff.cli.main import main

pytestmark = pytest.mark.gpu


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["driver"]["status"] != "error", found["driver"]
    assert found["gpus"]["text"].startswith(f"{torch.cuda.device_count()} x NVIDIA")
    assert found["cuda ipc"]["status"] == "ok", found["cuda ipc"]
    if torch.cuda.device_count() > 1:
        assert "GB/s in an all-reduce over" in found["nccl links"]["text"]
