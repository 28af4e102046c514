"""Run `megadiff convert` without an installed package. See docs/converting.md.

python tools/convert_ckpt.py SRC DST --to FORMAT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megadiff.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
