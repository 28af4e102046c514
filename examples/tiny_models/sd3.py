"""Make a complete random Stable Diffusion 3 pipeline folder of any of its kinds, for two CPU cores.

All parts have the real classes: two CLIP encoders and a T5, each with its tokenizer. The
transformer is random so that the prompt matters, above all through the pooled vector (see
`build_transformer`). The decoder is shaped, as a random one paints near grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from examples.tiny_models.parts import WORDS, check_choice, keep_variance, seeded, write_folder
from examples.tiny_models.vae import build_kl_vae

NUM_HEADS = 4  # divides by tp 4 and sp 4
HEAD_DIM = 16
TEXT_DIM = 48  # of T5; both CLIP widths together are less, as in the real models
CLIP_DIMS = (16, 24)
# vllm-omni makes an image of 512² when it starts, which has 32 tokens a side
MOST_TOKENS_A_SIDE = 32


@dataclass(frozen=True, kw_only=True)
class TinyKind:
    """Tell the models apart, each of three blocks.

    dual_attention: the blocks in which the image also attends to itself alone. qk_norm: of heads.
    """

    dual_attention: tuple[int, ...] = ()
    qk_norm: str | None = "rms_norm"


KINDS = {
    "3_5_medium": TinyKind(dual_attention=(0, 1)),
    "3_5_large": TinyKind(),
    "3_medium": TinyKind(qk_norm=None),
}


def write_tiny_pipeline(
    out: Path, *, kind: str = "3_5_medium", dtype: str = "float32", seed: int = 0
) -> None:
    """Write the pipeline folder `out`, whole or not at all; the same arguments give the same bytes.

    kind: a key of KINDS. dtype: float32 or bfloat16, of all networks.
    Raises ValueError when `out` holds something already, and for an unknown kind or dtype.
    """
    check_choice("kind", kind, KINDS)
    clip_tokenizer = build_clip_tokenizer()
    t5_tokenizer = build_t5_tokenizer()
    networks: dict[str, nn.Module] = {
        "text_encoder": build_clip(clip_tokenizer, CLIP_DIMS[0], seed=seed),
        "text_encoder_2": build_clip(clip_tokenizer, CLIP_DIMS[1], seed=seed + 1),
        "text_encoder_3": build_t5(t5_tokenizer, seed=seed),
        # facts of stabilityai/stable-diffusion-3.5-medium
        "vae": build_kl_vae(scaling_factor=1.5305, shift_factor=0.0609, seed=seed),
    }
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    tokenizers = {"tokenizer_2": clip_tokenizer, "tokenizer_3": t5_tokenizer}
    pipeline = StableDiffusion3Pipeline(
        transformer=None,
        scheduler=scheduler,
        tokenizer=clip_tokenizer,
        **networks,
        **tokenizers,
    )
    _, _, shared_BD, _ = pipeline.encode_prompt(
        ["a picture"], None, None, do_classifier_free_guidance=False
    )
    networks["transformer"] = build_transformer(KINDS[kind], shared_BD[0], seed=seed)
    write_folder(
        out,
        "StableDiffusion3Pipeline",
        networks,
        clip_tokenizer,
        scheduler,
        dtype=dtype,
        settings={"image_encoder": [None, None], "feature_extractor": [None, None]},
        more_tokenizers=tokenizers,
    )


@torch.no_grad()
def build_transformer(
    kind: TinyKind, shared_pooled_D: Tensor, *, seed: int
) -> SD3Transformer2DModel:
    """Build a random float32 transformer in which the prompt matters from the start.

    Linear layers keep their input's variance, gates start at 1, text values count twice, and what
    is common to all prompts is taken out of the pooled vector. The velocity starts small.
    shared_pooled_D: the pooled vector of a prompt that says nothing.
    """
    with seeded(seed):
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=3,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=NUM_HEADS,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=NUM_HEADS * HEAD_DIM,
            pooled_projection_dim=sum(CLIP_DIMS),
            pos_embed_max_size=MOST_TOKENS_A_SIDE,
            dual_attention_layers=kind.dual_attention,
            qk_norm=kind.qk_norm,
        )
        keep_variance(transformer)
        for name, module in transformer.named_modules():
            if name.endswith(("norm1.linear", "norm1_context.linear")):
                # rows are (shift, scale, gate), for each attention and for the MLP; the last
                # block's text has (scale, shift) alone
                rows = module.bias.view(-1, NUM_HEADS * HEAD_DIM)
                rows[2::3] = 1.0
    for block in transformer.transformer_blocks:
        block.attn.add_v_proj.weight.mul_(2)
    pooled = transformer.time_text_embed.text_embedder.linear_1
    pooled.weight.mul_(2)
    pooled.bias.sub_(pooled.weight @ shared_pooled_D)
    transformer.proj_out.weight.mul_(0.3)
    return transformer


def build_clip(tokenizer: CLIPTokenizer, width: int, *, seed: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # keeps different words well apart; the real encoders' embeddings are trained
        initializer_range=0.3,
        initializer_factor=2.0,
    )
    with seeded(seed):
        return CLIPTextModelWithProjection(config).eval()


def build_t5(tokenizer: T5Tokenizer, *, seed: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        d_model=TEXT_DIM,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    with seeded(seed):
        return T5EncoderModel(config).eval()


def build_clip_tokenizer() -> CLIPTokenizer:
    """Build a byte-level BPE without training: all 256 bytes, and WORDS as one token each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        *first, last = word.lower()
        ends = [*first, f"{last}</w>"]
        begin = ends[0]
        for end in ends[1:]:
            if begin + end not in vocab:
                vocab[begin + end] = len(vocab)
                merges.append((begin, end))
            begin += end
    for mark in ("<|startoftext|>", "<|endoftext|>"):
        vocab[mark] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token="<|endoftext|>")


def build_t5_tokenizer() -> T5Tokenizer:
    """Build a unigram model without training: WORDS and printable ASCII; others are unknown."""
    vocab = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    vocab += [(f"▁{word}", -1.0) for word in sorted(set(WORDS))]
    vocab += [("▁", -4.0), *((chr(code), -4.0) for code in range(33, 127))]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
