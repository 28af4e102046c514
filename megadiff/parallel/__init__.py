"""Process meshes and the few collectives of the loop."""
