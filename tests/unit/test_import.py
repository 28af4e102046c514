"""`import megadiff` is instant; its five names, and only they, are imported when they are used."""

import subprocess
import sys

import pytest

import megadiff

PROGRAM = """
import sys
import megadiff
print([name for name in sys.modules if name.startswith(("megadiff", "torch", "omegaconf"))])
"""


def test_the_package_alone_imports_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "['megadiff']\n", done.stdout + done.stderr


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        megadiff.trian  # noqa: B018


def test_train_is_a_function_whatever_was_imported_before():
    from megadiff import train
    from megadiff.train import loop

    assert callable(train) and train is sys.modules["megadiff.train"] and train.loop is loop
