"""BAGEL's trainer module against vllm-omni's own, in one process, with the same weights.

vllm-omni casts to bfloat16 by name inside its layers; its modules get a torch whose bfloat16 is
float32.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megadiff.models.bagel.adapter import BagelAdapter, encode_texts
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks
from tests.plain_module import plain_module

SAMPLING = Sampling(height=64, width=96, num_inference_steps=4, guidance_scale=4.0)
TEXTS = ("a red circle", "two blue squares on a wall, above a green star", "sky")
NEGATIVES = ("", "dark", "")
TOLERANCE = 1e-5


class TorchIn32:
    """torch, whose bfloat16 is float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_velocities_are_those_of_vllm_omni(tiny_bagel: Path) -> None:
    """For texts of several lengths in one batch, under guidance, and schedule and ids."""
    run_ranks(_compare, 1, tiny_bagel)


def _compare(folder: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.forward_context import set_forward_context

    import megadiff.rollout.worker.cpu_platform.worker as cpu_worker

    config = OmniDiffusionConfig(model=str(folder), dtype=torch.float32, num_gpus=1)
    config.tf_model_config = TransformerConfig.from_dict({})
    worker = cpu_worker.CpuDiffusionWorker(
        local_rank=0, rank=0, od_config=config, skip_load_model=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (
        set_forward_context(vllm_config=worker.vllm_config, omni_diffusion_config=config),
        set_current_vllm_config(worker.vllm_config),
        set_current_diffusion_config(config),
        torch.no_grad(),
    ):
        served = _served(folder)
        _compare_velocities(BagelAdapter(folder), served, tokenizer)


def _served(folder: Path) -> Any:
    """Return vllm-omni's Bagel with the folder's weights."""
    import vllm_omni.diffusion.models.bagel.bagel_transformer as source
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import _VaeCfg

    source.torch = TorchIn32()
    config = source.Qwen2MoTConfig.from_json_file(folder / "llm_config.json")
    config.layer_module = "Qwen2MoTDecoderLayer"
    language_model = source.Qwen2MoTForCausalLM(config)
    sizes = types.SimpleNamespace(
        llm_config=config,
        visual_gen=True,
        visual_und=False,
        latent_patch_size=2,
        timestep_shift=1.0,
        max_latent_size=32,
        vae_config=_VaeCfg(),
    )
    bagel = source.Bagel(language_model, None, sizes)
    weights = load_file(folder / "ema.safetensors")
    language = {
        name.removeprefix("language_model."): tensor
        for name, tensor in weights.items()
        if name.startswith("language_model.")
    }
    for parameter in language_model.parameters():
        parameter.data.fill_(torch.nan)
    language_model.load_weights(iter(language.items()))
    assert not any(p.isnan().any() for p in language_model.parameters())
    for module in language_model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    bagel.load_state_dict(weights, strict=False)
    return bagel


def _compare_velocities(adapter: BagelAdapter, served: Any, tokenizer: Any) -> None:
    module = plain_module(adapter)
    conditioning = encode_texts(tokenizer, TEXTS)
    negative = encode_texts(tokenizer, NEGATIVES)
    conditioning |= {f"negative_{name}": value for name, value in negative.items()}
    length, channels = adapter.latents_shape(SAMPLING)
    latents_BLC = torch.randn(
        len(TEXTS), length, channels, generator=torch.Generator().manual_seed(3)
    )
    sigmas = adapter.schedule(SAMPLING)
    # the last is below the interval in which the pipeline guides
    sigma_B = torch.tensor([1.0, float(sigmas[1]), 0.4])
    velocity_BLC = adapter.velocity(module, latents_BLC, sigma_B, conditioning, SAMPLING)

    ids = {
        "bos_token_id": "<|im_start|>",
        "eos_token_id": "<|im_end|>",
        "start_of_image": "<|vision_start|>",
        "end_of_image": "<|vision_end|>",
    }
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in ids.items()}
    for row, text in enumerate(TEXTS):
        positive, prompt_ids = _one_branch(
            served, tokenizer, ids, text, latents_BLC[row], sigma_B[row]
        )
        ours = conditioning["prompt_ids"][row][conditioning["prompt_mask"][row]]
        assert ours.tolist() == prompt_ids
        other, _ = _one_branch(
            served, tokenizer, ids, NEGATIVES[row], latents_BLC[row], sigma_B[row]
        )
        expected = positive
        if sigma_B[row] > 0.4:
            expected = served._combine_cfg(positive, other, None, 4.0, 1.0, "global", 0.0)
        error = float((velocity_BLC[row] - expected).abs().max())
        assert error <= TOLERANCE, f"{text}: {error}"
        assert float(expected.abs().max()) > 0.1

    # n points are n − 1 steps: generate_image drops the last
    points = torch.linspace(1, 0, SAMPLING.num_inference_steps + 1)
    torch.testing.assert_close(sigmas, 3 * points / (1 + 2 * points))


def _one_branch(
    served: Any, tokenizer: Any, ids: dict[str, int], text: str, latents_LC: Tensor, sigma: Tensor
) -> tuple[Tensor, list[int]]:
    """Return vllm-omni's velocity [L, C] of one row alone, and the ids that it used."""
    import vllm_omni.diffusion.models.bagel.bagel_transformer as source

    cache = source.NaiveCache(2)
    lengths = positions = [0]
    used = []
    if text:
        prompt, lengths, positions = served.prepare_prompts([0], [0], [text], tokenizer, ids)
        cache = served.forward_cache_update_text(cache, **prompt)
        used = prompt["packed_text_ids"].tolist()
    image = served.prepare_vae_latent(lengths, positions, [(SAMPLING.height, SAMPLING.width)], ids)
    del image["packed_init_noises"]
    velocity_LC = served.forward_single_branch(
        x_t=latents_LC,
        timestep=sigma.expand(len(latents_LC)),
        past_key_values=cache,
        **image,
    )
    return velocity_LC, used + image["packed_text_ids"].tolist()
