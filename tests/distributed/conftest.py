"""What stock diffusers computes, for both engines' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.distributed.engines import stock_gradients


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> dict[float, dict[str, Tensor]]:
    """true_cfg_scale → loss, gradient norm and gradients of the whole batch by stock diffusers in
    one piece.
    """
    return {scale: stock_gradients(tiny_model, scale) for scale in (1.0, 4.0)}
