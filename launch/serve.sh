#!/usr/bin/env bash
# Usage: launch/serve.sh N CONFIG.yaml ... [key=value ...]
# Serves N replicas of a run on this machine, each on an equal part of its GPUs.
#
# MASTER_ADDR, the name or address of a machine that trains, says by which network they are reached;
# without it on loopback only. MEGADIFF_TOKEN is then needed, the trainer's.
# Ends when the last replica has ended, or when it is asked to (SIGTERM, Ctrl-C).
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
num_replicas=$1
shift
# A container image may bring its own Python, and see a .venv that does not work in it.
if .venv/bin/python -c '' 2>/dev/null; then
  PATH=$PWD/.venv/bin:$PATH
fi
if ! command -v megadiff >/dev/null; then
  echo "error: $PWD has no .venv; run launch/setup.sh" >&2
  exit 2
fi

# CUDA_VISIBLE_DEVICES is Slurm's or the user's; without it all GPUs count, and none on a CPU.
# nvidia-smi says on the same stream that it has failed.
all=${CUDA_VISIBLE_DEVICES-$(timeout 60 nvidia-smi --query-gpu=index --format=csv,noheader \
  2>/dev/null | grep -xE '[0-9]+' | paste -sd, || true)}
IFS=, read -ra gpus <<<"$all"
each=$((${#gpus[@]} / num_replicas))
if ((${#gpus[@]} > 0 && each == 0)); then
  echo "error: $num_replicas replicas on ${#gpus[@]} GPUs; start at most that many" >&2
  exit 2
fi
if [[ ! ${OMP_NUM_THREADS:-} ]]; then
  threads=$(($(nproc) / num_replicas))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

pids=()
stopping=''
trap 'stopping=yes; kill "${pids[@]}" 2>/dev/null || true' TERM INT
for ((index = 0; index < num_replicas; index++)); do
  if [[ $stopping ]]; then
    break
  fi
  if ((each)); then
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:index*each:each}")
    export CUDA_VISIBLE_DEVICES
  fi
  # --parent-pid: a replica ends with this script, also when that is killed.
  megadiff serve "$@" --parent-pid $$ &
  pids+=($!)
done

if [[ $stopping ]]; then
  kill "${pids[@]}" 2>/dev/null || true # one may have been started as the signal came
fi
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do # the trap has ended the wait before
    wait "$pid" || code=$?
  done
done
exit "$code"
