"""Import the classes that a config names as `module:Class`: rewards and sources of images."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable


def import_class(path: str, base: type, *, key: str, advice: str = "") -> type:
    """Return the class that `module:Class` names.

    base: what it must be derived from. key: the config's "key=value", for messages. advice: what to
    do where it is not.
    Raises ValueError when there is no such class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key}: module {module_name!r} cannot be imported ({error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error

    named = getattr(module, class_name, None)
    if named is None:
        hint = near(class_name, vars(module))
        raise ValueError(f"{key}: module {module_name!r} has no {class_name!r}{hint}")

    # issubclass() takes no protocol with attributes
    if base not in getattr(named, "__mro__", ()):
        parent = f"{base.__module__}.{base.__qualname__}"
        raise ValueError(f"{key}: {class_name!r} is not a class derived from {parent}{advice}")
    return named


def near(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)", or nothing where no name is near."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
