"""What the converter's tests convert and spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from megadiff.models.qwen_image.plan import PLAN
from megadiff.types import LoraSpec
from tests.unit.convert.conversions import (
    ALPHA,
    RANK,
    WEIGHTS,
    policy_state,
    transformer,
    write_checkpoint,
)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> LoraSpec:
    return LoraSpec(
        rank=RANK, alpha=ALPHA, modules=PLAN.lora_modules(load_file(tiny_model / WEIGHTS))
    )


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, spec: LoraSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA as peft itself saves it, with B that is not zero."""
    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.modules))
    model = get_peft_model(transformer(tiny_model), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run_folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A run's folder with one checkpoint of two ranks."""
    state = policy_state(tiny_model, {"model": 1.0, "optim/exp_avg": 0.5})
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step_000007", state, tiny_model)
    return tmp_path / "run"
