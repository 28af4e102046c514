"""A random model of any size is a whole pipeline, of the asked depth, that diffusers loads."""

import make_tiny_model
import pytest
import random_weights
import torch
from diffusers import QwenImagePipeline, WanPipeline
from safetensors import safe_open

from examples.tiny_models.wan22 import write_tiny_pipeline
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.tensors.model_files import read_json


def test_pipeline(tiny_model, tmp_path, capsys):
    out = tmp_path / "random"
    arguments = [str(out), f"--model={tiny_model}", "--layers=3", "--text-layers=1", "--device=cpu"]
    assert random_weights.main(arguments) == 0 and '"parameters": ' in capsys.readouterr().out
    check_model_folder(out)
    pipeline = QwenImagePipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    assert len(pipeline.transformer.transformer_blocks) == 3
    assert len(pipeline.text_encoder.model.language_model.layers) == 1
    sampling = {
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "true_cfg_scale": 1.0,
        "output_type": "latent",
    }
    latents = pipeline("a red star", **sampling).images
    assert torch.isfinite(latents).all() and latents.std() > 0
    with pytest.raises(SystemExit):
        random_weights.main(arguments)


def test_the_tool_for_tiny_models_makes_full_sizes_as_well(tiny_model, tmp_path, capsys):
    out, options = (
        tmp_path / "full",
        ["--model", str(tiny_model), "--layers", "1", "--text-layers", "1", "--device", "cpu"],
    )
    assert make_tiny_model.main([str(out), "--size", "full", *options]) == 0
    assert '"parameters": ' in capsys.readouterr().out
    check_model_folder(out)
    assert read_json(out / "transformer" / "config.json")["num_layers"] == 1
    # Without --model these are drawn. Others share shapes with one of them, or have a layout of
    # their own.
    assets = make_tiny_model.ASSETS
    with_shapes = {name for name in make_tiny_model.FAMILIES if (assets / name).is_dir()}
    assert {
        "qwen_image",
        "wan22_ti2v_5b",
        "wan22_t2v_a14b",
        "sd35_medium",
        "z_image",
        "qwen_image_edit_2511",
        "wan22_i2v_a14b",
    } <= with_shapes
    for name in with_shapes - {"bagel"}:
        assert (assets / name / "text_encoder" / "config.json").is_file()
    without = ["--size", "full", "--family", "qwen_image_edit_2509"]
    for wrong in (["--size", "full", "--seed", "1"], without, ["--layers", "1"]):
        with pytest.raises(SystemExit):
            make_tiny_model.main([str(tmp_path / "other"), *wrong])
        assert not (tmp_path / "other").exists()
    assert "unrecognized arguments: --layers 1" in capsys.readouterr().err


def test_two_experts(tmp_path):
    write_tiny_pipeline(tmp_path / "tiny", kind="t2v_a14b")
    out = tmp_path / "random"
    random_weights.write_random_pipeline(
        tmp_path / "tiny", out, device="cpu", num_layers=1, text_layers=1
    )
    check_model_folder(out)
    pipeline = WanPipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    first, second = (
        dict(each.named_parameters()) for each in (pipeline.transformer, pipeline.transformer_2)
    )
    assert all(not torch.equal(weight, second[name]) for name, weight in first.items())
    sampling = {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "output_type": "latent",
    }
    latents = pipeline("a red star", guidance_scale=1.0, **sampling).frames
    assert torch.isfinite(latents).all() and latents.std() > 0


def test_a_model_that_is_given_images(tiny_folder, tmp_path):
    out = tmp_path / "random"
    source = tiny_folder("qwen_image_edit_2511")
    random_weights.write_random_pipeline(source, out, device="cpu", num_layers=1, text_layers=1)
    adapter = build_adapter(out)
    assert check_model_folder(out) is type(adapter)
    grey = torch.full((64, 48, 3), 128, dtype=torch.uint8)
    with adapter.prompt_encoder(dtype=torch.float32, device="cpu") as encode:
        texts = encode(["make it red"], [(grey,)])
    assert torch.isfinite(texts["prompt_embeds"]).all()
    # a picture of 384² at 28² a token
    assert texts["prompt_mask"].sum() > 150


# some names of the published files: transformers may name its modules otherwise
PUBLISHED = {
    ("sd35_medium", "text_encoder"): (
        "text_model.embeddings.token_embedding.weight",
        "text_model.encoder.layers.0.self_attn.q_proj.weight",
        "text_projection.weight",
    ),
    ("sd35_medium", "text_encoder_3"): (
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.final_layer_norm.weight",
    ),
    ("z_image", "text_encoder"): (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.weight",
    ),
}


def test_text_encoders_have_the_published_names(tiny_folder, tmp_path):
    for (family, component), names in PUBLISHED.items():
        out = tmp_path / family
        if not out.exists():
            random_weights.write_random_pipeline(
                tiny_folder(family), out, device="cpu", text_layers=1
            )
        with safe_open(out / component / "model.safetensors", framework="pt") as file:
            stored = set(file.keys())
        assert set(names) <= stored, (family, component, sorted(stored))


def test_bagel_has_the_names_and_shapes_of_the_layout(tiny_bagel, tmp_path):
    out = tmp_path / "bagel"
    assert random_weights.main([str(out), f"--model={tiny_bagel}", "--device=cpu"]) == 0
    check_model_folder(out)
    for name in ("ema.safetensors", "ae.safetensors"):
        shapes = []
        for folder in (tiny_bagel, out):
            with safe_open(folder / name, framework="pt") as file:
                shapes.append({key: file.get_slice(key).get_shape() for key in file.keys()})
        assert shapes[0] == shapes[1]
