"""Name what a transformer sees beside its latents: texts, masks and given images, of both sides.

A conditioning is name → [B, …]. `X_mask` [B, tokens] bool says how many tokens of the tensors
`X_*` [B, tokens, …] count, from the first. Tensors without such a mask are whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Conditioning = Mapping[str, Tensor]
MASK = "_mask"  # the end of a mask's name
NEGATIVE = "negative_"  # in front of the names of the negative prompt's conditioning
# where Sampling.images: clean latents [B, tokens, C] of all given images, which both sides see
IMAGE_LATENTS = "image_latents"


def mask_of(name: str) -> str:
    """Return the name of the mask that would belong to a tensor.

    prompt_embeds and prompt_ids would have prompt_mask, whose own mask it is as well.
    """
    return name.rpartition("_")[0] + MASK


def text_of_side(
    conditioning: Conditioning, prefix: str, device: torch.device
) -> dict[str, Tensor]:
    """Return the prompts' conditioning, or with prefix "negative_" the negative ones', by name.

    Tensors of numbers are brought to the device; masks stay where they are, as one on the CPU saves
    a synchronisation. Given images are of both sides. Raises ValueError when there are none.
    """
    text = {}
    for name, tensor in conditioning.items():
        if name.startswith(NEGATIVE) == bool(prefix) or name == IMAGE_LATENTS:
            is_mask = tensor.dtype == torch.bool
            moved = tensor if is_mask else tensor.to(device, non_blocking=True)
            text[name.removeprefix(prefix)] = moved

    needed = {name.removeprefix(NEGATIVE) for name in conditioning} - {IMAGE_LATENTS}
    missing = [prefix + name for name in sorted(needed - text.keys())]
    if missing or not needed:
        raise ValueError(
            f"guidance needs {', '.join(missing)} in the conditioning {sorted(conditioning)}; "
            "sample with the same guidance as training uses"
        )
    return text
