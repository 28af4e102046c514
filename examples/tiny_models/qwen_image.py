"""Make a complete random Qwen-Image pipeline folder for two CPU cores, on which RL learns colours.

All five parts have the real classes; scheduler and prompt template are the real model's. Text
encoder and transformer are random, so that prompts matter (see `build_transformer`). The decoder
is shaped: a random one paints near grey, and then there is nothing to learn. Here the first three
latent channels are red, green and blue (see vae.shape_decoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from examples.tiny_models.parts import WORDS, check_choice, keep_variance, seeded, write_folder
from examples.tiny_models.vae import shape_decoder


@dataclass(frozen=True, kw_only=True)
class TinySize:
    """Set the shape of the transformer and the text encoder.

    num_heads divides by 4 (tp 4, sp 4); rope_axes sum to head_dim.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    text_dim: int
    rope_axes: tuple[int, int, int]


SIZES = {
    "tiny": TinySize(num_layers=2, num_heads=4, head_dim=32, text_dim=64, rope_axes=(8, 12, 12)),
    "small": TinySize(num_layers=4, num_heads=8, head_dim=32, text_dim=128, rope_axes=(8, 12, 12)),
}

# The size of assets/shapes.
SHAPES_SIZE = TinySize(num_layers=4, num_heads=4, head_dim=32, text_dim=64, rope_axes=(8, 12, 12))

# diffusers and vllm-omni both drop the template's first 34 tokens from the prompt embeddings.
TEMPLATE_PREFIX_TOKENS = 34
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
TEMPLATE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Words of the template without a space before them; of one token each, as WORDS are.
TEMPLATE_START_WORDS = "system user assistant Describe".split()

# The scheduler_config.json of Qwen/Qwen-Image; the scheduler's own defaults give another schedule.
SCHEDULER_CONFIG = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}


def write_tiny_pipeline(
    out: Path, *, size: str = "tiny", dtype: str = "float32", seed: int = 0
) -> None:
    """Write the pipeline folder `out`, whole or not at all; the same arguments give the same bytes.

    size: a key of SIZES. dtype: float32 or bfloat16, of all three networks.
    Raises ValueError when `out` holds something already, and for an unknown size or dtype.
    """
    check_choice("size", size, SIZES)
    tokenizer = build_tokenizer()
    assert len(tokenizer(TEMPLATE_PREFIX).input_ids) == TEMPLATE_PREFIX_TOKENS
    text_encoder = build_text_encoder(SIZES[size], tokenizer, seed=seed)
    shared_states_TD = prompt_states("a picture", tokenizer, text_encoder)
    transformer = build_transformer(SIZES[size], shared_states_TD, seed=seed)
    write_pipeline(out, tokenizer, text_encoder, transformer, build_vae(seed=seed), dtype=dtype)


def write_pipeline(
    out: Path,
    tokenizer: Qwen2Tokenizer,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    transformer: QwenImageTransformer2DModel,
    vae: AutoencoderKLQwenImage,
    *,
    dtype: str,
) -> None:
    """Write the five parts as a diffusers pipeline folder; the networks are cast in place."""
    networks = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder}
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG)
    write_folder(out, "QwenImagePipeline", networks, tokenizer, scheduler, dtype=dtype)


def build_tokenizer(
    words: Sequence[str] = WORDS, start_words: Sequence[str] = TEMPLATE_START_WORDS
) -> Qwen2Tokenizer:
    """Build a byte-level BPE without training: all 256 bytes, plus merges for a few words.

    No prompt has unknown tokens. Each word's merges extend it from its first character.
    words: of one token each with a space before them; start_words: without one.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    # Words with a leading space (Ġ) first: no merge within a word comes before theirs, and every
    # word is exactly one token.
    for word in [*(f"Ġ{word}" for word in words), *start_words]:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=131072,
        padding_side="right",
    )


def build_transformer(
    size: TinySize, shared_states_TD: Tensor, *, seed: int, zero_cond_t: bool = False
) -> QwenImageTransformer2DModel:
    """Build a random float32 transformer in which the prompt matters from the start.

    With diffusers' own random weights the velocity differs by 0.2 % between prompts, and RL learns
    nothing in many steps. So linear layers keep their input's variance, gates start at 1, text keys
    and values count twice, and what is common to all prompts is mostly projected out of the text.
    shared_states_TD: the text encoder's states of a prompt that says nothing.
    """
    with seeded(seed), torch.no_grad():
        transformer = _default_transformer(size, zero_cond_t=zero_cond_t)
        keep_variance(transformer)
        for name, module in transformer.named_modules():
            if name.endswith("_mod.1"):
                # Its rows are (shift, scale, gate), for attention and then for the MLP.
                module.bias.view(2, 3, -1)[:, 2] = 1.0
        for block in transformer.transformer_blocks:
            block.attn.add_v_proj.weight.mul_(2)
            block.attn.norm_added_k.weight.mul_(2)
        # The velocity starts small, or all images would drift to one colour and saturate there.
        transformer.proj_out.weight.mul_(0.3)
        basis_TD = torch.linalg.svd(shared_states_TD, full_matrices=False).Vh
        # Not all of it: the layer norm after it would blow up the rounding errors of a token that
        # becomes exactly 0.
        transformer.txt_in.weight.sub_(0.9 * transformer.txt_in.weight @ basis_TD.T @ basis_TD)
    return transformer


def silent_transformer(size: TinySize, *, seed: int) -> QwenImageTransformer2DModel:
    """Build a random float32 transformer to pretrain: blocks are the identity, the output is zero.

    Small models learn faster from there. DiT, arXiv 2212.09748.
    """
    with seeded(seed):
        transformer = _default_transformer(size)
    layers = [transformer.proj_out]
    for block in transformer.transformer_blocks:
        layers += [block.img_mod[1], block.txt_mod[1]]
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return transformer


def _default_transformer(
    size: TinySize, *, zero_cond_t: bool = False
) -> QwenImageTransformer2DModel:
    """Build one with Qwen-Image's patch size and channels, as diffusers draws its weights.

    zero_cond_t: that given images are seen at time 0.
    """
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=size.num_layers,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.num_heads,
        joint_attention_dim=size.text_dim,
        guidance_embeds=False,
        axes_dims_rope=size.rope_axes,
        zero_cond_t=zero_cond_t,
    )


def build_text_encoder(
    size: TinySize, tokenizer: Qwen2Tokenizer, *, seed: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Build a random float32 Qwen2.5-VL of two layers."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0}
    text_config = dict(
        hidden_size=size.text_dim,
        intermediate_size=2 * size.text_dim,
        num_hidden_layers=2,
        num_attention_heads=size.text_dim // 16,
        num_key_value_heads=2,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        initializer_range=0.1,  # keeps the embeddings of different words well apart
        tie_word_embeddings=True,
        rope_parameters=rope,
        rope_scaling=dict(rope, type="mrope"),
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    vision_config = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=size.text_dim,
        patch_size=14,
        fullatt_block_indexes=[0],
    )
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        initializer_range=0.1,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with seeded(seed):
        return Qwen2_5_VLForConditionalGeneration(config)


@torch.no_grad()
def prompt_states(
    text: str, tokenizer: Qwen2Tokenizer, text_encoder: Qwen2_5_VLForConditionalGeneration
) -> Tensor:
    """Return what the transformer reads of a prompt, [tokens, text_dim].

    These are the last hidden states after the template's prefix.
    """
    ids = tokenizer(TEMPLATE_PREFIX + text + TEMPLATE_SUFFIX, return_tensors="pt").input_ids
    states_BTD = text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    return states_BTD[0, TEMPLATE_PREFIX_TOKENS:]


def build_vae(*, seed: int) -> AutoencoderKLQwenImage:
    """Build a float32 VAE, 8× down, 16 latent channels: random encoder, shaped decoder.

    latents_mean and latents_std are the real model's.
    """
    with seeded(seed):
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
    shape_decoder(vae)
    return vae
