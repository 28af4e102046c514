"""Reductions left out of a sharded model: each is found in the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from tests.distributed.sharded_model import Case, Layout, Ranks


@dataclass(frozen=True, kw_only=True)
class Omission:
    """A reduction left out.

    without: a context in which it is not done. wrong: parts of names of weights whose gradient must
    then be wrong; only: whether no others are.
    """

    layout: Layout
    without: Callable[[nn.Module], AbstractContextManager]
    wrong: tuple[str, ...]
    only: bool = False


def patched(*targets: str, by: Callable) -> Callable[[nn.Module], AbstractContextManager]:
    @contextmanager
    def context(module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(patch(target, by))
            yield

    return context


def check_omissions(
    case: Case, pipeline: Path, omissions: Mapping[str, Omission], dtype: torch.dtype
) -> None:
    """On each rank: every one of them is found in the gradients, with the outputs as they should
    be.
    """
    for name, omission in omissions.items():
        with Ranks(case, pipeline, omission.layout, dtype) as ranks:
            ranks.check_result(omission.without)
            wrong = ranks.wrong_gradients()
            for part in omission.wrong:
                assert any(part in each for each in wrong), (
                    f"without {name}, {part} is right; wrong: {sorted(wrong)}"
                )
            others = [each for each in wrong if not any(part in each for part in omission.wrong)]
            assert not (omission.only and others), f"without {name}, also wrong: {others}"
