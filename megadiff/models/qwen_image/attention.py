"""Attend jointly to Qwen-Image's text and image, with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megadiff.models.joint_attention import JointAttention, WholeStream, WholeStreams
from megadiff.models.qwen_image.rotary import rotate


class QwenImageAttention(JointAttention):
    """Give the values of diffusers' QwenDoubleStreamAttnProcessor2_0."""

    rotate = staticmethod(rotate)  # type: ignore[assignment]  # it needs no self

    def prepare(self, transformer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        image_BSC = kwargs["hidden_states"]
        text_BSC = kwargs["encoder_hidden_states"]
        # forward calls pos_embed itself too, but with the length of its own chunk of text
        image_rotary_SD, text_rotary_SD = transformer.pos_embed(
            kwargs["img_shapes"], max_txt_seq_len=text_BSC.shape[1], device=image_BSC.device
        )

        streams = WholeStreams(
            text=WholeStream(
                length=text_BSC.shape[1], rotary_SD=torch.view_as_real(text_rotary_SD)
            ),
            image=WholeStream(
                length=image_BSC.shape[1], rotary_SD=torch.view_as_real(image_rotary_SD)
            ),
            mask=_joint_mask(kwargs.get("encoder_hidden_states_mask"), image_BSC),
        )
        attention_kwargs = {**(kwargs.get("attention_kwargs") or {}), "streams": streams}
        return {**kwargs, "encoder_hidden_states_mask": None, "attention_kwargs": attention_kwargs}


def _joint_mask(text_mask_BS: Tensor | None, image_BSC: Tensor) -> Tensor | None:
    """Return True where a key is attended to: text tokens of the mask, then all image tokens."""
    if text_mask_BS is None:
        return None
    image_mask_BS = torch.ones(image_BSC.shape[:2], dtype=torch.bool, device=image_BSC.device)
    return torch.cat([text_mask_BS.bool(), image_mask_BS], dim=1)[:, None, None, :]
