"""What all tests share: the tiny pipelines, the reason why `gpu` tests are skipped, and how
pytest-xdist spreads them.

Heavy libraries are imported in functions: the process that only tells the workers what to run needs
none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megadiff.cli.console import quiet_imports

quiet_imports()  # pytest would show them after its summary

# A shell that starts tests in the background makes them ignore SIGINT, and what they start inherits
# that. Tests that press Ctrl-C would wait for an end that never comes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_signal_mask() -> Iterator[None]:
    """Take back what `megadiff train` blocks: processes that later tests start would inherit it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives a family's float32 tiny folder, made when it is first asked for.

    Its argument is a name of examples/tiny_models/families.py. Read-only by agreement: copy it
    before changing it.
    """
    from examples.tiny_models.families import FAMILIES

    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("models") / name
            FAMILIES[name](folder)
            folders[name] = folder
        return folders[name]

    return folder_of


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen_image")


@pytest.fixture(scope="session")
def tiny_bagel(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("bagel")


@pytest.fixture(scope="session")
def tiny_wan(tiny_folder: Callable[[str], Path]) -> dict[str, Path]:
    """Return kind (wan22.KINDS) → its folder."""
    from examples.tiny_models.families import FAMILIES

    names = [name for name in FAMILIES if name.startswith("wan")]
    return {name.partition("_")[2]: tiny_folder(name) for name in names}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if hasattr(config, "workerinput"):
        from tests.spread import place

        items.sort(key=lambda item: place(item.nodeid))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.spread import Spread

    config.option.loadscopereorder = False  # the order is place()'s
    return Spread(config, log)
