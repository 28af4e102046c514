"""Weights in motion: fingerprints, sharded checkpoints, sync to the replicas."""
