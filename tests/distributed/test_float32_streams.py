"""Float32 streams between bfloat16 products: both engines come nearer to float32, and train."""

from pathlib import Path

import pytest

from megadiff.train.log_probs import log_probs
from tests.deep_model import write_deep_model
from tests.distributed.engines import LOSS, build, mine
from tests.distributed.ranks import run_ranks

CASES = {  # backend, world size, sizes of the axes, what else the engine is built with
    "veomni_dp2": ("veomni", 2, {"dp": 2}, {}),
    "veomni_lora": ("veomni", 1, {}, {"lora": (4, 4.0)}),
    "megatron_tp2": ("megatron", 2, {"tp": 2}, {}),
}
HALF = {"dtype": "bfloat16"}
STREAMS = HALF | {"float32_streams": True}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep_model(tiny_model, tmp_path_factory.mktemp("deep") / "model", num_layers=6)


@pytest.mark.parametrize("case", CASES)
def test_engines_come_nearer_to_float32(case: str, model: Path) -> None:
    run_ranks(_worker, CASES[case][1], model, case)


def _worker(model: Path, case: str) -> None:
    backend, _, sizes, options = CASES[case]
    means, norms = [], []
    for precision in ({}, HALF, STREAMS):
        engine = build(model, sizes, backend=backend, **options, **precision)
        batch = mine(engine, scale=4.0)
        means.append(log_probs(engine, batch).means_NWLC)
        norms.append(engine.update(batch, LOSS)["optim/grad_norm"])
    exact, half, streams = means
    errors = [float((each - exact).norm() / exact.norm()) for each in (half, streams)]
    assert errors[1] < errors[0] / 2, errors
    assert abs(norms[2] / norms[0] - 1) < max(abs(norms[1] / norms[0] - 1), 5e-3), norms
