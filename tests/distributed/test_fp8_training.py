"""FP8 in the VeOmni engine, by torchao itself: near bfloat16, alike under every layout, and seen by
nothing but the products.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cosine_similarity

from megadiff.engines.engine import Engine
from tests.distributed.engines import LOSS, build, differing, mine, only, sent_weights
from tests.distributed.ranks import run_ranks

SCALINGS = ("tensorwise", "rowwise")
LAYOUTS = {"dp2": {}, "sp2": {"sp": 2}}


def _engine(model: Path, fp8: str, **options: object) -> Engine:
    sizes = options.pop("sizes", {})
    return build(model, sizes, backend="veomni", dtype="bfloat16", fp8=fp8, **options)


def _measured(engine: Engine) -> dict[str, Tensor]:
    """Return velocities of this rank's rows, and the whole gradient of one update as a vector."""
    gradients: list[Tensor] = []

    def capture(*_: object) -> None:
        parameters = only(engine)._parameters.values()
        gradients.extend(p.grad.full_tensor().flatten() for p in parameters if p.grad is not None)

    hook = only(engine).optimizer.register_step_pre_hook(capture)
    batch = mine(engine)
    velocities = engine.velocities(batch)
    engine.update(batch, LOSS)
    hook.remove()
    return {"velocities": velocities, "gradient": torch.cat(gradients)}


def _error(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what one rank measures, and of its checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(_alone_worker, 1, tiny_model, folder)
    return folder


def _alone_worker(model: Path, folder: Path) -> None:
    for fp8 in ("none", *SCALINGS):
        engine = _engine(model, fp8)
        save_file(sent_weights(engine), folder / f"sent_{fp8}.safetensors")
        save_file(_measured(engine), folder / f"{fp8}.safetensors")
    smaller = _engine(model, "tensorwise", microbatch_size=3)
    save_file(_measured(smaller), folder / "smaller.safetensors")

    # a checkpoint goes from FP8 to bfloat16, bit for bit
    engine.save(folder / "rowwise")
    plain = _engine(model, "none")
    plain.load(folder / "rowwise")
    plain.save(folder / "plain")
    save_file(sent_weights(engine), folder / "later_rowwise.safetensors")
    save_file(sent_weights(plain), folder / "later_none.safetensors")

    for fp8 in ("none", "tensorwise"):
        engine = _engine(model, fp8, lora=(4, 8.0), lr=0.05)
        tensors = _measured(engine) | {"later": engine.velocities(mine(engine))}
        save_file(tensors, folder / f"lora_{fp8}.safetensors")


@pytest.mark.parametrize("fp8", SCALINGS)
def test_velocity_and_gradient_are_near_bfloat16s(fp8: str, alone: Path) -> None:
    """Its rounding is seen, and is no larger than that of a few bits."""
    plain = load_file(alone / "none.safetensors")
    measured = load_file(alone / f"{fp8}.safetensors")
    assert 0.02 < _error(measured["velocities"], plain["velocities"]) < 0.12
    assert cosine_similarity(measured["gradient"], plain["gradient"], dim=0) > 0.99
    norm = float(measured["gradient"].norm() / plain["gradient"].norm())
    assert norm == pytest.approx(1, abs=0.03)


def test_lora_is_beside_the_products(alone: Path) -> None:
    """It adds nothing at first. Its gradient, and what one update adds, are near bfloat16's."""
    whole = load_file(alone / "tensorwise.safetensors")
    plain, lora = (load_file(alone / f"lora_{fp8}.safetensors") for fp8 in ("none", "tensorwise"))
    assert torch.equal(lora["velocities"], whole["velocities"])
    assert cosine_similarity(lora["gradient"], plain["gradient"], dim=0) > 0.98
    added, expected = (each["later"] - each["velocities"] for each in (lora, plain))
    assert expected.norm() > 0.02 * plain["velocities"].norm()
    assert cosine_similarity(added.flatten(), expected.flatten(), dim=0) > 0.9


def test_both_scalings_round_alike(alone: Path) -> None:
    """By powers of two it makes no difference which numbers share a scale."""
    by_tensor, by_row = (load_file(alone / f"{fp8}.safetensors") for fp8 in SCALINGS)
    assert torch.equal(by_tensor["velocities"], by_row["velocities"])


def test_names_weights_and_checkpoints_are_those_of_bfloat16(alone: Path) -> None:
    for stage, fp8 in (("sent", "tensorwise"), ("sent", "rowwise"), ("later", "rowwise")):
        sent = load_file(alone / f"{stage}_{fp8}.safetensors")
        expected = load_file(alone / f"{stage}_none.safetensors")
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], expected[name]) for name in sent)
    assert differing(alone / "rowwise", alone / "plain") == []


def test_a_smaller_microbatch_computes_the_same(alone: Path) -> None:
    """As nearly as bfloat16 does; other scales than powers of two would be 0.07 and 0.12 apart."""
    large = load_file(alone / "tensorwise.safetensors")
    small = load_file(alone / "smaller.safetensors")
    assert _error(small["velocities"], large["velocities"]) < 0.02
    assert _error(small["gradient"], large["gradient"]) < 0.08


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_the_same(
    layout: str, alone: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Weights are scaled as wholes: exactly the same where only samples are split."""
    run_ranks(_layout_worker, 2, tiny_model, tmp_path, LAYOUTS[layout])
    one = load_file(alone / "tensorwise.safetensors")
    two = load_file(tmp_path / "measured.safetensors")
    if layout == "dp2":  # rank 0 has the first half
        assert torch.equal(two["velocities"], one["velocities"].chunk(2)[0])
        assert _error(two["gradient"], one["gradient"]) < 0.005
    else:
        assert _error(two["velocities"], one["velocities"]) < 0.02
        assert _error(two["gradient"], one["gradient"]) < 0.05


def _layout_worker(model: Path, folder: Path, sizes: dict[str, int]) -> None:
    engine = _engine(model, "tensorwise", sizes=sizes)
    measured = _measured(engine)
    if engine.mesh.rank == 0:
        save_file(measured, folder / "measured.safetensors")
