"""Shapes: the smallest world in which a text-to-image model can be pretrained, measured exactly and improved by RL."""
