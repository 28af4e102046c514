#!/usr/bin/env bash
# Usage: launch/torchrun.sh N CONFIG.yaml ... [key=value ...]      Trains with N processes on this machine.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
num_processes=$1
shift
exec .venv/bin/torchrun --standalone --nproc-per-node "$num_processes" -m megadiff.cli.main train "$@"
