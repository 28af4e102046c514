"""What a transformer and a VAE have in memory while they work, in units that a planner adds up. Data of each family.

Counted from what autograd keeps of the stock modules; tests hold the figures against it, in the stock modules and in both
engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements a token, in units of the transformer's width. float32: those of them that are so whatever engine.dtype is."""

    elements: float
    float32: float = 0.0

    def num_bytes(self, itemsize: int) -> float:
        """Of a token and a unit of width. itemsize: bytes of a number of engine.dtype."""
        return (self.elements - self.float32) * itemsize + self.float32 * 4


NOTHING = Part(elements=0)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What autograd keeps of a forward pass, upper bounds.

    Of each block, tokenwise: around norms and modulations, split over tokens. gathered: what projections read, of all tokens
    of the tensor-parallel group. heads: q, k and v around norms, attention and its output projection's input. context: of
    each token of the text that cross attention reads, k and v likewise. modulation: where each token has a timestep of its
    own. The MLP's two are counted from its width. Outside of the blocks, outside: of each of their tokens.
    outside_context: of each token of text; outside_modulation: as modulation.
    """

    tokenwise: Part
    gathered: Part
    heads: Part
    context: Part = NOTHING
    modulation: Part = NOTHING
    outside: Part
    outside_context: Part = NOTHING
    outside_modulation: Part = NOTHING


@dataclass(frozen=True, kw_only=True)
class Widened:
    """Elements a token, in units of the transformer's width, that float32 residual streams make wider: of what a block keeps,
    of what is kept outside of blocks, and of a forward without autograd."""

    block: int = 0
    outside: int = 0
    forward: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Of a family's transformer. whole, lora: what is kept where all weights are trained, or low-rank pairs beside frozen
    ones, whose factors keep nothing; compiled_whole, compiled_lora: the same of compiled blocks, by default as if they were
    not. forward: what tokens have at once while a block is at work without autograd, beside
    the MLP's. backward: gradients that are alive at once beside what was kept. text_is_stream: whether text goes through
    the blocks as the image does; else cross attention reads it. widened: by model.float32_streams."""

    whole: Kept
    lora: Kept
    forward: Part
    backward: Part
    text_is_stream: bool
    compiled_whole: Kept | None = None
    compiled_lora: Kept | None = None
    widened: Widened = Widened()

    def kept(self, *, lora: bool, compiled: bool) -> Kept:
        if lora:
            return (self.compiled_lora if compiled else None) or self.lora
        return (self.compiled_whole if compiled else None) or self.whole


@dataclass(frozen=True, kw_only=True)
class TokenCount:
    """Of one forward of one sample. is_modulated: whether each token has a timestep of its own."""

    image: int
    text: int
    is_modulated: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a replica turns latents into pixels: as many samples at once as have at most `pixels` of all their frames, by kind
    of device, and at least one. bytes_per_pixel: of the decoder's bfloat16 activations for each pixel of a frame, however
    many frames follow each other; bytes_per_frame: of each frame's pixel, of a video that grows."""

    pixels: Mapping[str, int]
    bytes_per_pixel: int
    bytes_per_frame: int = 0

    def num_rows(self, device: str, *, num_frames: int, height: int, width: int) -> int:
        return max(1, self.pixels[device] // (num_frames * height * width))

    def num_bytes(
        self, rows: int, *, num_frames: int, height: int, width: int, itemsize: int
    ) -> int:
        """Beside the decoder's weights, of samples on a GPU (an estimate)."""
        rows = min(rows, self.num_rows("cuda", num_frames=num_frames, height=height, width=width))
        per_pixel = self.bytes_per_pixel + self.bytes_per_frame * num_frames
        return rows * height * width * per_pixel * itemsize // 2
