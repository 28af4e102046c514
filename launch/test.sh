#!/usr/bin/env bash
# Usage: launch/test.sh [pytest arguments]      Sets up .venv and runs the tests; pytest's summary is the last line.
# Examples: launch/test.sh tests/unit        launch/test.sh -m "not slow" -x        launch/test.sh -k parity
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
# One thread per process: tests start several on few cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -q -ra --durations=10 "$@"
