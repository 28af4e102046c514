"""Random CLIP folders of transformers and open_clip, and their forward pass in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

SIDE = 32
PATCH = 8
WIDTH = 32
HEADS = 2
EMBEDDING = 768
LAYERS = 2
CONTEXT = 77
LOGIT_SCALE = 4.2
MEAN = [0.5, 0.4, 0.3]
STD = [0.2, 0.3, 0.4]
WORDS = ("red", "blue", "cat", "dog")
HEAD_FILE = "sac+logos+ava1-l14-linearMSE.pth"
HEAD_SIZES = {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}

OPEN_CLIP_CONFIG = {
    "model_cfg": {
        "embed_dim": EMBEDDING,
        "vision_cfg": {
            "image_size": SIDE,
            "layers": LAYERS,
            "width": WIDTH,
            "head_width": WIDTH // HEADS,
            "patch_size": PATCH,
        },
        "text_cfg": {"width": WIDTH, "heads": HEADS, "layers": LAYERS},
    },
    "preprocess_cfg": {"mean": MEAN, "std": STD},
}
# What transformers' tensors outside of the blocks are called in open_clip.
_OUTSIDE = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
}
_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}

State = dict[str, torch.Tensor]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return token → id, with one token for each of WORDS, and the merges that make them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    merges = []
    for word in WORDS:
        start = word[0]
        for letter in [*word[1:-1], word[-1] + "</w>"]:
            merges.append((start, letter))
            start += letter
            tokens.append(start)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges


def pictures() -> np.ndarray:
    """Return four pictures of 16:9, [4, 54, 96, 3] uint8, whose sides and middle differ."""
    noise = np.random.default_rng(0).random((4, 54, 96, 3))
    colours = np.array([[255, 40, 40], [40, 255, 40], [30, 30, 30], [255, 255, 90]])
    ramp = np.linspace(0.2, 1, 96)[:, None]
    return (noise * colours[:, None, None] * ramp).astype(np.uint8)


def random_state(seed: int = 0) -> State:
    """Return the tensors under open_clip's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    state = {
        "logit_scale": torch.tensor(LOGIT_SCALE),
        "token_embedding.weight": draw(len(vocabulary()[0]), WIDTH),
        "positional_embedding": draw(CONTEXT, WIDTH),
        "text_projection": draw(WIDTH, EMBEDDING),
        "visual.class_embedding": draw(WIDTH),
        "visual.positional_embedding": draw((SIDE // PATCH) ** 2 + 1, WIDTH),
        "visual.conv1.weight": draw(WIDTH, 3, PATCH, PATCH),
        "visual.proj": draw(WIDTH, EMBEDDING),
    }
    norms = ["ln_final", "visual.ln_pre", "visual.ln_post"]
    for tower in ("transformer", "visual.transformer"):
        for layer in range(LAYERS):
            block = f"{tower}.resblocks.{layer}"
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
            state[f"{block}.attn.in_proj_weight"] = draw(3 * WIDTH, WIDTH)
            state[f"{block}.attn.in_proj_bias"] = draw(3 * WIDTH)
            state[f"{block}.attn.out_proj.weight"] = draw(WIDTH, WIDTH)
            state[f"{block}.attn.out_proj.bias"] = draw(WIDTH)
            state[f"{block}.mlp.c_fc.weight"] = draw(4 * WIDTH, WIDTH)
            state[f"{block}.mlp.c_fc.bias"] = draw(4 * WIDTH)
            state[f"{block}.mlp.c_proj.weight"] = draw(WIDTH, 4 * WIDTH)
            state[f"{block}.mlp.c_proj.bias"] = draw(WIDTH)
    for norm in norms:
        state[f"{norm}.weight"] = 1 + draw(WIDTH)
        state[f"{norm}.bias"] = draw(WIDTH)
    return state


def embed_image(state: State, pixels_N3HW: torch.Tensor, *, quick: bool = False) -> torch.Tensor:
    """Return normalised embeddings [N, D] of normalised pixels."""
    patches_NWhw = F.conv2d(pixels_N3HW, state["visual.conv1.weight"], stride=PATCH)
    patches_NLW = patches_NWhw.flatten(2).transpose(1, 2)
    start_NLW = state["visual.class_embedding"].expand(len(pixels_N3HW), 1, -1)
    hidden = torch.cat([start_NLW, patches_NLW], dim=1) + state["visual.positional_embedding"]
    hidden = _tower(state, "visual.transformer", _norm(state, "visual.ln_pre", hidden), quick)
    return F.normalize(_norm(state, "visual.ln_post", hidden[:, 0]) @ state["visual.proj"], dim=1)


def embed_text(state: State, ids: list[int], *, quick: bool = False) -> torch.Tensor:
    """Return the normalised embedding [D] of tokens, of which the last is <|endoftext|>."""
    hidden = state["token_embedding.weight"][ids] + state["positional_embedding"][: len(ids)]
    mask = torch.full((len(ids), len(ids)), -math.inf).triu(1)
    hidden = _norm(state, "ln_final", _tower(state, "transformer", hidden[None], quick, mask))
    return F.normalize(hidden[0, -1] @ state["text_projection"], dim=0)


def _norm(state: State, name: str, hidden: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(hidden, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"])


def _tower(
    state: State,
    tower: str,
    hidden_NLW: torch.Tensor,
    quick: bool,
    mask_LL: torch.Tensor | None = None,
) -> torch.Tensor:
    for layer in range(LAYERS):
        block = f"{tower}.resblocks.{layer}"
        query = _norm(state, f"{block}.ln_1", hidden_NLW).transpose(0, 1)
        attended, _ = F.multi_head_attention_forward(
            query,
            query,
            query,
            WIDTH,
            HEADS,
            state[f"{block}.attn.in_proj_weight"],
            state[f"{block}.attn.in_proj_bias"],
            None,
            None,
            False,
            0.0,
            state[f"{block}.attn.out_proj.weight"],
            state[f"{block}.attn.out_proj.bias"],
            training=False,
            need_weights=False,
            attn_mask=mask_LL,
        )
        hidden_NLW = hidden_NLW + attended.transpose(0, 1)
        inner = F.linear(
            _norm(state, f"{block}.ln_2", hidden_NLW),
            state[f"{block}.mlp.c_fc.weight"],
            state[f"{block}.mlp.c_fc.bias"],
        )
        inner = inner * torch.sigmoid(1.702 * inner) if quick else F.gelu(inner)
        hidden_NLW = hidden_NLW + F.linear(
            inner, state[f"{block}.mlp.c_proj.weight"], state[f"{block}.mlp.c_proj.bias"]
        )
    return hidden_NLW


def transformers_state(state: State) -> State:
    """Return the same tensors under the names that CLIPModel itself has."""
    from transformers import CLIPModel

    with torch.device("meta"):
        names = list(CLIPModel(transformers_config()).state_dict())
    return {name: _open_clip_tensor(state, name).clone() for name in names}


def _open_clip_tensor(state: State, name: str) -> torch.Tensor:
    if name in _OUTSIDE:
        return state[_OUTSIDE[name]]
    if name in ("text_projection.weight", "visual_projection.weight"):
        own_name = {"t": "text_projection", "v": "visual.proj"}[name[0]]
        return state[own_name].T.contiguous()

    tower, _, rest = name.partition(".encoder.layers.")
    layer, _, rest = rest.partition(".")
    module, _, kind = rest.rpartition(".")
    prefix = {"text_model": "", "vision_model": "visual."}[tower]
    block = f"{prefix}transformer.resblocks.{layer}"
    if module in _BLOCK:
        return state[f"{block}.{_BLOCK[module]}.{kind}"]
    index = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].index(module)
    return state[f"{block}.attn.in_proj_{kind}"][index * WIDTH : (index + 1) * WIDTH]


def transformers_config():
    from transformers import CLIPConfig

    size = len(vocabulary()[0])
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
        "projection_dim": EMBEDDING,
    }
    text = {"vocab_size": size, "bos_token_id": size - 2, "eos_token_id": size - 1}
    return CLIPConfig(
        text_config=tower | text,
        vision_config=tower | {"image_size": SIDE, "patch_size": PATCH},
        projection_dim=EMBEDDING,
    )


def write_transformers(folder: Path, state: State) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and preprocessor_config.json."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True)
    vocab, merges = vocabulary()
    transformers_config().save_pretrained(folder)
    save_file(transformers_state(state), folder / "model.safetensors")
    CLIPTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)
    preprocess = {
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    return folder


def write_open_clip(folder: Path, state: State, *, quick_gelu: bool = False) -> Path:
    """Write open_clip_config.json, open_clip_pytorch_model.bin, vocab.json and merges.txt."""
    folder.mkdir(parents=True)
    vocab, merges = vocabulary()
    config = json.loads(json.dumps(OPEN_CLIP_CONFIG))
    config["model_cfg"]["text_cfg"]["vocab_size"] = len(vocab)
    config["model_cfg"]["quick_gelu"] = quick_gelu
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.save(state, folder / "open_clip_pytorch_model.bin")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_head(file: Path, seed: int = 1) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for index, (rows, columns) in HEAD_SIZES.items():
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        state[f"layers.{index}.weight"] = weight
        state[f"layers.{index}.bias"] = torch.randn(rows, generator=generator)
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return state
