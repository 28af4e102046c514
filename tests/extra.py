"""Which cases of a test CI leaves out: each shows in another layout, or of another family, what a
case or a test that CI runs shows. `launch/test.sh --all` runs them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

extra = pytest.mark.extra


def cases(names: Iterable[Any], *, extra_ones: Container[Any]) -> list[Any]:
    """Return a test's parameters, some of them marked. A tuple is several parameters."""
    return [_marked(name) if name in extra_ones else name for name in names]


def _marked(name: Any) -> Any:
    values = name if isinstance(name, tuple) else (name,)
    return pytest.param(*values, marks=extra)
