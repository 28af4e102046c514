"""LoRA runs whose replica maps the trainer's base."""
from __future__ import annotations
import pytest
LORA = ["lora.rank=4", "lora.alpha=8", "optim.lr=1e-3", "algorithm.kl_coef=0.04"]

def test_equal(trainer):
    import json, time
    rows = {}
    for how in ("never", "auto"):
        start = time.time()
        result = trainer.run(*LORA, f"lora.shared_base={how}", name=how)
        print(how, time.time() - start, result.code, result.stderr[-3000:])
        assert result.code == 0
        rows[how] = result.rows
    for a, b in zip(rows["never"], rows["auto"], strict=True):
        for key in a:
            if a[key] != b[key]:
                print(a["step"], key, a[key], b[key])
