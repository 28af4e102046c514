"""Write a LLaVA folder with random weights, which vLLM serves as a judge.

    python tools/random_llava.py OUT [--tiny] [--device cuda] [--no-weights]

LLaVA-1.5 7B in shape: 7.1 B parameters, 14 GB in bfloat16, 576 tokens a picture. --tiny: 0.1 M, for
a CPU. --no-weights: configs alone, for `vllm --load-format dummy`. Nothing is downloaded: the
tokenizer knows bytes, yes and no. The answers are noise; times and memory are the real model's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

WORDS = ("yes", "no", "Yes", "No")
IMAGE = "<image>"
SPECIAL = ("<s>", "</s>", "<pad>", IMAGE)
CHAT = """{{ bos_token }}{% for message in messages %}USER: {% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<image>
{% endif %}{% endfor %}{% endif %} {% endfor %}ASSISTANT:"""
SHARD_BYTES = 4 << 30
SPREAD = 0.02  # of weights at initialisation, as Llama's
# Of so narrow a model; with 0.02 its answers would hardly depend on the picture.
TINY_SPREAD = 0.2


def write_llava(
    out: Path, *, is_tiny: bool = False, device: str = "cpu", has_weights: bool = True
) -> int:
    """Write the folder and return the number of its parameters."""
    out.mkdir(parents=True)
    config = _config(is_tiny)
    config.save_pretrained(out)
    _tokenizer(config.text_config.vocab_size).save_pretrained(out)
    _write_processor(out, config.vision_config)

    with torch.device("meta"):
        shapes = LlavaForConditionalGeneration(config).state_dict()
    if has_weights:
        _write_weights(out, shapes, device=device, spread=TINY_SPREAD if is_tiny else SPREAD)
    return sum(tensor.numel() for tensor in shapes.values())


def _config(is_tiny: bool) -> LlavaConfig:
    text = {"vocab_size": 32064, "max_position_embeddings": 4096}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 24, "image_size": 336, "patch_size": 14, "projection_dim": 768}
    if is_tiny:
        # vLLM's attention on a CPU takes heads of 32, 64, 80, …
        small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        text |= {**small, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 320}
        vision |= {**small, "num_hidden_layers": 3, "image_size": 64, "patch_size": 16}
    return LlavaConfig(
        text_config=LlamaConfig(**text),
        vision_config=CLIPVisionConfig(**vision),
        image_token_index=SPECIAL.index(IMAGE),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
        tie_word_embeddings=False,
    )


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and WORDS, alone and after a space."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*SPECIAL, *letters))}
    merges = []
    # With the space first: "yes" would else be merged before the space can join.
    for word in (*(f"Ġ{word}" for word in WORDS), *WORDS):
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    # A random model samples any id, and the server must be able to write each.
    for number in range(len(vocab), vocab_size):
        vocab[f"<unused{number}>"] = number

    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def _write_processor(out: Path, vision: CLIPVisionConfig) -> None:
    side = vision.image_size
    pictures = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,  # CLIP's class token
    }
    (out / "preprocessor_config.json").write_text(json.dumps(pictures))
    (out / "processor_config.json").write_text(json.dumps(processor))


def _write_weights(out: Path, shapes: dict[str, Tensor], *, device: str, spread: float) -> None:
    torch.manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, shape in shapes.items():
        if num_bytes > SHARD_BYTES * len(shards):
            shards.append({})
        drawn = torch.empty(shape.shape, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight") or "layernorm" in name or "layer_norm" in name:
            drawn.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            drawn.normal_(0.0, spread)
        shards[-1][_served_name(name)] = drawn.cpu()
        num_bytes += drawn.nbytes

    index = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": index})
    (out / "model.safetensors.index.json").write_text(text)


def _served_name(name: str) -> str:
    """Return the published name: vLLM reads a level that transformers 5 has left out."""
    tower = "model.vision_tower."
    if name.startswith(tower) and not name.startswith(f"{tower}vision_model."):
        return name.replace(tower, f"{tower}vision_model.", 1)
    return name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a LLaVA folder with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-weights", action="store_true")
    args = parser.parse_args(argv)
    count = write_llava(
        args.out, is_tiny=args.tiny, device=args.device, has_weights=not args.no_weights
    )
    sys.stdout.write(f"{args.out}: {count / 1e9:.4g} B parameters\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
