"""Check what rewards put into metrics' keys: their names, and those of their own figures."""

from __future__ import annotations

import re

from megadiff.observe.metrics import DIVERSITY, TOTALS
from megadiff.rewards.base import Reward, RewardError
from megadiff.types import Figures

# the weighted sum, its figures under reward/, and those of diversity under eval/
TAKEN = frozenset(("total", *TOTALS, *DIVERSITY))
NAME = re.compile(r"[A-Za-z0-9_.\-]+")  # of a reward
FIGURE = re.compile(r"[A-Za-z0-9_]+")  # of one of its figures


def check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be a part of metrics' keys, or would hide a key."""
    if name in TAKEN:
        raise ValueError(
            f"reward.{name}: this name is taken by another figure; rename the reward to none of "
            f"{', '.join(sorted(TAKEN))}"
        )
    if not NAME.fullmatch(name):
        raise ValueError(
            f"reward.{name}: the name is a part of metrics' keys; use letters from a to z, digits, "
            "_ . - only"
        )


def own_figures(reward: Reward) -> Figures:
    """Return the reward's own figures as floats. A log takes no tensors and no numpy numbers.

    Raises RewardError with the reward's name where figures() fails, or gives no numbers.
    """
    key = ""
    figures: Figures = {}
    try:
        for key, value in reward.figures().items():
            if not FIGURE.fullmatch(key):
                raise ValueError("its name may have letters from a to z, digits and _ only")
            figures[key] = float(value)
    except Exception as error:  # user code may raise anything
        where = f"{key!r} of figures()" if key else "figures()"
        raise RewardError(
            f"reward {reward.name!r} failed in {where}: {error}; return a dict of one number a name"
        ) from error
    return figures
