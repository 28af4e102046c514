"""A Transformer Engine that ends each process which imports it."""

from __future__ import annotations

from pathlib import Path


def deadly_transformer_engine(folder: Path) -> Path:
    """Write it into a folder, and return that: it belongs at the front of PYTHONPATH."""
    package = folder / "front" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os\nos._exit(70)\n")
    return package.parent
