"""Train large diffusion transformers with online RL: trainer, replicas, and weights between."""

__version__ = "0.1.0"
