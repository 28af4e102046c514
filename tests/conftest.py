"""What all tests share: the tiny pipeline, and the reason why `gpu` tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megadiff.models.qwen_image.tiny import write_tiny_pipeline


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 tiny Qwen-Image pipeline folder, made once. Read-only by agreement: copy it before changing it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_pipeline(folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))
