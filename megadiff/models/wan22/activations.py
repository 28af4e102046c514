"""What Wan2.2's transformers and VAEs have in memory at work. Data only.

Norms, modulations and residual sums are in float32 whatever the weights are. The VAEs decode one latent, four frames, after
the other.
"""

from __future__ import annotations

from megadiff.models.activations import Activations, Decoding, Kept, Part

MODULATION = Part(
    elements=8, float32=8
)  # the table of six plus the timesteps', and 1 + scale twice
OUTSIDE_MODULATION = Part(
    elements=12, float32=4
)  # embedding and projection of each token's timestep

ACTIVATIONS = Activations(
    whole=Kept(
        tokenwise=Part(elements=7, float32=6),
        gathered=Part(elements=3),
        heads=Part(elements=13, float32=6),
        context=Part(elements=4, float32=2),
        modulation=MODULATION,
        outside=Part(elements=6, float32=2),
        outside_context=Part(elements=4),
        outside_modulation=OUTSIDE_MODULATION,
    ),
    lora=Kept(
        tokenwise=Part(elements=3, float32=3),
        gathered=Part(elements=3),
        heads=Part(elements=10, float32=3),
        context=Part(elements=3, float32=1),
        modulation=MODULATION,
        outside=Part(elements=1, float32=1),
        outside_modulation=OUTSIDE_MODULATION,
    ),
    forward=Part(elements=4, float32=3),
    backward=Part(elements=3, float32=2),
    text_is_stream=False,
)
DECODING = Decoding(
    pixels={"cpu": 2**18, "cuda": 2**25}, bytes_per_pixel=10_752, bytes_per_frame=18
)
