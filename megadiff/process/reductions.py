"""Choose how kernels that torch compiles for a GPU reduce rows: kept in registers, or read twice.

Torch's own rule reads a row of thousands of numbers twice, as an RMS norm's. Kept, it takes a half
to two thirds of the time (docs/performance.md). Tested with torch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint

# Of a row that is normalised, in numbers. Rows of a head are shorter, a GPU takes many at once.
LONG_ROWS = range(257, 4097)
_stock_choice = InductorChoices.should_use_persistent_reduction


def keep_rows(applies: Callable[[], bool] = lambda: True) -> None:
    """Let kernels keep rows of these lengths from now on, where their number of numbers is fixed.

    By rule and not by timing both, as torch's `multi_kernel` does: replicas of a run must round
    alike. applies: asked for each kernel.
    """

    def choose(features: Any, cooperative_reduction: bool) -> bool:
        size = features.reduction_numel
        is_row = features.get_reduction_hint() == ReductionHint.INNER
        if applies() and is_row and not cooperative_reduction and isinstance(size, sympy.Integer):
            return int(size) in LONG_ROWS
        return _stock_choice(features, cooperative_reduction)

    choices: Any = InductorChoices
    choices.should_use_persistent_reduction = staticmethod(choose)
