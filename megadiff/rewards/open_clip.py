"""Read a CLIP of open_clip (3.3.0) as one of transformers: its config, its tensors' names.

Plain ViT CLIPs alone, such as LAION's and HPSv2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import CLIPConfig

from megadiff.process.doors import near
from megadiff.tensors.model_files import read_json

CONFIG = "open_clip_config.json"

# open_clip's defaults, for keys that its config leaves out. Any other key changes the model.
_VISION = {
    "image_size": 224,
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
}
_TEXT = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
}

# open_clip's names → transformers'.
_TOWERS = {
    "transformer.": "text_model.encoder.layers.",
    "visual.transformer.": "vision_model.encoder.layers.",
}
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_OUTSIDE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    # transformers' own spelling
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
# open_clip computes x @ W with these, a linear layer x @ W.T.
_TRANSPOSED = ("text_projection", "visual.proj")


def read_config(file: Path) -> CLIPConfig:
    """Read open_clip_config.json. Raises ValueError for what is no plain ViT CLIP."""
    model = read_json(file).get("model_cfg", {})
    if "embed_dim" not in model:
        raise ValueError(f"{file} has no model_cfg.embed_dim; fetch it again")
    vision = _filled(file, "vision_cfg", model.get("vision_cfg", {}), _VISION)
    text = _filled(file, "text_cfg", model.get("text_cfg", {}), _TEXT)

    return CLIPConfig(
        projection_dim=model["embed_dim"],
        text_config={
            **_tower(model, text, text["heads"]),
            "max_position_embeddings": text["context_length"],
            "vocab_size": text["vocab_size"],
            # open_clip reads the text where its largest token is: <|endoftext|> is the last one.
            "eos_token_id": text["vocab_size"] - 1,
            "bos_token_id": text["vocab_size"] - 2,
        },
        vision_config={
            **_tower(model, vision, vision["width"] // vision["head_width"]),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
    )


def _tower(model: Mapping, values: Mapping, num_heads: int) -> dict[str, object]:
    return {
        "projection_dim": model["embed_dim"],
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "hidden_size": values["width"],
        "intermediate_size": int(values["width"] * values["mlp_ratio"]),
        "num_hidden_layers": values["layers"],
        "num_attention_heads": num_heads,
    }


def _filled(file: Path, key: str, values: Mapping, defaults: Mapping) -> dict:
    """Return the values over the defaults. Raise ValueError for a key that is not among these."""
    for name, value in values.items():
        # A layer count for each stage is a ResNet's.
        if name not in defaults or isinstance(value, list):
            raise ValueError(
                f"{file}: {key}.{name}={value!r} is not of a plain ViT CLIP{near(name, defaults)}; "
                f"can load those with {', '.join(defaults)} alone: for others use a remote reward"
            )
    return {**defaults, **values}


def read_colours(file: Path) -> dict[str, list[float]]:
    """Return image_mean and image_std, as far as open_clip's config names them."""
    preprocess = read_json(file).get("preprocess_cfg", {})
    names = {"mean", "std"} & preprocess.keys()
    return {f"image_{name}": preprocess[name] for name in names}


def to_transformers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename open_clip's tensors to those of CLIPModel. Raises ValueError for an unknown name."""
    renamed = {}
    for name, tensor in state.items():
        tower, _, in_tower = name.rpartition("resblocks.")
        layer, _, rest = in_tower.partition(".")
        module, _, kind = rest.rpartition(".")

        if name in _OUTSIDE:
            renamed[_OUTSIDE[name]] = tensor.T if name in _TRANSPOSED else tensor
        elif tower in _TOWERS and module in _BLOCK:
            renamed[f"{_TOWERS[tower]}{layer}.{_BLOCK[module]}.{kind}"] = tensor
        elif tower in _TOWERS and kind.startswith("in_proj_"):
            attention = f"{_TOWERS[tower]}{layer}.self_attn"
            for head, rows in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{attention}.{head}_proj.{kind.removeprefix('in_proj_')}"] = rows
        elif name != "attn_mask":  # the causal mask, which transformers builds itself
            raise ValueError(
                f"the checkpoint's tensor {name} is not of open_clip's plain ViT CLIP; for other "
                "models use a remote reward"
            )
    return renamed
