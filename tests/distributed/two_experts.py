"""What the tests of a model of two experts share: batches whose windows fall to either, and all
that an engine holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.tiny_models.wan22 import TEXT_DIM
from megadiff.engines.engine import Engine
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.types import Sampling, TrainBatch

HIGH, LOW = "transformer", "transformer_2"
# 45 tokens, an odd number; 3 steps of 6 are the high-noise expert's
SAMPLING = Sampling(
    height=48,
    width=80,
    num_frames=9,
    num_inference_steps=6,
    guidance_scale=3.0,
    guidance_scale_2=2.0,
)
WINDOWS = {  # of the 4 groups; two ranks have two each
    "apart": (
        0,
        1,
        3,
        3,
    ),  # the first rank has high-noise rows only, the second low-noise rows only
    "mixed": (2, 0, 3, 2),
    "low": (3, 3, 3, 3),
}


def batch_of(adapter: WanAdapter, windows: str, dp: int = 1, dp_rank: int = 0) -> TrainBatch:
    """This rank's part of 4 groups of 2 samples; the second group has no weight."""
    generator = torch.Generator().manual_seed(5)
    num_tokens, channels = adapter.latents_shape(SAMPLING)
    conditioning = {}
    for prefix, widths in (("", (9, 6, 7, 5)), ("negative_", (3, 3, 3, 3))):
        conditioning[f"{prefix}prompt_embeds"] = torch.randn(
            4, max(widths), TEXT_DIM, generator=generator
        )
        conditioning[f"{prefix}prompt_mask"] = (
            torch.arange(max(widths)) < torch.tensor(widths)[:, None]
        )
    groups_N = torch.arange(8) // 2
    mine_N, mine_P = (slice(size // dp * dp_rank, size // dp * (dp_rank + 1)) for size in (8, 4))
    return TrainBatch(
        latents_NSLC=torch.randn(8, 3, num_tokens, channels, generator=generator)[mine_N],
        old_log_probs_NW=torch.full((8, 2), -3.0, dtype=torch.float64)[mine_N],
        window_start_N=torch.tensor(WINDOWS[windows])[groups_N][mine_N],
        trained_steps_NK=torch.arange(2).repeat(8, 1)[mine_N],
        advantages_N=torch.randn(8, generator=generator)[mine_N],
        weights_N=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])[mine_N],
        group_index_N=groups_N[mine_N] - groups_N[mine_N][0],
        conditioning={name: value_P[mine_P] for name, value_P in conditioning.items()},
        schedule=adapter.schedule(SAMPLING),
        sampling=SAMPLING,
        denominator=12.0,
    )


def held(engine: Engine, component: str) -> dict[str, Tensor]:
    """All that a checkpoint would have of it, and what forward uses."""
    pieces = engine.members[component].shards()
    held = {
        f"{key}#{place}": each.local.clone()
        for key, many in pieces.items()
        for place, each in enumerate(many)
    }
    return held | {
        name: t for bucket in engine.named_weights(1 << 20, [component]) for name, t in bucket
    }


@contextmanager
def exact() -> Iterator[None]:
    """Few text tokens, among which gradients of single ones do not drown, and a kernel that does
    not depend on the batch's size; recomputation included.
    """
    with patch("megadiff.models.wan22.text.TEXT_TOKENS", 17), sdpa_kernel(SDPBackend.MATH):
        yield
