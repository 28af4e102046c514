"""Hide from a replica what is installed beside it and what it must not import."""

from __future__ import annotations

import sys
from pathlib import Path


def hide_transformer_engine() -> None:
    """Make this process, and those that it spawns, import this folder's stand-in instead.

    Call it before anything imports peft, which imports Transformer Engine wherever it finds one. A
    replica has no use for it, and beside Transformer Engine 2.11 vllm-omni 0.26 did not start.
    """
    # multiprocessing hands sys.path to a spawned process, and nothing else that would do
    sys.path.insert(0, str(Path(__file__).parent))
