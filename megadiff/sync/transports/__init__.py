"""Carry the bytes of a push to the replicas: `sync.transport` = http | shm | nccl | disk."""
