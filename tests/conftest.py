"""What all tests share: the tiny pipelines, and the reason why `gpu` tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megadiff.models.qwen_image.tiny import write_tiny_pipeline
from megadiff.models.wan22 import tiny as wan_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 tiny Qwen-Image pipeline folder, made once. Read-only by agreement: copy it before changing it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_pipeline(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind (wan22.tiny.KINDS) → a float32 tiny Wan2.2 folder, made once. Read-only by agreement."""
    folders = {kind: tmp_path_factory.mktemp("models") / kind for kind in wan_tiny.KINDS}
    for kind, folder in folders.items():
        wan_tiny.write_tiny_pipeline(folder, kind=kind)
    return folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))
