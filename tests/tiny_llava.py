"""Write a random LLaVA folder (CLIP vision tower and Llama, 0.3 M parameters) that vLLM serves.

LLaVA, as Qwen-VL's processors need torchvision, which the CPU installation leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)

from examples.tiny_models.parts import seeded

END = "<|im_end|>"
PAD = "<|endoftext|>"
IMAGE = "<image>"
# Of one token each; Ġ is the tokenizer's letter for a space.
WORDS = ("Yes", "No", "yes", "no", "ĠYes", "ĠNo", "Ġyes", "Ġno", "Ġthe", "Ġimage", "Ġa", "user")
CHAT = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 64  # pixels, in patches of 16


def write_tiny_llava(folder: Path, *, seed: int = 0) -> Path:
    """Write the folder and return it."""
    tokenizer = _tokenizer()
    with seeded(seed):
        model = LlavaForConditionalGeneration(_config(tokenizer)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _rename_weights(folder / "model.safetensors")

    square = {"height": SIDE, "width": SIDE}
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": square,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 16,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _config(tokenizer: PreTrainedTokenizerBase) -> LlavaConfig:
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    text = LlamaConfig(
        **shape,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's attention on CPUs takes 32, 64, 80, …
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        **shape, num_hidden_layers=3, image_size=SIDE, patch_size=16, initializer_range=0.2
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_id,
        image_token_id=image_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte tokenizer in which each of WORDS is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = []
    # Words behind a space first: "ĠYes" is merged from the left, by tokens of its own.
    for word in sorted(WORDS, key=lambda word: not word.startswith("Ġ")):
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[PAD, "<|im_start|>", END, IMAGE],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def _rename_weights(file: Path) -> None:
    """Write the published names of LLaVA's vision tower, which vLLM reads and transformers not."""
    published = {}
    for name, tensor in load_file(file).items():
        if name.startswith("vision_tower.") and ".vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        published[name] = tensor
    save_file(published, file, metadata={"format": "pt"})
