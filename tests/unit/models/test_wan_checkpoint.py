"""What a Wan folder says of its model: experts, schedule, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.types import Sampling

SAMPLING = Sampling(height=64, width=64, num_frames=5, num_inference_steps=10)


@pytest.fixture
def model(tiny_wan: dict[str, Path]) -> WanAdapter:
    """Two experts, boundary_ratio 0.875 and flow_shift 5."""
    return WanAdapter(tiny_wan["t2v_a14b"])


@pytest.mark.parametrize(("flow_shift", "num_high"), [(5.0, 5), (12.0, 7)])
def test_the_schedule_is_shared_out_to_the_experts(
    model: WanAdapter, flow_shift: float, num_high: int
) -> None:
    model.static_shift = lambda: flow_shift
    components = [model.component_of(sigma) for sigma in model.schedule(SAMPLING)[:-1].tolist()]
    assert components == ["transformer"] * num_high + ["transformer_2"] * (10 - num_high)


def test_schedule_golden_values(model: WanAdapter) -> None:
    golden = torch.tensor([1, 0.978, 0.952, 0.921, 0.882, 0.833, 0.769, 0.682, 0.556, 0.357, 0])
    schedule = model.schedule(SAMPLING)
    assert torch.allclose(schedule, golden, atol=5e-4)
    assert torch.allclose(model.shift(torch.linspace(1, 0.1, 10), SAMPLING), schedule[:-1])


def test_the_boundary_itself_is_high_noise_in_float32(model: WanAdapter) -> None:
    for ratio in (0.875, 0.9, 0.417):
        model.boundary_ratio = ratio
        sigma = torch.tensor(ratio)
        assert model.component_of(float(sigma)) == "transformer"
        assert model.component_of(float(sigma) - 1e-5) == "transformer_2"


def test_guidance_scale_of_each_expert(tiny_wan: dict[str, Path]) -> None:
    one, model = (WanAdapter(tiny_wan[kind]) for kind in ("ti2v_5b", "t2v_a14b"))
    both = Sampling(
        height=64, width=64, num_inference_steps=4, guidance_scale=3.0, guidance_scale_2=2.0
    )
    shared = Sampling(height=64, width=64, num_inference_steps=4, guidance_scale=3.0)
    only_second = Sampling(height=64, width=64, num_inference_steps=4, guidance_scale_2=2.0)
    assert [model.guidance_scale(name, both) for name in model.components] == [3.0, 2.0]
    assert [model.guidance_scale(name, shared) for name in model.components] == [3.0, 3.0]
    assert model.is_guided(only_second) and not one.is_guided(only_second)
    assert one.component_of(0.1) == "transformer" and one.components == ("transformer",)


def test_what_the_tiny_folders_say(tiny_wan: dict[str, Path]) -> None:
    one, two = (WanAdapter(tiny_wan[kind]) for kind in ("ti2v_5b", "t2v_a14b"))
    assert (one.components, one.spatial, one.channels) == (("transformer",), 16, 48)
    assert (two.components, two.spatial, two.channels) == (("transformer", "transformer_2"), 8, 16)
    assert (two.boundary_ratio, two.static_shift(), two.width, two.temporal) == (0.875, 5.0, 96, 4)
    for kind, folder in tiny_wan.items():
        of_image = kind == "i2v_a14b"
        pipeline_class = "WanImageToVideoPipeline" if of_image else "WanPipeline"
        assert check_model_folder(folder).pipeline_class == pipeline_class
        assert len(build_adapter(folder).components) == (2 if kind.endswith("a14b") else 1)


@pytest.fixture
def folder(tiny_wan: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_wan["t2v_a14b"], tmp_path / "model")


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "match"),
    [
        (
            "model_index.json",
            {"boundary_ratio": None},
            "has transformer_2, but boundary_ratio=None is not between 0 and 1",
        ),
        ("model_index.json", {"boundary_ratio": 1.5}, "boundary_ratio=1.5 is not between"),
        (
            "model_index.json",
            {"transformer_2": [None, None]},
            "boundary_ratio=0.875, but no transformer_2",
        ),
        (
            "scheduler/scheduler_config.json",
            {"flow_shift": None},
            "has flow_shift=None and .* which comes from there",
        ),
        ("transformer/config.json", {"in_channels": 36}, "in_channels=36, out_channels=16"),
        (
            "transformer_2/config.json",
            {"image_dim": 1280},
            "transformer_2 takes an image through layers",
        ),
        ("transformer_2/config.json", {"num_layers": 3}, "its experts differ in num_layers"),
        ("transformer/config.json", {"patch_size": [1, 4, 4]}, r"patch_size=\[1, 4, 4\]"),
        ("transformer/config.json", {"patch_size": None}, "patch_size=None"),
        ("transformer/config.json", {"ffn_dim": "x"}, "ffn_dim='x', not a whole number"),
        ("vae/config.json", {"scale_factor_temporal": -4}, "scale_factor_temporal=-4, not a"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, file: str, changes: dict, match: str) -> None:
    _change(folder / file, **changes)
    with pytest.raises(ValueError, match=match):
        WanAdapter(folder).schedule(SAMPLING)


def test_a_flow_matching_scheduler_calls_its_shift_so(folder: Path) -> None:
    _change(
        folder / "scheduler/scheduler_config.json",
        _class_name="FlowMatchEulerDiscreteScheduler",
        shift=12.0,
    )
    assert WanAdapter(folder).static_shift() == 12.0
