"""Make a complete random Z-Image pipeline folder for two CPU cores, on which RL learns colours.

All five parts have the real classes; scheduler and prompt template are the real model's. The text
encoder and the transformer are random so that prompts matter (see `build_transformer`), and the
VAE's decoder paints the first three latent channels as colours (see vae.build_kl_vae).
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_models import qwen_image
from examples.tiny_models.parts import keep_variance, seeded, write_folder
from examples.tiny_models.vae import build_kl_vae

NUM_HEADS = 4  # divides by 4 (tp 4, sp 4), unlike the real model's 30
ROPE_AXES = [8, 8, 8]  # they sum to a head's features
TEXT_DIM = 64
BASE_SHIFT = 6.0
TURBO_SHIFT = 3.0
# Qwen3's, for one message of a user
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def write_tiny_pipeline(
    out: Path, *, shift: float = BASE_SHIFT, dtype: str = "float32", seed: int = 0
) -> None:
    """Write the pipeline folder `out`, whole or not at all; the same arguments give the same bytes.

    shift: the scheduler's, by which Base and Turbo are told apart.
    dtype: float32 or bfloat16, of all three networks.
    Raises ValueError when `out` holds something already, and for an unknown dtype.
    """
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(tokenizer, seed=seed)
    shared_states_TD = prompt_states("a picture", tokenizer, text_encoder)
    networks = {
        "transformer": build_transformer(shared_states_TD, seed=seed),
        # facts of Tongyi-MAI/Z-Image
        "vae": build_kl_vae(scaling_factor=0.3611, shift_factor=0.1159, seed=seed),
        "text_encoder": text_encoder,
    }
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=shift, use_dynamic_shifting=False
    )
    # as published: the files hold a Qwen3ForCausalLM, and diffusers loads the model within it
    settings = {"text_encoder": ["transformers", "Qwen3Model"]}
    write_folder(
        out, "ZImagePipeline", networks, tokenizer, scheduler, dtype=dtype, settings=settings
    )


def build_tokenizer() -> Qwen2Tokenizer:
    """Return Qwen-Image's tiny tokenizer with Qwen3's template."""
    tokenizer = qwen_image.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_transformer(shared_states_TD: Tensor, *, seed: int) -> ZImageTransformer2DModel:
    """Build a random float32 transformer in which the prompt matters from the start.

    Linear layers keep their input's variance, gates start open, attention counts double, and what
    is common to all prompts is mostly projected out of the text. The learned padding is random, as
    tokens of zeros would hide mistakes with it. The velocity starts small.
    shared_states_TD: the text encoder's states of a prompt that says nothing.
    """
    with seeded(seed), torch.no_grad():
        transformer = ZImageTransformer2DModel(
            dim=NUM_HEADS * sum(ROPE_AXES),
            n_layers=2,
            n_refiner_layers=1,
            n_heads=NUM_HEADS,
            n_kv_heads=NUM_HEADS,
            cap_feat_dim=TEXT_DIM,
            axes_dims=ROPE_AXES,
            # the real model's: as many positions along the text, the height and the width
            axes_lens=[1536, 512, 512],
        )
        keep_variance(transformer)
        for name, module in transformer.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("adaLN_modulation.0"):
                # Its rows are (scale, gate), for attention and then for the MLP.
                module.bias.view(2, 2, -1)[:, 1] = 1.0
        for pad_token in (transformer.x_pad_token, transformer.cap_pad_token):
            pad_token.normal_()
        # Three quarters of the text are padding: let it carry what it reads of the prompt.
        for block in transformer.context_refiner:
            block.attention.norm_k.weight.mul_(2)
            block.attention_norm2.weight.mul_(3)
        for block in transformer.layers:
            block.attention_norm2.weight.mul_(2)
        transformer.all_final_layer["2-1"].linear.weight.mul_(0.3)

        to_width = transformer.cap_embedder[1]
        basis_TD = torch.linalg.svd(shared_states_TD, full_matrices=False).Vh
        to_width.weight.sub_(0.9 * to_width.weight @ basis_TD.T @ basis_TD)
    return transformer


def build_text_encoder(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen3ForCausalLM:
    """Build a random float32 Qwen3 of three layers; the last one's output is not used."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.1,  # keeps the embeddings of different words well apart
        tie_word_embeddings=True,
    )
    with seeded(seed):
        return Qwen3ForCausalLM(config)


@torch.no_grad()
def prompt_states(text: str, tokenizer: Qwen2Tokenizer, text_encoder: Qwen3ForCausalLM) -> Tensor:
    """Return what the transformer reads of a prompt, [tokens, TEXT_DIM]."""
    message = {"role": "user", "content": text}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2][0]
