"""Make a complete random Qwen-Image-Edit pipeline folder, of 2509's kind or 2511's, for two cores.

All parts have the real classes. It is the tiny Qwen-Image with a processor for pictures, a template
of 64 tokens in front of them, and with zero_cond_t or without.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.tiny_models.parts import WORDS, check_choice, write_folder
from examples.tiny_models.qwen_image import (
    SCHEDULER_CONFIG,
    SIZES,
    TEMPLATE_START_WORDS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from megadiff.models.qwen_image_edit.text import PREFIX_TOKENS, TEMPLATE, PictureProcessor, encode

KINDS = {"2509": False, "2511": True}  # → zero_cond_t
# Further words of the template and of edits, of one token each.
EDIT_WORDS = (
    "key features input ( then explain how user instruction should alter or modify Generate new "
    "meets requirements while maintaining consistency original where appropriate make it into turn"
).split()
START_WORDS = (*TEMPLATE_START_WORDS, "color", "),", "'s", "Picture", "make")
PIXELS = (28 * 28, 84 * 84)  # least and most of a picture for the text encoder: 1 to 9 tokens
PROCESSOR_CLASSES = ["transformers", "Qwen2VLProcessor"]


def write_tiny_pipeline(
    out: Path, *, kind: str = "2511", dtype: str = "float32", seed: int = 0
) -> None:
    """Write the pipeline folder `out`, whole or not at all; the same arguments give the same bytes.

    kind: a key of KINDS. dtype: float32 or bfloat16, of all three networks.
    Raises ValueError when `out` holds something already, and for an unknown kind or dtype.
    """
    check_choice("kind", kind, KINDS)
    tokenizer = build_edit_tokenizer()
    processor = build_processor(tokenizer)
    text_encoder = build_text_encoder(SIZES["tiny"], tokenizer, seed=seed)
    shared_states_TD = _grey_states(processor, text_encoder)
    transformer = build_transformer(
        SIZES["tiny"], shared_states_TD, seed=seed, zero_cond_t=KINDS[kind]
    )
    networks = {
        "transformer": transformer,
        "vae": build_vae(seed=seed),
        "text_encoder": text_encoder,
    }

    write_folder(
        out,
        "QwenImageEditPlusPipeline",
        networks,
        tokenizer,
        FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG),
        dtype=dtype,
        settings={"processor": PROCESSOR_CLASSES},
        image_processor=processor.image_processor,
    )


def build_edit_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer by which the template has as many tokens as the real model's."""
    tokenizer = build_tokenizer((*WORDS, *EDIT_WORDS), START_WORDS)
    prefix = TEMPLATE.partition("{}")[0]
    assert len(tokenizer(prefix).input_ids) == PREFIX_TOKENS
    return tokenizer


def build_processor(tokenizer: Qwen2Tokenizer) -> PictureProcessor:
    """Build a processor whose pictures have few tokens for the text encoder."""
    least, most = PIXELS
    image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": least, "longest_edge": most})
    return PictureProcessor(image_processor, tokenizer)


def _grey_states(
    processor: PictureProcessor, text_encoder: Qwen2_5_VLForConditionalGeneration
) -> Tensor:
    """Return what the transformer reads of an edit that says nothing, [tokens, text_dim]."""
    grey_HWC = torch.full((64, 64, 3), 128, dtype=torch.uint8)
    embeds_BTD, _ = encode(["make it"], [(grey_HWC,)], processor, text_encoder)
    return embeds_BTD[0]
