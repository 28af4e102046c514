"""Make a complete random Wan2.2 pipeline folder of TI2V-5B's kind or T2V-A14B's, for two CPU cores.

All parts have the real classes. The transformers are random so that prompts and timesteps matter
to them (see `build_transformer`), and the two experts differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from examples.tiny_models.parts import WORDS, check_choice, keep_variance, seeded, write_folder
from examples.tiny_models.vae import shape_decoder
from megadiff.models.wan22.checkpoint import HIGH_NOISE, LOW_NOISE

TEXT_DIM = 32
NUM_HEADS = 4
# vllm-omni splits the rotary channels by thirds, diffusers by sixths: they agree where 6 divides
# the number.
HEAD_DIM = 24
RESERVED = ("<pad>", "</s>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class TinyKind:
    """Tell the models apart. boundary_ratio: None for one transformer. channels: of a latent.

    is_residual: the VAE of TI2V-5B, which turns 16×16 pixels into a latent, not 8×8.
    given_channels: that the transformer takes beside the latents, of a given first frame.
    """

    boundary_ratio: float | None
    expand_timesteps: bool = False
    channels: int = 16
    is_residual: bool = False
    given_channels: int = 0
    pipeline_class: str = "WanPipeline"


KINDS = {
    "ti2v_5b": TinyKind(boundary_ratio=None, expand_timesteps=True, channels=48, is_residual=True),
    "t2v_a14b": TinyKind(boundary_ratio=0.875),
    "t2v_1_3b": TinyKind(boundary_ratio=None),  # Wan2.1
    "i2v_a14b": TinyKind(
        boundary_ratio=0.9, given_channels=20, pipeline_class="WanImageToVideoPipeline"
    ),
}
# TI2V-5B's; with the 12 of T2V-A14B few steps would hardly reach the low-noise expert.
FLOW_SHIFT = 5.0


def write_tiny_pipeline(
    out: Path, *, kind: str = "ti2v_5b", dtype: str = "float32", seed: int = 0
) -> None:
    """Write the pipeline folder `out`, whole or not at all; the same arguments give the same bytes.

    kind: a key of KINDS. dtype: float32 or bfloat16, of all networks.
    Raises ValueError when `out` holds something already, and for an unknown kind or dtype.
    """
    check_choice("kind", kind, KINDS)
    tiny = KINDS[kind]
    tokenizer = build_tokenizer()
    networks: dict[str, nn.Module] = {
        HIGH_NOISE: build_transformer(tiny, seed=seed),
        "text_encoder": build_text_encoder(tokenizer, seed=seed),
        "vae": build_vae(tiny, seed=seed),
    }
    settings: dict[str, object] = {
        "boundary_ratio": tiny.boundary_ratio,
        "expand_timesteps": tiny.expand_timesteps,
        # transformers 5 calls the class TokenizersBackend, a name that 4 does not know.
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    if tiny.boundary_ratio is None:
        settings[LOW_NOISE] = [None, None]
    else:
        networks[LOW_NOISE] = build_transformer(tiny, seed=seed + 1)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=FLOW_SHIFT,
    )
    if tiny.given_channels:  # Wan2.1's has an encoder of images
        settings |= {"image_encoder": [None, None], "image_processor": [None, None]}
    write_folder(
        out, tiny.pipeline_class, networks, tokenizer, scheduler, dtype=dtype, settings=settings
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a unigram model without training: WORDS, single letters and all bytes.

    No prompt has unknown tokens.
    """
    vocab = [(token, 0.0) for token in RESERVED]
    vocab += [(f"▁{word}", -1.0) for word in sorted(set(WORDS))]
    vocab += [(letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"]
    vocab += [(f"<0x{byte:02X}>", -8.0) for byte in range(256)]
    unknown = RESERVED.index("<unk>")
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    end = RESERVED.index("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def build_text_encoder(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        d_model=TEXT_DIM,
        d_kv=8,
        d_ff=2 * TEXT_DIM,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
    )
    with seeded(seed):
        return UMT5EncoderModel(config)


@torch.no_grad()
def build_transformer(tiny: TinyKind, *, seed: int) -> WanTransformer3DModel:
    """Build a random float32 transformer with Wan's patch size, in which the prompt matters.

    Linear layers keep their input's variance, gates start at 1, and text values count twice. The
    velocity starts small.
    """
    with seeded(seed):
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=NUM_HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=tiny.channels + tiny.given_channels,
            out_channels=tiny.channels,
            text_dim=TEXT_DIM,
            freq_dim=64,
            ffn_dim=2 * NUM_HEADS * HEAD_DIM,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=64,
        )
        keep_variance(transformer)
    for block in transformer.blocks:
        # The gates of self attention and of the feed-forward layer.
        block.scale_shift_table[:, [2, 5]] += 1.0
        block.attn2.to_v.weight.mul_(2)
    transformer.proj_out.weight.mul_(0.3)
    return transformer


def build_vae(tiny: TinyKind, *, seed: int) -> AutoencoderKLWan:
    """Build a float32 VAE: random encoder, a decoder that paints three channels as colours.

    latents_mean and latents_std differ between channels, so that a swap of them shows.
    """
    channels = tiny.channels
    residual = {
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "is_residual": True,
    }
    with seeded(seed):
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1] if tiny.is_residual else [1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=torch.linspace(-1, 1, channels).tolist(),
            latents_std=torch.linspace(0.5, 2, channels).tolist(),
            **(residual if tiny.is_residual else {}),
        )
    shape_decoder(vae, with_time=True)
    return vae
