"""Split one transformer over ranks: meshes, collectives, plans and layers."""
