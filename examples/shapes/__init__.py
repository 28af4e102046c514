"""Pretrain, measure exactly and improve by RL a text-to-image model, in the smallest such world."""
