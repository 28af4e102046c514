"""Load a local CLIP folder, as transformers or open_clip wrote it.

Nothing is fetched.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
)

from megadiff.rewards import open_clip
from megadiff.tensors.model_files import open_weights, read_json, weight_files

# In the order in which they are looked for, after model.safetensors.
WEIGHTS = ("pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def load_config(folder: Path) -> CLIPConfig:
    """Read config.json, or else open_clip_config.json. Raises ValueError for another model."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the path of a CLIP model's folder")

    file = folder / "config.json"
    if not file.is_file():
        if (folder / open_clip.CONFIG).is_file():
            return open_clip.read_config(folder / open_clip.CONFIG)
        raise ValueError(
            f"{folder} is not a CLIP folder: it holds neither config.json nor {open_clip.CONFIG}; "
            "copy one from the hub folder of the model"
        )

    values = read_json(file)
    if values.get("model_type") != "clip":
        raise ValueError(
            f"{file} has model_type={values.get('model_type')!r}, must be 'clip'; give a folder "
            "of a whole CLIP (text and vision), e.g. openai/clip-vit-large-patch14"
        )
    return CLIPConfig.from_dict(values)


def image_side(config: CLIPConfig) -> int:
    """Return the side of the square pictures that the model sees, in pixels."""
    assert isinstance(config.vision_config, CLIPVisionConfig)
    side = config.vision_config.image_size
    if not isinstance(side, int):
        raise ValueError(f"the CLIP's config has image_size={side}, must be one number of pixels")
    return side


def token_limit(config: CLIPConfig) -> int:
    """Return how many tokens the model reads, start and end included."""
    assert isinstance(config.text_config, CLIPTextConfig)
    return config.text_config.max_position_embeddings


def find_weights(folder: Path, weights: str | None) -> list[Path]:
    """Return the files of the folder's weights. weights: a file's name, where it is given.

    Raises ValueError where there are none, or where it must be said which.
    """
    if weights is not None:
        if not (folder / weights).is_file():
            raise ValueError(f"weights={weights}: {folder / weights} does not exist")
        return [folder / weights]

    loose = sorted(path.name for path in folder.glob("*.pt"))
    # HPSv2 lies beside the base model's files then: those would score, and nobody would notice.
    if loose:
        raise ValueError(
            f"{folder} holds {', '.join(loose)}; say which weights to load, e.g. "
            f"args: {{weights: {loose[-1]}}}"
        )
    if any(folder.glob("model.safetensors*")):
        return weight_files(folder)
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(
        f"{folder} holds no weights: looked for model.safetensors, {', '.join(WEIGHTS)}; fetch "
        "the whole folder, or name a file by args: {weights: FILE}"
    )


def load_model(folder: Path, weights: str | None) -> CLIPModel:
    """Load the model in float32, on the CPU.

    Raises ValueError for a torn file, and where its tensors are not those of the config.
    """
    state: dict[str, torch.Tensor] = {}
    files = find_weights(folder, weights)
    for file in files:
        state.update(read_tensors(file))
    if "visual.conv1.weight" in state:
        state = open_clip.to_transformers(state)
    # Earlier transformers saved these; they are 0, 1, 2, ….
    state = {name: state[name] for name in state if not name.endswith("position_ids")}

    model: CLIPModel
    report: dict[str, set]
    # Its report, since missing tensors get random values with no more than a warning.
    model, report = CLIPModel.from_pretrained(
        None,
        config=load_config(folder),
        state_dict=state,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for fault in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, report[f"{fault}_keys"]))
        if names:
            raise ValueError(
                f"{files[0]} does not fit {folder}'s config: {len(names)} tensors are {fault}, "
                f"the first is {names[0]}; take both from one hub folder"
            )
    return model


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read a .safetensors, or a file of torch.save without running what is pickled in it.

    Raises ValueError when it is torn, or holds more than tensors and numbers.
    """
    if file.suffix == ".safetensors":
        opened = open_weights(file)
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 no mapping
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is not a whole file of tensors: "
            f"{str(error)[:200]}; fetch it again"
        ) from error
    # Training scripts save the model beside the epoch, and DistributedDataParallel adds "module.".
    saved = saved.get("state_dict", saved)
    return {name.removeprefix("module."): tensor for name, tensor in saved.items()}


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Load the folder's tokenizer. Raises ValueError where its files are missing."""
    names = {path.name for path in folder.iterdir()}
    # transformers would make one of three tokens, without a word.
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
        raise ValueError(
            f"{folder} holds neither tokenizer.json nor vocab.json and merges.txt; copy "
            "tokenizer.json from openai/clip-vit-large-patch14: OpenAI's and LAION's CLIPs share "
            "one tokenizer"
        )
    return CLIPTokenizer.from_pretrained(folder, local_files_only=True)


def load_image_processor(folder: Path) -> CLIPImageProcessorPil:
    """Load preprocessor_config.json, or take CLIP's published settings at the model's image size.

    The Pillow one, also where torchvision is there: its bicubic resampling is the published one.
    """
    side = image_side(load_config(folder))
    crop = {"height": side, "width": side}
    if (folder / "preprocessor_config.json").is_file():
        processor = CLIPImageProcessorPil.from_pretrained(folder, local_files_only=True)
        if dict(processor.crop_size) != crop:
            raise ValueError(
                f"{folder}/preprocessor_config.json crops to {dict(processor.crop_size)}, the "
                f"model's config says image_size={side}; take both from one hub folder"
            )
        return processor

    colours = {}
    if (folder / open_clip.CONFIG).is_file():
        colours = open_clip.read_colours(folder / open_clip.CONFIG)
    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop, **colours)


def load_aesthetic_head(file: Path) -> nn.Module:
    """Load the linear layers 768-1024-128-64-16-1 of the aesthetic predictor, in float32.

    https://github.com/christophschuhmann/improved-aesthetic-predictor. Raises ValueError.
    """
    # Without initial values: those would use up random numbers of the run.
    with torch.device("meta"):
        # Dropout does nothing here, but the file's names count it. There are no activations.
        head = nn.Sequential(
            nn.Linear(768, 1024),
            nn.Dropout(),
            nn.Linear(1024, 128),
            nn.Dropout(),
            nn.Linear(128, 64),
            nn.Dropout(),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )
    tensors = read_tensors(file)
    state = {name.removeprefix("layers."): tensor for name, tensor in tensors.items()}
    try:
        head.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{file} does not hold linear layers 768-1024-128-64-16-1 named layers.0, 2, 4, 6, 7: "
            f"{error}; take sac+logos+ava1-l14-linearMSE.pth"
        ) from error
    return head.float().eval()
