"""Process meshes, the few collectives of the loop, and worker processes that never outlive it."""
