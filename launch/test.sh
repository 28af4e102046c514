#!/usr/bin/env bash
# Usage: launch/test.sh [--quick|--all] [pytest arguments]
#
# Sets up .venv and runs the tests; pytest's summary is the last line.
#
#   launch/test.sh                     all that needs no GPU and is not marked extra
#   launch/test.sh --all               extra ones, too: they repeat others in one more layout or
#                                      family (one that is named by its path needs --all as well)
#   launch/test.sh --quick             at most 5 minutes on two idle cores, to run while you work:
#                                      tests/unit without what is marked slow, and one real run
#   launch/test.sh --quick -x          ... until the first failure
#   launch/test.sh tests/unit          one folder
#   launch/test.sh -k parity -n 0      tests that match a word, in one process, as a debugger needs
#
# Tests run in two workers. tests/spread.py says which tests share one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
left_out='not extra'
if [[ ${1:-} == --all ]]; then
  shift
  left_out=''
elif [[ ${1:-} == --quick ]]; then
  shift
  left_out='not extra and not slow'
  # The run starts two replicas of a tiny model and trains a step with them.
  real_run=tests/e2e/test_faults.py::test_unicode_and_long_prompts_train
  set -- tests/unit "$real_run" "$@"
fi
launch/setup.sh
# One thread per process, and two that wait for each other do not spin: tests start several
# processes on few cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -q -ra -n 2 --durations=10 -m "$left_out" "$@"
