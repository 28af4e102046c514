"""Make a complete random BAGEL folder for two CPU cores, on which RL learns colours.

It has the published layout: everything lies in the root, weights in ema.safetensors and
ae.safetensors. Prompts matter from the start (see `build_transformer`), and the decoder paints:
latent channels 0, 1, 2 of each 2×2 latents are red, green and blue.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from examples.tiny_models.parts import check_choice, seeded, written_aside
from examples.tiny_models.qwen_image import build_tokenizer
from megadiff.models.bagel.transformer import BagelSizes, BagelTransformer
from megadiff.types import DTYPES

LLM = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIG = {
    "architectures": ["BagelForConditionalGeneration"],
    "model_type": "bagel",
    "connector_act": "gelu_pytorch_tanh",
    "interpolate_pos": False,
    "latent_patch_size": 2,
    "max_latent_size": 32,  # vllm-omni makes a 512 × 512 image when it starts
    "timestep_shift": 1.0,
    "vit_max_num_patch_per_side": 4,
    # The published autoencoder has no such sizes here, and those of vllm-omni's code.
    "vae_config": {
        "z_channels": 16,
        "downsample": 8,
        "ch": 64,
        "ch_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
    },
}
# what lies in ema.safetensors under its own name; all else of the transformer is the language model
CORE = ("time_embedder", "vae2llm", "llm2vae", "latent_pos_embed")


def write_tiny_bagel(out: Path, *, dtype: str = "float32", seed: int = 0) -> None:
    """Write the model folder `out`, whole or not at all; equal arguments give equal bytes.

    Raises ValueError when `out` holds something already, and for an unknown dtype.
    """
    check_choice("dtype", dtype, DTYPES)
    tokenizer = build_tokenizer()
    vocabulary = -(-len(tokenizer) // 64) * 64
    settings = {
        "config.json": CONFIG | {"llm_config": LLM | {"vocab_size": vocabulary}},
        "llm_config.json": LLM | {"vocab_size": vocabulary},
        "vit_config.json": VISION,
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 28, "width": 28},
        },
    }

    with written_aside(out) as folder:
        tokenizer.save_pretrained(folder)
        for name, values in settings.items():
            text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")

        transformer = build_transformer(BagelSizes.read(folder), seed=seed)
        weights = {
            name if name.startswith(CORE) else f"language_model.model.{name}": tensor
            for name, tensor in transformer.state_dict().items()
        }
        weights |= _other_weights(vocabulary, seed=seed)
        for file, tensors in (("ema", weights), ("ae", vae_weights(seed=seed))):
            cast = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
            save_file(cast, folder / f"{file}.safetensors")


def build_transformer(sizes: BagelSizes, *, seed: int) -> BagelTransformer:
    """Build a random float32 transformer in which the prompt matters from the start.

    Linear layers keep their input's variance; keys and values of the prompt count twice.
    """
    with seeded(seed), torch.no_grad():
        transformer = BagelTransformer(sizes)
        for module in transformer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
                if module.bias is not None:
                    module.bias.normal_(0, 0.02)
        transformer.embed_tokens.weight.normal_()
        transformer.latent_pos_embed.pos_embed.normal_(0, 0.5)
        for layer in transformer.layers:
            layer.self_attn.v_proj.weight.mul_(2)
            layer.self_attn.k_norm.weight.mul_(2)
        # The velocity starts small, or all images would drift to one colour and saturate there.
        transformer.llm2vae.weight.mul_(0.3)
    return transformer


def _other_weights(vocabulary: int, *, seed: int) -> dict[str, Tensor]:
    """Draw what text needs after the last layer, and what images that are given need."""
    width = LLM["hidden_size"]
    with seeded(seed + 1):
        vision = SiglipVisionModel(SiglipVisionConfig(**VISION, vision_use_head=False))
        weights = {
            f"vit_model.vision_model.{name.removeprefix('vision_model.')}": tensor
            for name, tensor in vision.state_dict().items()
        }
        return weights | {
            "connector.fc1.weight": 0.1 * torch.randn(width, VISION["hidden_size"]),
            "connector.fc1.bias": torch.zeros(width),
            "connector.fc2.weight": 0.1 * torch.randn(width, width),
            "connector.fc2.bias": torch.zeros(width),
            "vit_pos_embed.pos_embed": 0.1 * torch.randn(16, width),
            "language_model.model.norm.weight": torch.ones(width),
            "language_model.lm_head.weight": torch.randn(vocabulary, width) * width**-0.5,
        }


def vae_weights(*, seed: int) -> dict[str, Tensor]:
    """Return the autoencoder's weights: random encoder, shaped decoder.

    Channels 2k and 2k + 1 inside the decoder hold a colour and its negative. They are one group of
    the last norm, which divides them by their root mean square. silu(u) − silu(−u) = u brings them
    through the activation.
    """
    width = CONFIG["vae_config"]["ch"]
    channels = CONFIG["vae_config"]["z_channels"]
    blur_HW = torch.outer(*2 * [torch.tensor([0.25, 0.5, 0.25])])

    def shaped(matrix_OI: Tensor) -> Tensor:
        return matrix_OI[:, :, None, None] * blur_HW

    weights: dict[str, Tensor] = {}

    def add(name: str, weight: Tensor) -> None:
        weights[f"{name}.weight"] = weight
        weights[f"{name}.bias"] = torch.zeros(len(weight))

    with seeded(seed):
        for side in ("encoder", "decoder"):
            blocks = ["mid.block_1", "mid.block_2"]
            blocks += [f"down.{level}.block.0" for level in range(4) if side == "encoder"]
            blocks += [
                f"up.{level // 2}.block.{level % 2}" for level in range(8) if side != "encoder"
            ]
            for block in blocks:
                for index in (1, 2):
                    add(f"{side}.{block}.norm{index}", torch.ones(width))
                    # residual branches are zero
                    add(f"{side}.{block}.conv{index}", torch.zeros(width, width, 3, 3))
            for layer in ("q", "k", "v", "proj_out"):
                add(f"{side}.mid.attn_1.{layer}", torch.zeros(width, width, 1, 1))
            add(f"{side}.mid.attn_1.norm", torch.ones(width))
            add(f"{side}.norm_out", torch.ones(width))

        add("encoder.conv_in", torch.randn(width, 3, 3, 3) * 0.2)
        for level in range(3):
            add(f"encoder.down.{level}.downsample.conv", shaped(torch.eye(width)))
            add(f"decoder.up.{level + 1}.upsample.conv", shaped(torch.eye(width)))
        add("encoder.conv_out", torch.randn(2 * channels, width, 3, 3) * 0.05)

    to_colours = torch.zeros(width, channels)
    to_rgb = torch.zeros(3, width)
    for colour in range(3):
        for channel, sign in ((2 * colour, 1.0), (2 * colour + 1, -1.0)):
            to_colours[channel, colour] = sign
            to_rgb[colour, channel] = sign
    add("decoder.conv_in", shaped(to_colours))
    add("decoder.conv_out", shaped(0.7 * to_rgb))
    return weights
