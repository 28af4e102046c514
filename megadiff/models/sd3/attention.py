"""Attend as Stable Diffusion 3 does, with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megadiff.models.joint_attention import JointAttention, WholeStream, WholeStreams
from megadiff.models.packing import PATCH


class SD3Attention(JointAttention):
    """Give the values of diffusers' JointAttnProcessor2_0. Positions are added to image tokens."""

    def prepare(self, transformer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        height, width = kwargs["hidden_states"].shape[-2:]
        streams = WholeStreams(
            text=WholeStream(length=kwargs["encoder_hidden_states"].shape[1]),
            image=WholeStream(length=height * width // PATCH**2),
        )
        return {**kwargs, "joint_attention_kwargs": {"streams": streams}}
