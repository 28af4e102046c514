"""Model folders of any size with random weights, for benchmarks at real size.

    python tools/random_weights.py OUT [--model assets/qwen_image] [--layers N] \\
        [--text-layers N] [--device cuda]

writes a whole model folder, which replicas serve and engines train: 41 GB for Qwen-Image's 20.4 B
(and 14 GB of text encoder, unless --text-layers says otherwise), 10 GB for Wan2.2 TI2V-5B (and 11
GB), 28 GB for BAGEL, which has no text encoder. What it draws is noise; times and memory are the
real model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from random_bagel import write_random_bagel  # beside this file
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.tiny_models import qwen_image, qwen_image_edit, sd3, wan22, z_image
from megadiff.models.adapter import ModelAdapter
from megadiff.models.pipeline_folder import read_index, weighted_components
from megadiff.models.registry import build_adapter
from megadiff.tensors.model_files import read_json

SHARD_BYTES = 4 << 30
GAIN = 0.25  # of a linear layer: with 1 the network amplifies rounding to a fifth of its output
# spread of the modulations' biases: with none, gates are shut and the output shows nothing of the
# blocks
GATE = 0.5


def write_random_transformer(source: Path, out: Path, *, device: str, num_layers: int = 0) -> int:
    """Write the model of source's config.json files with random bfloat16 weights.

    Returns the number of its parameters.

    source: a pipeline folder, of which model_index.json and the config.json files are enough.
    num_layers: 0 keeps the config's. device: on which numbers are drawn. Weights are normal, those
    of norms around 1: output and gradients are finite and not zero. Of several experts each has its
    own. One shard of 4 GiB is in memory at a time.
    """
    out.mkdir(parents=True)
    shutil.copy(source / "model_index.json", out)
    for name in build_adapter(source).components:
        (out / name).mkdir()
        config = read_json(source / name / "config.json")
        if num_layers:
            key = "num_layers" if "num_layers" in config else "n_layers"
            config |= {key: num_layers}
        (out / name / "config.json").write_text(json.dumps(config))
    (out / "scheduler").mkdir()
    config = source / "scheduler" / "scheduler_config.json"
    values = read_json(config) if config.is_file() else qwen_image.SCHEDULER_CONFIG
    (out / "scheduler" / config.name).write_text(json.dumps(values))
    if (source / "vae" / "config.json").is_file():  # some families take sizes from it
        (out / "vae").mkdir()
        shutil.copy(source / "vae" / "config.json", out / "vae")
    adapter = build_adapter(out)
    generator = torch.Generator(device).manual_seed(0)
    return sum(
        _write_component(adapter, name, out / name, generator) for name in adapter.components
    )


def transformer_with_weights(
    model: Path, scratch: Path, *, num_layers: int
) -> tuple[Path, int | None]:
    """Return the folder, or one in scratch with random weights and the number of its parameters.

    Scratch is used where the folder has no weights, or another number of layers is asked for.
    """
    if not num_layers and any((model / "transformer").glob("*.safetensors")):
        return model, None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = scratch / "model"
    return out, write_random_transformer(model, out, device=device, num_layers=num_layers)


def _write_component(
    adapter: ModelAdapter, component: str, folder: Path, generator: torch.Generator
) -> int:
    transformer = adapter.empty_transformer(component)
    shapes = {name: p.shape for name, p in transformer.named_parameters()}
    kinds = adapter.plan.kinds(shapes)
    shard = _constants(adapter, component)
    places: dict[str, str] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        is_gate = (kinds[name] == "modulation" and name.endswith("bias")) or name.endswith(
            "scale_shift_table"
        )
        spread = GATE if is_gate else GAIN * shape[-1] ** -0.5
        tensor = (
            torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
            * spread
        )
        shard[name] = (tensor + 1 if name.endswith("weight") and len(shape) == 1 else tensor).cpu()
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES or place == len(shapes) - 1:
            file = f"diffusion_pytorch_model-{len(set(places.values())):05d}.safetensors"
            save_file(shard, folder / file)
            places |= dict.fromkeys(shard, file)
            shard = {}
    num_parameters = sum(map(torch.Size.numel, shapes.values()))
    index = {"metadata": {"total_size": 2 * num_parameters}, "weight_map": places}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return num_parameters


def _constants(adapter: ModelAdapter, component: str) -> dict[str, Tensor]:
    """Return the buffers that checkpoints hold, as the stock class computes them."""
    if not adapter.plan.constants:
        return {}
    stock = adapter.module_class()
    with init_empty_weights():
        module = stock.from_config(stock.load_config(adapter.model_folder / component))
    return {name: module.get_buffer(name).bfloat16() for name in adapter.plan.constants}


def write_random_pipeline(
    source: Path, out: Path, *, device: str, num_layers: int = 0, text_layers: int = 0
) -> int:
    """Write write_random_transformer's model, and beside it all that a replica needs.

    Those are tokenizers of few words, and every other network of source's configs with random
    bfloat16 weights. text_layers: 0 keeps the configs'.
    """
    num_parameters = write_random_transformer(source, out, device=device, num_layers=num_layers)
    index = read_index(source)
    tokenizers = {name: build() for name, build in TOKENIZERS[str(index["_class_name"])].items()}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(out / name)
    sees_pictures = "processor" in index
    if sees_pictures:
        tokenizers["tokenizer"].save_pretrained(out / "processor")
        # its defaults are the published model's
        Qwen2VLImageProcessorPil().save_pretrained(out / "processor")

    torch.manual_seed(0)
    for name, (library, class_name) in weighted_components(index).items():
        if name in build_adapter(source).components:
            continue
        values = read_json(source / name / "config.json")
        with torch.device(device):
            if library == "diffusers":
                network = _other_network(class_name, values)
            else:
                tokenizer = tokenizers[name.replace("text_encoder", "tokenizer")]
                network = _text_encoder(
                    class_name, values, tokenizer, text_layers, sees_pictures=sees_pictures
                )
        network.save_pretrained(out / name)
        del network  # before the next is drawn: text encoders take gigabytes
    return num_parameters


TOKENIZERS: dict[str, dict[str, Callable[[], Any]]] = {
    "QwenImagePipeline": {"tokenizer": qwen_image.build_tokenizer},
    "QwenImageEditPlusPipeline": {"tokenizer": qwen_image_edit.build_edit_tokenizer},
    "WanPipeline": {"tokenizer": wan22.build_tokenizer},
    "WanImageToVideoPipeline": {"tokenizer": wan22.build_tokenizer},
    "ZImagePipeline": {"tokenizer": z_image.build_tokenizer},
    "StableDiffusion3Pipeline": {
        "tokenizer": sd3.build_clip_tokenizer,
        "tokenizer_2": sd3.build_clip_tokenizer,
        "tokenizer_3": sd3.build_t5_tokenizer,
    },
}


def _other_network(class_name: str, values: dict) -> nn.Module:
    """Draw a VAE."""
    if class_name == "AutoencoderKLWan":
        channels = values["z_dim"]  # the class's own means and spreads are those of 16 channels
        values = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels} | values
    return getattr(diffusers, class_name).from_config(values).to(torch.bfloat16)


def _text_encoder(
    class_name: str, values: dict, tokenizer: Any, num_layers: int, *, sees_pictures: bool
) -> nn.Module:
    # Files have the names of this class, of which the pipeline may use a part.
    stock = getattr(transformers, values.get("architectures", [class_name])[0])
    if stock is Qwen2_5_VLForConditionalGeneration:
        config = _text_config(values, tokenizer, num_layers, sees_pictures=sees_pictures)
    else:
        if num_layers:
            key = "num_layers" if "num_layers" in values else "num_hidden_layers"
            values = values | {key: num_layers}
            if "layer_types" in values:  # newer files list each layer's attention
                values["layer_types"] = values["layer_types"][:num_layers]
        config = stock.config_class(**values)
    return stock._from_config(config, dtype=torch.bfloat16)


def _text_config(
    values: dict, tokenizer: Any, num_layers: int, *, sees_pictures: bool
) -> Qwen2_5_VLConfig:
    """Return the config with what planning does not need.

    That is the rotary embedding and the special tokens' ids. Without pictures no replica keeps the
    vision tower: then it is cut to one layer.
    """
    vision = dict(values["vision_config"])
    if not sees_pictures:
        vision |= {"depth": 1, "fullatt_block_indexes": [0]}
    text = dict(values["text_config"])
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    rope = {
        "rope_type": "default",
        "mrope_section": [head_dim // 8, *[3 * head_dim // 16] * 2],
        "rope_theta": 1e6,
    }
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in qwen_image.SPECIAL_TOKENS}
    text |= {
        "rope_parameters": rope,
        "rope_scaling": dict(rope, type="mrope"),
        "pad_token_id": ids["<|endoftext|>"],
    }
    text |= {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    if num_layers:
        text |= {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=values["tie_word_embeddings"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("assets/qwen_image"),
        help="folder whose configs are taken",
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="of the transformer; 0: as many as its config says"
    )
    parser.add_argument(
        "--text-layers",
        type=int,
        default=0,
        help="of the text encoder; 0: as many as its config says",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"{args.out} exists; name another folder")
    sizes = {"device": args.device, "num_layers": args.layers}
    start = time.perf_counter()
    if read_index(args.model):
        count = write_random_pipeline(args.model, args.out, text_layers=args.text_layers, **sizes)
    else:
        count = write_random_bagel(args.model, args.out, **sizes)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"out": str(args.out), "parameters": count, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
