#!/usr/bin/env bash
#SBATCH --job-name=megadiff
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#
# Usage: sbatch --nodes=N [--gpus-per-node=G] launch/slurm.sh CONFIG.yaml ... [key=value ...]
#        NODES=N [GPUS=G] launch/slurm.sh --dry-run CONFIG.yaml ... [key=value ...]
#
# Trains on N nodes, a rank on every GPU. Submit it from the repository; all nodes must see that,
# the run's folder and the model. --dry-run checks the config, prints what a job would do and starts
# nothing. Settings in the environment:
#   ROLLOUT_NODES    the last so many nodes hold replicas, the others train (rollout.mode=separate)
#   RANKS, REPLICAS  on a node that trains, on a node that samples; by default its GPUs decide
#   CONTAINER_IMAGE  run in this image (pyxis), with CONTAINER_MOUNTS, by default the repository
#   STOP_S           seconds that the end may take; sbatch --signal=B:USR1@… must say the same
# Five minutes before the time limit, or when it gets USR1, the run is saved and the job goes back
# into the queue, where it continues. So it does after a failure of an attempt that saved a step, and
# once after one that saved none, if the run has a checkpoint.
set -euo pipefail

STOP_S=${STOP_S:-300} # as --signal above
STRAGGLER_S=600       # for all nodes to end, once the first one is done
REPLICAS_GONE_S=${REPLICAS_GONE_S:-30} # for the trainer to notice by itself, and to save
UNSEEN_S=10           # for a new file to be seen on all nodes: NFS asks the server late
LISTED_S=60           # the same, in a list of a folder
ANSWER_S=60           # for a controller that is busy, or starts again

asked_s='' folder='' state='' end_s='' limit_s=''
# torchrun would die of USR1 and leave its ranks behind. So the trainer looks for a file, where a
# second request would end it at once.
trap 'asked_s=${asked_s:-$SECONDS}; ask_to_stop' USR1 # before all else: it would end this script
ask_to_stop() {
  if [[ ! $folder || ! $asked_s || -e $folder/stop || -e $folder/stopped ]]; then
    return 0
  fi
  local left=$((STOP_S - (SECONDS - asked_s)))
  look_at_clock
  if ((end_s < left)); then
    left=$end_s
  fi
  # Written aside: the trainer sees a whole file. A full disk must not end this script.
  if echo $((left > 0 ? left : 0)) >"$folder/stop.aside" && mv "$folder/stop.aside" "$folder/stop"; then
    echo "job $attempt: asked to stop, $left s are left; the run saves"
  else
    echo "job $attempt: asked to stop, but $folder/stop cannot be written; trying again"
  fi
}

# COMMAND …: runs it until Slurm's controller answers, ANSWER_S long. Its code is the command's.
patiently() {
  local since=$SECONDS
  until "$@" 2>/dev/null; do
    if ((SECONDS - since >= ANSWER_S)); then
      "$@" # once more, to show its error
      return
    fi
    sleep 2
  done
}

# look_at_clock [patiently] sets Slurm's state of this job, and end_s and limit_s: the seconds until
# Slurm ends it, and until its time limit. A preempted one ends sooner. Both are large where Slurm
# does not answer.
look_at_clock() {
  local end='' left='' days hours
  state='' end_s=9999999999 limit_s=9999999999
  # Not a process substitution: in a trap that would change $!.
  read -r state end left <<<"$("$@" squeue --noheader --jobs="$SLURM_JOB_ID" \
    --format='%T %e %L')" || true
  # One that was cancelled ends at once, and for good. SIGNALING is a running job's state for the
  # moment in which Slurm sends it a signal, as it does to a preempted one.
  if [[ $state == RUNNING || $state == SIGNALING ]] && end=$(date -d "$end" +%s 2>/dev/null); then
    end_s=$((end - $(date +%s)))
  fi
  # [[days-]hours:]minutes:seconds, or UNLIMITED
  if [[ $left =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]]; then
    days=${BASH_REMATCH[2]:-0}
    hours=${BASH_REMATCH[4]:-0}
    limit_s=$(((10#$days * 24 + 10#$hours) * 3600 + 10#${BASH_REMATCH[5]} * 60 + 10#${BASH_REMATCH[6]}))
  fi
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

dry_run=''
if [[ ${1:-} == --dry-run ]]; then
  dry_run=yes
  shift
fi
if (($# == 0)) || [[ ! $dry_run && ! ${SLURM_JOB_ID:-} ]]; then
  sed -n '/^# Usage/,/^#$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi

# Not this file's folder: sbatch runs a copy of it in its spool.
[[ -f launch/torchrun.sh ]] ||
  die "$PWD is no repository of megadiff; submit from there, or with sbatch --chdir=REPOSITORY"
container=()
if [[ ${CONTAINER_IMAGE:-} ]]; then
  container=(
    --container-image="$CONTAINER_IMAGE"
    --container-mounts="${CONTAINER_MOUNTS:-$PWD:$PWD}"
    --container-workdir="$PWD"
  )
else
  [[ -x .venv/bin/megadiff ]] || die "$PWD has no .venv; run launch/setup.sh there"
  PATH=$PWD/.venv/bin:$PATH
fi

rollout_nodes=${ROLLOUT_NODES:-0}
[[ $rollout_nodes =~ ^[0-9]+$ ]] || die "ROLLOUT_NODES=$rollout_nodes is no number of nodes"
rollout_nodes=$((10#$rollout_nodes)) # 08 is no octal number
num_nodes=${SLURM_JOB_NUM_NODES:-${NODES:-$((rollout_nodes + 1))}}
num_trainers=$((num_nodes - rollout_nodes))
((num_trainers > 0)) ||
  die "ROLLOUT_NODES=$rollout_nodes of the job's $num_nodes nodes are to sample, none is left to" \
    "train; use sbatch --nodes=$((rollout_nodes + 1)) or more"
# Else torchrun, a single task, may be bound to a single core.
export SLURM_CPU_BIND=none
# Each step's task has its whole node. What sbatch was asked for would be asked of each step again:
# --gpus=16 of two nodes all 16 of one node.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET
# The submitting shell's would be that of all nodes: launch/torchrun.sh takes it before Slurm's.
unset NODE_RANK
# --export: under sbatch --export=NONE tasks would lose the token.
step=(srun --export=ALL "${container[@]}")

# Each step names its nodes. With --nodes alone, and with --relative too, Slurm passes over a node
# where it still counts the step before as running, and takes the next one.
if [[ $dry_run ]]; then
  nodes=(NODE_1)
  trainers="NODE_[1-$num_trainers]"
  samplers="NODE_[$((num_trainers + 1))-$num_nodes]"
else
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  trainers=$(IFS=, && echo "${nodes[*]:0:num_trainers}")
  samplers=$(IFS=, && echo "${nodes[*]:num_trainers}")
fi
export FIRST_NODE=${nodes[0]} # for launch/torchrun.sh: Slurm may number nodes in another order
on_first_node=(--job-name=check --nodes=1 --ntasks=1 --nodelist="$FIRST_NODE")

# Two lines: of how many GPUs Slurm knows, and those that are seen. sbatch says it, salloc does not,
# and without GRES Slurm leaves a job all GPUs of its nodes.
# shellcheck disable=SC2016  # the step's shell expands it
count='echo "${SLURM_GPUS_ON_NODE:-}"
  nvidia_smi=(timeout 60 nvidia-smi --query-gpu=index --format=csv,noheader)
  echo "${CUDA_VISIBLE_DEVICES-$("${nvidia_smi[@]}" 2>/dev/null | grep -xE "[0-9]+" | paste -sd,)}"'
if [[ $dry_run ]]; then
  gpus=${SLURM_GPUS_ON_NODE:-${GPUS:-0}}
  slurms=$gpus
else
  slurms=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
  slurms=${slurms##*:} # without their type
  seen=()
  if [[ ! $slurms ]]; then
    counted=$("${step[@]}" "${on_first_node[@]}" bash -c "$count") || counted=''
    { read -r slurms && IFS=, read -ra seen; } <<<"${counted/NoDevFiles/}" || true
  fi
  gpus=${slurms:-${#seen[@]}}
fi
# A job that asked for none has all of its nodes, but its steps have none.
if ((${slurms:-0})); then
  step+=("--gpus-per-node=$slurms")
fi
unset SLURM_GPUS_PER_NODE
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
world_size=$((num_trainers * ranks))
separate=()
if ((rollout_nodes)); then
  separate=(rollout.mode=separate rollout.registry=not-yet)
fi

first_node=("${step[@]}" "${on_first_node[@]}")
if [[ $dry_run ]]; then
  first_node=() # the login node looks at the config itself
fi

# Once, before any rank starts: the checks of `megadiff train`, and what is needed of the config.
# The first node's address is asked for, as its own /etc/hosts may call it 127.0.1.1.
# shellcheck disable=SC2016  # the step's shell expands it
look='megadiff train --dry-run --json --world-size "$1" --gpus-per-node "$2" "${@:3}" | python -c "
import json, sys
from pathlib import Path
text = sys.stdin.read() or sys.exit(1)  # the error is told already
config = json.loads(text)[\"config\"]
print(Path(config[\"run\"][\"dir\"], config[\"run\"][\"name\"]).resolve())
print(config[\"rollout\"][\"tp\"])" &&
  if [[ $0 ]]; then python -m megadiff.process.network "$0"; fi'
last=''
if [[ ! $dry_run ]] && ((num_nodes > 1)); then
  last=${nodes[-1]}
fi
check=(bash -o pipefail -c "$look" "$last" "$world_size" "$ranks")
if [[ $dry_run && ${CONTAINER_IMAGE:-} ]]; then
  plan=$'FOLDER_OF_THE_RUN\n1' # the image can read the config, and this node perhaps not
else
  plan=$("${first_node[@]}" "${check[@]}" "$@" "${separate[@]}") ||
    die "$num_trainers nodes with $ranks ranks each cannot train this config; nothing was started"
fi
{
  read -r folder_of_run
  read -r tp
  read -r MASTER_ADDR _ || MASTER_ADDR=${nodes[0]}
} <<<"$plan"
replicas=${REPLICAS:-$((gpus > tp ? gpus / tp : 1))}

attempt=${SLURM_JOB_ID:-JOB}.${SLURM_RESTART_COUNT:-0}
logs=$folder_of_run/logs/$attempt
outputs=${logs//%/%%} # srun puts in for %j a number
# Of this attempt alone: what a killed one left is not in it, nor may its processes join this one.
registry=$folder_of_run/replicas/$attempt
if ((rollout_nodes)); then
  set -- "$@" rollout.mode=separate rollout.registry="$registry" \
    rollout.num_replicas=$((rollout_nodes * replicas))
fi

export MASTER_ADDR NNODES=$num_trainers RDZV_ID=$attempt
# Below the ports that systems give out. Another one for each attempt: see the registry.
export MASTER_PORT=$((20000 + (${SLURM_JOB_ID:-0} + 1009 * ${SLURM_RESTART_COUNT:-0}) % 10000))

replicas_step=(
  "${step[@]}" --job-name=replicas --nodes="$rollout_nodes" --ntasks="$rollout_nodes"
  --ntasks-per-node=1 --nodelist="$samplers"
  --output="$outputs/replicas-%N.log"
  launch/serve.sh "$replicas" "$@"
)
# --kill-on-bad-exit: TERM to the other nodes, and KILL after the cluster's KillWait.
trainer_step=(
  "${step[@]}" --job-name=trainer --nodes="$num_trainers" --ntasks="$num_trainers"
  --ntasks-per-node=1 --nodelist="$trainers" --kill-on-bad-exit=1
  --wait="$STRAGGLER_S" --output="$outputs/trainer-%N.log"
  launch/torchrun.sh "$ranks" "$@"
)
if [[ $dry_run ]]; then
  echo "# $num_trainers nodes train, $ranks ranks each"
  for name in SLURM_CPU_BIND FIRST_NODE NNODES MASTER_ADDR MASTER_PORT RDZV_ID; do
    echo "export $name=${!name}"
  done
  if ((rollout_nodes)); then
    echo "# $rollout_nodes nodes sample, $replicas replicas each"
    printf '%q ' "${replicas_step[@]}"
    echo "&"
  fi
  printf '%q ' "${trainer_step[@]}"
  echo
  exit 0
fi

mkdir -p "$logs"
ln -sfn "$attempt" "$folder_of_run/logs/latest"
echo "job $attempt: ${nodes[*]:0:num_trainers} train, $ranks ranks each; logs in $logs"
if ((rollout_nodes)); then
  mkdir -p "$registry"
  echo "job $attempt: ${nodes[*]:num_trainers} sample, $replicas replicas each"
fi

# In the environment: everybody on a host can read command lines.
if [[ ! ${MEGADIFF_TOKEN:-} ]]; then
  MEGADIFF_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
fi
export MEGADIFF_TOKEN

newest() { cat "$folder_of_run/checkpoints/latest" 2>/dev/null || true; }
before=$(newest)
rm -f "$folder_of_run/stop" "$folder_of_run/stopped"
folder=$folder_of_run
failed_after=$folder_of_run/logs/failed_after # JOB CHECKPOINT

# finish CODE: decides whether the job is queued again, and ends it.
# Only where this attempt came further: a wrong config, or a step longer than the time limit, would
# be queued for ever. One that was preempted, or asked long before its limit, has no fault of its own.
# Of a run that has saved a step before, a single attempt may fail: of many nodes one is sometimes ill.
finish() {
  local code=$1
  again=''
  if [[ -e $folder/stopped && ! $asked_s ]]; then
    echo "job $attempt: not queued again, as somebody made $folder/stop"
  elif ((code)) || [[ -e $folder/stopped ]]; then
    if [[ $(newest) != "$before" ]]; then
      again=yes
    # patiently: one missed answer would take a preempted job for a broken one
    elif look_at_clock patiently && ((end_s + 60 < limit_s)); then
      echo "job $attempt: preempted"
      rm -f "$failed_after"
      again=yes
    elif [[ -e $folder/stopped ]] && ((limit_s > 2 * STOP_S)); then
      again=yes
    elif [[ $before && $(cat "$failed_after" 2>/dev/null) != "$SLURM_JOB_ID $before" ]] &&
      echo "$SLURM_JOB_ID $before" >"$failed_after"; then # a full disk must not make it go on for ever
      echo "job $attempt: saved nothing after $before; it has one more attempt"
      again=yes
    else
      echo "job $attempt: not queued again, as it saved no step since its start and was not preempted" \
        "(Slurm's state of it: ${state:-unknown})"
    fi
  fi
  if [[ $again ]]; then
    slurms_job=$(patiently scontrol show job "$SLURM_JOB_ID") || slurms_job=''
    restarts=$(grep -o 'Restarts=[0-9]*' <<<"$slurms_job" || true)
    # Another one, where this node's slurmd is gone: Slurm could not end this script.
    if [[ $restarts && $restarts != "Restarts=${SLURM_RESTART_COUNT:-0}" ]]; then
      echo "job $attempt: runs elsewhere by now"
    elif [[ $slurms_job == *BatchFlag=0* ]]; then
      echo "job $attempt: not queued again, as only jobs of sbatch can be; start it again"
    elif [[ $slurms_job == *Requeue=0* ]]; then
      echo "job $attempt: not queued again, as sbatch --no-requeue allows one attempt only"
    else
      echo "job $attempt: queued again"
      patiently scontrol requeue "$SLURM_JOB_ID" || true
    fi
  fi
  exit "$code"
}

# shellcheck disable=SC2016
"${step[@]}" --job-name=shared --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 \
  bash -c '
  while [[ ! -d $0 || ! -f launch/torchrun.sh ]]; do
    if ((SECONDS >= $1)); then
      echo "error: $(hostname) does not see $0, which $2 made, or no repository in $PWD; set" \
        "run.dir to a folder that all nodes share, and submit from one" >&2
      exit 2
    fi
    sleep 0.5
  done' "$logs" "$UNSEEN_S" "${nodes[0]}" || {
  echo "error: not all of ${nodes[*]} see $folder_of_run and $PWD; nothing was started"
  finish 2
}

replicas_pid=''
if ((rollout_nodes)); then
  "${replicas_step[@]}" &
  replicas_pid=$!
fi
"${trainer_step[@]}" &
trainer_pid=$!

# The trainer's end is the job's; Slurm then ends the replicas. A single replica's end is left to
# the trainer, but without any it might wait for long.
gone_s=''
while kill -0 "$trainer_pid" 2>/dev/null; do
  ask_to_stop # again: a file from before its start is none to the trainer
  if [[ $replicas_pid ]] && ! kill -0 "$replicas_pid" 2>/dev/null; then
    gone_s=${gone_s:-$SECONDS}
    if ((SECONDS - gone_s >= REPLICAS_GONE_S)); then
      echo "job $attempt: no replica is left; see $logs/replicas-*.log"
      # Not to srun, which would kill the ranks at once.
      scancel --signal=TERM "$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" \
        --format='%i %j' | sed -n 's/ trainer$//p')" || true
      replicas_pid=''
    fi
  fi
  sleep 1 &
  wait $! || true # and not plain sleep: bash would answer USR1 after it only
done
code=0
wait "$trainer_pid" || code=$?
echo "job $attempt: the trainer ended with code $code"
# srun's code is 0 too where a node could not open its log, and started nothing.
num_logs() { find "$logs" -name 'trainer-*.log' | wc -l; }
for ((waited = 0; waited < LISTED_S && code == 0 && $(num_logs) < num_trainers; waited++)); do
  sleep 1
done
if ((code == 0 && $(num_logs) < num_trainers)); then
  echo "error: $(num_logs) logs of $num_trainers trainers are in $logs; look there and into slurmd's log"
  code=1
fi
if ((code)) && [[ ! -e $folder/stopped ]]; then
  grep -hs '^error' "$logs"/*.log | sort -u | tail -n 10 || tail -n 5 "$logs"/trainer-*.log || true
fi

finish "$code"
