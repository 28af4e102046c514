"""Weights go from any format into any other and back, and every bit is where it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file

from examples.tiny_models.qwen_image import write_tiny_pipeline
from megadiff.checkpoint.run_folders import read_progress
from megadiff.tensors.shards import ShardFolder
from tests.unit.convert.conversions import (
    PROMPTS,
    WEIGHTS,
    contents,
    policy_state,
    refused,
    resaved,
    run,
    same,
    seal,
    stored,
    write_checkpoint,
)

CONVERTING = Path(__file__).parents[3] / "docs/converting.md"
LAYOUTS = [("megatron", "--tp", n) for n in (1, 2, 4)] + [("fsdp", "--dp", n) for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 8 heads."""
    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_pipeline(folder, size="small")
    return folder


@pytest.mark.parametrize(("to", "flag", "ranks"), LAYOUTS)
def test_a_pipeline_comes_back_as_the_same_files(
    tiny_model: Path, tmp_path: Path, to: str, flag: str, ranks: int
) -> None:
    shards, back, before = tmp_path / "shards", tmp_path / "deep" / "back", contents(tiny_model)
    assert run(tiny_model, shards, "--to", to, flag, ranks, "--verify") == 0
    assert len(list(shards.glob("rank_*.safetensors"))) == ranks
    assert {f"model/transformer.{name}" for name in load_file(tiny_model / WEIGHTS)} == stored(
        shards
    ).keys()
    assert run(shards, back, "--verify") == 0
    assert contents(back) == contents(tiny_model) == before
    assert [path.name for path in back.parent.iterdir()] == ["back"]


def test_tp_8_and_a_size_that_it_does_not_divide(
    small_model: Path, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    assert run(small_model, tmp_path / "tp8", "--to", "megatron", "--tp", 8) == 0
    assert run(tmp_path / "tp8", tmp_path / "tp4", "--to", "megatron", "--tp", 4) == 0
    assert run(tmp_path / "tp4", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(small_model)
    assert refused(capsys, tiny_model, tmp_path / "no", "--to", "megatron", "--tp", 8) == (
        "error: parallel.sp*parallel.tp = 1*8 = 8 does not divide the model's 4 attention "
        "heads; set them so that their "
        "product is a divisor of 4\n"
    )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("to", "flag", "ranks"), [("megatron", "--tp", 2), ("fsdp", "--dp", 3)])
def test_several_files_with_an_index_come_back_as_they_were(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype, to: str, flag: str, ranks: int
) -> None:
    model = resaved(tiny_model, tmp_path / "model", dtype=dtype, max_shard_size="500KB")
    assert len(list((model / "transformer").glob("*.safetensors"))) > 1
    assert run(model, tmp_path / "shards", "--to", to, flag, ranks) == 0
    assert {tensor.dtype for tensor in stored(tmp_path / "shards").values()} == {torch.float32}
    assert run(tmp_path / "shards", tmp_path / "back", "--verify") == 0
    assert contents(tmp_path / "back") == contents(model)


def test_one_dtype_becomes_another_once_and_the_index_says_the_new_size(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = resaved(tiny_model, tmp_path / "model", max_shard_size="500KB")
    assert run(model, tmp_path / "half", "--dtype", "bfloat16", "--verify") == 0
    half = QwenImageTransformer2DModel.from_pretrained(
        tmp_path / "half" / "transformer", torch_dtype="auto"
    )
    source = load_file(tiny_model / WEIGHTS)
    assert all(
        torch.equal(tensor, source[name].bfloat16()) for name, tensor in half.state_dict().items()
    )
    index = yaml.safe_load(
        (tmp_path / "half" / "transformer" / f"{WEIGHTS.name}.index.json").read_text()
    )
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in source.values())
    assert run(model, tmp_path / "wide", "--dtype", "float32") == 0
    assert contents(tmp_path / "wide") == contents(model)


def test_a_mixture_of_dtypes_is_written_as_diffusers_writes_it(model: Path, tmp_path: Path) -> None:
    transformer = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    transformer.transformer_blocks[0].half()
    transformer.transformer_blocks[1].attn.bfloat16()
    transformer.save_pretrained(model / "transformer")
    for target in (("--to", "diffusers"), ("--to", "megatron", "--tp", 2)):
        assert run(model, tmp_path / target[1], *target) == 0
    assert run(tmp_path / "megatron", tmp_path / "back") == 0
    assert contents(tmp_path / "diffusers") == contents(tmp_path / "back") == contents(model)


def test_a_component_and_a_single_file_are_sources_too(tiny_model: Path, tmp_path: Path) -> None:
    component = shutil.copytree(tiny_model / "transformer", tmp_path / "any name, ünïcode")
    alone = shutil.copyfile(tiny_model / WEIGHTS, tmp_path / "weights.safetensors")
    sources = {
        "component": [component],
        "inside": [component / WEIGHTS.name],
        "alone": [alone, "--base", tiny_model],
    }
    for name, source in sources.items():
        assert run(*source, tmp_path / name / "copy") == 0
        assert contents(tmp_path / name / "copy") == contents(component)
        assert run(*source, tmp_path / name / "tp2", "--to", "megatron", "--tp", 2) == 0
        assert run(tmp_path / name / "tp2", tmp_path / name / "back") == 0
        assert contents(tmp_path / name / "back") == contents(
            tiny_model if name == "alone" else component
        )


def test_optimizer_state_average_and_position_move_with_the_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    state = policy_state(
        tiny_model, {"model": 1.0, "average": 0.5, "optim/exp_avg": 0.1, "optim/exp_avg_sq": 0.2}
    )
    state = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith("optim") or "img_in" not in name
    }
    first = write_checkpoint(tmp_path / "run" / "checkpoints" / "step_000007", state, tiny_model)
    assert run(first, tmp_path / "tp4", "--to", "megatron", "--tp", 4, "--verify") == 0
    assert run(tmp_path / "tp4", tmp_path / "dp3", "--to", "fsdp", "--dp", 3) == 0
    for folder, tp in ((tmp_path / "tp4", 4), (tmp_path / "dp3", 1)):
        found = stored(folder)
        assert same(found, state)
        assert ShardFolder(folder).values == {"optimizer_steps": {"transformer": 7}}
        progress, config = (
            read_progress(folder),
            yaml.safe_load((folder / "config.yaml").read_text()),
        )
        assert (progress.step, progress.prompts) == (7, PROMPTS)
        assert (
            config["seed"] == 3
            and config["parallel"]["tp"] == tp
            and config["model"]["path"] == str(tiny_model)
        )


@pytest.mark.parametrize(("options", "kind"), [((), "average"), (("--raw",), "model")])
def test_the_average_is_exported_where_there_is_one(
    tiny_model: Path, tmp_path: Path, options, kind: str, capsys
) -> None:
    state = policy_state(tiny_model, {"model": 1.0, "average": 0.5})
    for step in (7, 12):
        scaled = {name: step * tensor for name, tensor in state.items()}
        write_checkpoint(
            tmp_path / "run" / "checkpoints" / f"step_{step:06d}", scaled, tiny_model, step=step
        )
    if options:
        assert run(tmp_path / "run", tmp_path / "out", "--to", "fsdp", "--dp", 2, *options) == 2
        assert "--raw leaves out the running average, and a checkpoint" in capsys.readouterr().err
    for step, chosen in ((12, ()), (7, ("--step", 7))):
        out = tmp_path / f"out{step}"
        assert run(tmp_path / "run", out, *options, *chosen) == 0
        held = load_file(out / WEIGHTS)
        assert all(
            torch.equal(tensor, step * state[f"{kind}/transformer.{name}"])
            for name, tensor in held.items()
        )


def test_what_is_exported_draws_the_same_images(tiny_model: Path, tmp_path: Path) -> None:
    assert run(tiny_model, tmp_path / "tp2", "--to", "megatron", "--tp", 2) == 0
    assert run(tmp_path / "tp2", tmp_path / "back") == 0
    first, second = (_image(folder) for folder in (tiny_model, tmp_path / "back"))
    assert torch.equal(first, second) and first.std() > 0


def test_a_trained_export_has_a_card_of_its_own_and_loads_as_that_says(
    tiny_model: Path, tmp_path: Path
) -> None:
    """In bfloat16: without torch_dtype the text encoder's embeddings are of another dtype."""
    base = shutil.copytree(tiny_model, tmp_path / "Base-Model")
    (base / "README.md").write_text("The best model.")
    (base / "LICENSE").write_text("Terms.")
    state = policy_state(base, {"model": 1.0})
    checkpoint = write_checkpoint(tmp_path / "run/checkpoints/step_000007", state, base)
    rollout = {"height": 32, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 3.0}
    config = {"model": {"path": str(base)}, "seed": 3, "rollout": rollout}
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(config))
    seal(checkpoint)

    out = tmp_path / "out"
    assert run(checkpoint, out, "--dtype", "bfloat16", "--verify") == 0
    assert (out / "LICENSE").read_text() == "Terms."
    card = (out / "README.md").read_text()
    assert "best model" not in card and "| base | `Base-Model` |" in card
    assert "| steps | 7 |" in card and "| trained | whole weights |" in card

    line = next(line for line in card.splitlines() if line.startswith("pipeline = "))
    assert line in CONVERTING.read_text().replace('"out"', '"FOLDER"')
    names = {"DiffusionPipeline": DiffusionPipeline, "torch": torch}
    exec(line.replace("FOLDER", str(out)), names)
    assert _image_of(names["pipeline"]).isfinite().all()

    saved = tmp_path / "picture.png"
    settings, picture = card.split(line)[1].splitlines()[1:3]
    exec(settings, names)
    assert names["settings"] == rollout | {"negative_prompt": " "}
    exec(picture.replace("picture.png", str(saved)), names)
    assert saved.stat().st_size > 0

    # Weights that nobody trained keep their own card.
    assert run(base, tmp_path / "same") == 0
    assert contents(tmp_path / "same") == contents(base)


def test_a_tiny_size_is_told_in_mib(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert run(tiny_model, tmp_path / "same") == 0
    (sizes,) = (text for text in caplog.messages if "GiB/s" in text)
    size, unit = sizes.split()[:2]
    assert unit == "MiB" and float(size) > 0


def _image(folder: Path) -> torch.Tensor:
    return _image_of(DiffusionPipeline.from_pretrained(folder))


def _image_of(pipeline: DiffusionPipeline) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    settings = dict(
        height=32, width=32, num_inference_steps=2, true_cfg_scale=1.0, output_type="pt"
    )
    return pipeline("a red wall", generator=generator, **settings).images
