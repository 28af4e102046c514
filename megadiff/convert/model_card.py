"""Write the README.md of an exported model: what it was made of, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadiff.convert.sources import Source

CARD = "README.md"
TEXT = """---
library_name: diffusers
---
# {base}, post-trained

Made by megadiff out of another model, whose own card tells its data, its limits and its licence.
That licence holds for these weights too.

| | |
|---|---|
{rows}

Nobody has evaluated this export. The run's own held-out evaluation, if it made one, is in the run's
folder.
"""
LOADING = """
```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("FOLDER", torch_dtype=torch.{dtype})
{drawing}```
"""
# Pipelines that draw a picture from a text alone → the argument that the run's guidance is, and by
# how much the pipeline's counts less than the config's.
GUIDANCE = {
    "QwenImagePipeline": ("true_cfg_scale", 0.0),
    "StableDiffusion3Pipeline": ("guidance_scale", 0.0),
    "ZImagePipeline": ("guidance_scale", 1.0),
}


def is_trained(source: Source) -> bool:
    """Tell whether the weights are others than the base's, so that its card is not theirs."""
    return source.progress.step > 0 or source.lora is not None


def is_card(path: Path) -> bool:
    """Tell whether a path within a model's folder is its model card."""
    return path.parent == Path() and path.name.lower() == CARD.lower()


def model_card(source: Source, *, dtype: str) -> str:
    """Return the card of a model, with the line that loads its folder where it is a pipeline.

    source: trained weights with a base. dtype: torch's name of most of the weights' dtype.
    """
    base = source.base
    assert base is not None
    rows = [f"| {key} | {value} |" for key, value in _facts(source, base.home.name).items()]
    text = TEXT.format(base=base.home.name, rows="\n".join(rows))
    index = base.path / "model_index.json"
    if not index.is_file():
        return text
    pipeline = str(json.loads(index.read_text("utf-8")).get("_class_name"))
    return text + LOADING.format(dtype=dtype, drawing=_drawing(source.config, pipeline))


def _drawing(config: Mapping[str, Any], pipeline: str) -> str:
    """Return the lines that save a picture as the run's replicas drew, "" where that is unknown."""
    rollout = config.get("rollout")
    if pipeline not in GUIDANCE or not isinstance(rollout, Mapping):
        return ""
    guidance, less = GUIDANCE[pipeline]
    names = ("height", "width", "num_inference_steps")
    if any(name not in rollout for name in (*names, guidance)):
        return ""

    values = {name: rollout[name] for name in names} | {guidance: rollout[guidance] - less}
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    # without a negative text Qwen-Image's pipeline does not guide at all
    negative = ', negative_prompt=" "' if guidance == "true_cfg_scale" else ""
    return (
        f"settings = dict({arguments}{negative})\n"
        'pipeline("PROMPT", **settings).images[0].save("picture.png")\n'
    )


def _facts(source: Source, base: str) -> dict[str, str]:
    """Return what is known of the run; a LoRA file alone does not tell its run."""
    facts = {"base": f"`{base}`"}
    config = source.config
    if config:
        facts["run"] = f"`{_value(config, 'run', 'name')}`"
        facts["algorithm"] = f"`{_value(config, 'algorithm', 'name')}`"
        facts["steps"] = str(source.progress.step)
    rewards = config.get("reward")
    if isinstance(rewards, Mapping) and rewards:
        facts["rewards"] = ", ".join(
            f"{name} ({_value(rewards, name, 'type')}, weight {_value(rewards, name, 'weight')})"
            for name in rewards
        )
    facts["trained"] = f"LoRA of rank {source.lora.rank}" if source.lora else "whole weights"

    return facts


def _value(config: Mapping[str, Any], section: str, key: str) -> object:
    """Return a key of a config as it was saved, which an older one may lack."""
    values = config.get(section)
    return values.get(key, "unknown") if isinstance(values, Mapping) else "unknown"
