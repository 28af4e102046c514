"""What Qwen-Image's transformer and VAE have in memory at work. Data only."""

from __future__ import annotations

from megadiff.models.activations import Activations, Decoding, Kept, Part, Widened

ACTIVATIONS = Activations(
    whole=Kept(
        tokenwise=Part(elements=8),
        gathered=Part(elements=1),
        heads=Part(elements=10, float32=4),  # q and k within their norms
        outside=Part(elements=4),
    ),
    lora=Kept(
        tokenwise=Part(elements=2),
        gathered=Part(elements=2),
        heads=Part(elements=8, float32=4),
        outside=Part(elements=1),
    ),
    forward=Part(elements=4),
    backward=Part(elements=2),
    text_is_stream=True,
    widened=Widened(block=5, outside=2, forward=4),  # residual sums and norms
    # norms and modulations are computed again, from what is kept of matrix products and attention
    compiled_whole=Kept(
        tokenwise=Part(elements=3),
        gathered=Part(elements=1),
        heads=Part(elements=8),
        outside=Part(elements=4),
    ),
    compiled_lora=Kept(
        tokenwise=Part(elements=2),
        gathered=Part(elements=2),
        heads=Part(elements=8),
        outside=Part(elements=1),
    ),
)
# a CPU is faster where a call's pixels stay in its caches; a GPU takes 145 ms for 16 images of 512² four at a time, 139 all
# at once, but with 3.2 GiB in place of 12.8
DECODING = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=3328)
