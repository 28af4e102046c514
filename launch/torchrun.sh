#!/usr/bin/env bash
# Usage: launch/torchrun.sh N CONFIG.yaml ... [key=value ...]
# Trains with N processes on this machine.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
num_processes=$1
shift
# Asked to stop, ranks save the last finished step first. torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
exec .venv/bin/torchrun --standalone --nproc-per-node "$num_processes" \
  -m megadiff.cli.main train "$@"
