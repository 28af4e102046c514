"""How the bytes of a push travel to the replicas: `sync.transport` = http | shm | nccl | disk."""
