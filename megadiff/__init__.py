"""Online RL post-training of large diffusion transformers: trainer, rollout replicas, and the weights between them."""

__version__ = "0.1.0"
