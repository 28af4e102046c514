"""A random model of any size is a whole pipeline, of the asked depth, that diffusers loads."""

import pytest
import torch
from diffusers import QwenImagePipeline

from megadiff.models.registry import check_model_folder


def test_pipeline(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend("tools")
    import random_weights

    out = tmp_path / "random"
    arguments = [str(out), "--model", str(tiny_model), "--layers", "3", "--text-layers", "1", "--device", "cpu"]
    assert random_weights.main(arguments) == 0 and '"parameters": ' in capsys.readouterr().out
    check_model_folder(out)
    pipeline = QwenImagePipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    assert len(pipeline.transformer.transformer_blocks) == 3
    assert len(pipeline.text_encoder.model.language_model.layers) == 1
    sampling = {"height": 64, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0, "output_type": "latent"}
    latents = pipeline("a red star", **sampling).images
    assert torch.isfinite(latents).all() and latents.std() > 0
    with pytest.raises(SystemExit):
        random_weights.main(arguments)
