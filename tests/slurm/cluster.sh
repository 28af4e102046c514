#!/usr/bin/env bash
# A real Slurm on this machine, for tests: tests/slurm/cluster.py starts it and speaks to it.
#
# Usage: SLURM_TEST_DIR=FOLDER SLURM_TEST_SHARED=FOLDER:… tests/slurm/cluster.sh start NODES GPU_NODES
#
# The last nodes have four GPUs each, for Slurm: files. They are partition gpus, whose jobs give way
# to those of partition urgent.
#
# It answers "ready" when all nodes are up, and then "done" to each line of its standard input:
#   off node2     the power of node2 is cut
#   boot node2    and comes back
# It ends with that input, and every process, network and mount of the cluster with it: all live in
# namespaces whose first process reads the input. So a test run that is killed leaves nothing.
#
# Each node has its own address, hostname, processes, /tmp and /dev/shm. Of /tmp all nodes see
# SLURM_TEST_DIR and SLURM_TEST_SHARED, as a cluster's shared filesystem.
# Needs root with CAP_SYS_ADMIN, and Debian's slurmctld, slurmd, slurm-client, munge, iproute2.
set -euo pipefail
SELF=$(readlink -f "${BASH_SOURCE[0]}")
DIR=$SLURM_TEST_DIR
IFS=: read -ra SHARED <<<"$SLURM_TEST_SHARED"
SUBNET=10.213.7 # no route leads there from outside

write_configuration() {
  local nodes=$1 first_gpu=$(($1 - $2 + 1)) node
  mkdir -p "$DIR"/{etc,log,state,spool,pids,gpus}
  touch "$DIR"/gpus/{0..3}
  echo "NodeName=node[$first_gpu-$nodes] Name=gpu File=$DIR/gpus/[0-3]" >"$DIR/etc/gres.conf"
  (umask 277 && head -c 1024 /dev/urandom >"$DIR/munge.key")
  {
    echo "127.0.0.1 localhost"
    echo "$SUBNET.100 head"
    for ((node = 1; node <= nodes; node++)); do
      echo "$SUBNET.$node node$node"
    done
  } >"$DIR/etc/hosts"
  echo "CgroupPlugin=cgroup/v1" >"$DIR/etc/cgroup.conf"
  # cred_expire: a job is requeued no sooner (120 s by default). linuxproc: needs no cgroups.
  cat >"$DIR/etc/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthInfo=socket=/run/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/pids/slurmctld
SlurmdPidFile=$DIR/pids/slurmd.%n
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmdTimeout=10
MinJobAge=3600
KillWait=5
MessageTimeout=5
TCPTimeout=2
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-$((first_gpu - 1))] CPUs=8 RealMemory=20000
NodeName=node[$first_gpu-$nodes] CPUs=8 RealMemory=20000 Gres=gpu:4
PartitionName=main Nodes=node[1-$((first_gpu - 1))] Default=YES MaxTime=60
PartitionName=gpus Nodes=node[$first_gpu-$nodes] MaxTime=60 GraceTime=30
PartitionName=urgent Nodes=node[$first_gpu-$nodes] MaxTime=60 PriorityTier=10 PreemptMode=OFF
CONF
}

# The login node, and process 1 of the cluster.
head_node() {
  local nodes=$1 node verb
  hostname head
  mount --bind "$DIR/etc" /etc/slurm
  mount --bind "$DIR/etc/hosts" /etc/hosts
  mount -t tmpfs tmpfs /run
  mkdir /run/netns
  mount -t tmpfs tmpfs /sys/fs/cgroup # slurmd looks there, and uses nothing of it
  ip link set lo up
  ip link add bridge type bridge
  ip address add "$SUBNET.100/24" dev bridge
  ip link set bridge up

  munged --foreground --key-file="$DIR/munge.key" --socket="/run/munge.socket" \
    --pid-file="$DIR/pids/munged" --log-file="$DIR/log/munged.log" \
    --seed-file="$DIR/state/munged.seed" --num-threads=2 </dev/null &>"$DIR/log/munged.out" &
  until_true "munged" test -S "/run/munge.socket"
  slurmctld -D -i </dev/null &>"$DIR/log/slurmctld.out" &

  for ((node = 1; node <= nodes; node++)); do
    ip netns add "node$node"
    ip link add "cable$node" type veth peer name eth0 netns "node$node"
    ip link set "cable$node" master bridge up
    ip -n "node$node" address add "$SUBNET.$node/24" dev eth0
    ip -n "node$node" link set eth0 up
    ip -n "node$node" link set lo up
    boot "node$node"
  done
  until_true "$nodes idle nodes" are_idle "$nodes"

  echo ready
  while read -r verb node; do
    case $verb in
      # The cable first: a machine without power says no goodbye.
      off) ip link set "cable${node#node}" down && kill -KILL "$(<"$DIR/pids/$node")" ;;
      boot) ip link set "cable${node#node}" up && boot "$node" ;;
    esac
    echo "done"
  done
}

are_idle() { (( $(sinfo -hN --responding -t idle -o %N 2>/dev/null | sort -u | wc -l) == $1 )); }

until_true() {
  local what=$1 deadline=$((SECONDS + 30))
  shift
  until "$@"; do
    if ((SECONDS > deadline)); then
      echo "no $what after 30 s; see $DIR/log" >&2
      exit 1
    fi
    sleep 0.05
  done
}

boot() {
  # unshare itself may be killed: its child, process 1 of the node, dies with it.
  setsid nsenter --net="/run/netns/$1" unshare --uts --ipc --mount --pid --fork --kill-child \
    --mount-proc "$SELF" node "$1" </dev/null &>"$DIR/log/$1.out" &
  echo $! >"$DIR/pids/$1"
}

# Process 1 of a node: bash, as it reaps orphans.
compute_node() {
  local name=$1 folder aside
  hostname "$name"
  aside=$(mktemp -d /run/aside.XXXX)
  for folder in "$DIR" "${SHARED[@]}"; do
    mkdir -p "$aside$folder"
    mount --rbind "$folder" "$aside$folder"
  done
  mount -t tmpfs -o mode=1777 tmpfs /tmp
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  for folder in "$DIR" "${SHARED[@]}"; do
    mkdir -p "$folder"
    mount --rbind "$aside$folder" "$folder"
  done
  mkdir -p "$DIR/spool/$name"
  slurmd -D -N "$name" &
  while :; do wait -n || sleep 1; done
}

case ${1:-} in
  start)
    write_configuration "$2" "$3"
    exec unshare --mount --net --pid --ipc --uts --fork --kill-child --mount-proc "$SELF" head "$2"
    ;;
  head) head_node "$2" ;;
  node) compute_node "$2" ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$SELF" >&2
    exit 2
    ;;
esac
