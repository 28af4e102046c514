#!/usr/bin/env bash
# Usage: launch/test.sh [pytest arguments]      Sets up .venv and runs the tests; pytest's summary is the last line.
# Examples: launch/test.sh tests/unit        launch/test.sh -m "not slow" -x        launch/test.sh -k parity -n 0
# In two workers (tests/spread.py says which tests share one); -n 0 is none, for a debugger or a few quick tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
# One thread per process, and two that wait for each other do not spin: tests start several processes on few cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -q -ra -n 2 --durations=10 "$@"
