"""Keep torch.compile's variants of one function in two separate lists.

torch keeps the variants of a function with its code object, and takes the first whose guards a call
meets, those used last before all others. A variant for any size meets every call, so once it is
there, calls of a size that has a variant of its own run the slower one from then on (torch 2.11;
2.13 also compares which dimensions a caller has marked).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any


def with_own_variants(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function or bound method, not compiled yet, with a code object of its own.

    Functions that share a code object share the new one too, as the blocks of a model do. Raises
    ValueError for anything else.
    """
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType):
        raise ValueError(f"{forward} is no Python function, so its code cannot be copied")

    copy = FunctionType(
        _copied(function.__code__),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    return MethodType(copy, forward.__self__) if isinstance(forward, MethodType) else copy


@cache
def _copied(code: CodeType) -> CodeType:
    # Under another name: torch remembers by name and line which dimensions have varied.
    return code.replace(co_name=f"{code.co_name}_of_fixed_size")
