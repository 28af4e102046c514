#!/usr/bin/env bash
# Usage: launch/torchrun.sh N CONFIG.yaml ... [key=value ...]
# Trains with N processes on this machine. Relative paths start at the repository.
#
# On several machines start it on each, with the same arguments, and in the environment:
#   NNODES        how many machines there are
#   NODE_RANK     this one's number, from 0; Slurm's SLURM_NODEID where it is not set
#   MASTER_ADDR   the name or address of number 0, as all others reach it
#   MASTER_PORT   a free port there; 29500 by default
#   RDZV_ID       a name of this start; needed where an earlier one may still run
set -euo pipefail

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
num_processes=$1
shift
# A container image may bring its own Python, and see a .venv that does not work in it.
if .venv/bin/python -c '' 2>/dev/null; then
  PATH=$PWD/.venv/bin:$PATH
fi
command -v torchrun >/dev/null || die "$PWD has no .venv; run launch/setup.sh"

# Asked to stop, ranks save the last finished step first. torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
# Says in one line which network NCCL chose, and why it failed. INFO says much more.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# The first machine's torchrun has a connection to each rank of all machines.
most_files=$(ulimit -Hn)
if [[ $most_files == unlimited ]] || ((most_files > 65536)); then
  most_files=65536
fi
if [[ $(ulimit -Sn) != unlimited ]] && (($(ulimit -Sn) < most_files)); then
  ulimit -Sn "$most_files"
fi

NNODES=${NNODES:-1}
if [[ $NNODES == 1 ]]; then
  where=(--standalone)
else
  NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
  MASTER_ADDR=${MASTER_ADDR:-}
  [[ $NNODES =~ ^[1-9][0-9]*$ ]] || die "NNODES=$NNODES is no number of machines; set 1 or more"
  if [[ ! $NODE_RANK =~ ^[0-9]+$ ]] || ((10#$NODE_RANK >= NNODES)); then
    die "NODE_RANK='$NODE_RANK' of NNODES=$NNODES machines; set each one's number, from 0"
  fi
  NODE_RANK=$((10#$NODE_RANK)) # 08 is no octal number
  [[ $MASTER_ADDR ]] ||
    die "NNODES=$NNODES but no MASTER_ADDR; set it to the name or address of machine 0"

  way=$(python -m megadiff.process.network "$MASTER_ADDR")
  read -r address interface <<<"$way"
  if [[ $address == 127.* || $address == ::1 ]]; then
    die "MASTER_ADDR=$MASTER_ADDR is $address on $(hostname), which no other machine reaches;" \
      "set it to the address of machine 0 in their network"
  fi
  # Else gloo takes the address of this host's name. Debian's installer makes that 127.0.1.1.
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  # Slurm's numbers may have another order than its list of nodes.
  if [[ ${FIRST_NODE:-} && ${SLURMD_NODENAME:-} ]]; then
    is_host=$([[ $SLURMD_NODENAME == "$FIRST_NODE" ]] && echo 1 || echo 0)
  else
    is_host=$((NODE_RANK == 0))
  fi
  # is_host: said here, as torchrun compares names, and a machine may have several.
  # --local-addr: for the same reason; other machines connect to it.
  where=(
    --nnodes "$NNODES"
    --rdzv-backend c10d
    --rdzv-id "${RDZV_ID:-megadiff}"
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
    --rdzv-conf "is_host=$is_host,join_timeout=600"
    --local-addr "$address"
  )
fi
exec torchrun "${where[@]}" --nproc-per-node "$num_processes" -m megadiff.cli.main train "$@"
