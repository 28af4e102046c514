"""What the converter's tests spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return shutil.copytree(tiny_model, tmp_path / "model")
