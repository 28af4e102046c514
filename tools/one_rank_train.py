"""`megadiff` as the first rank of a world that is not there (one_rank.py), one GPU a node.

    python tools/one_rank_train.py N train CONFIG.yaml … key=value …

The loop, its replica and the pushes are real. This rank has its part of prompts, rows and shards.
Shards of the other ranks are copies of its own, for trainer and replica alike, so that the parity
gate holds. No checkpoint is whole, as the others write none. For FSDP2 over dp.
"""

from __future__ import annotations

import os
import sys

from one_rank import check_called, pretend

from megadiff.cli.console import leave
from megadiff.cli.main import main
from megadiff.train import rescue

if __name__ == "__main__":
    world_size, *arguments = sys.argv[1:]
    pretend(int(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # the host's memory and cores are this rank's alone
    rescue.ANSWER_S = 0.0  # nobody answers
    code = main(arguments)
    if code != 2:
        check_called()
    leave(code)
