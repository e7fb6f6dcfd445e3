#!/usr/bin/env bash
# Starts this node's share of a job over several nodes. Run it on each of them, with its own --node.
#
#   bash launch/nodes.sh --nodes 2 --node 0 --address HOST [--port 29500] [--ranks 8] -- [options of train.py]
#   bash launch/nodes.sh --nodes 2 --node 0 --address 10.0.0.1 -- --config configs/nodes.toml
#
# --nodes    how many there are           ($SLURM_JOB_NUM_NODES)
# --node     which this is, from 0        ($SLURM_NODEID)
# --address  of node 0, as all reach it   (the first of $SLURM_JOB_NODELIST)
# --port     a free one on node 0         (29500, under Slurm one by the job's number)
# --ranks    processes on this node       ($RANKS; as many as GPUs, or as cores where there are none)
#
# What is not given comes from Slurm's variables, where it started this. With several networks name the one to use:
# NCCL_SOCKET_IFNAME=eth0 (GPUs) and GLOO_SOCKET_IFNAME=eth0 (CPU, and the library's small collectives).
# PYTHON=... names an interpreter other than that of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC1091 # which is checked by itself
source "$root/launch/lib.sh"

nodes=${SLURM_JOB_NUM_NODES:-} node=${SLURM_NODEID:-} address='' ranks=${RANKS:-auto}
port=$((29500 + ${SLURM_JOB_ID:-0} % 1000))
rest=()
read_options "nodes node address port ranks" "$@"
[[ -n $address || -z ${SLURM_JOB_NODELIST:-} ]] || address=$(first_host)
for name in nodes node address; do
    [[ -n ${!name} ]] || stop "--$name is missing, and Slurm has not set it; --help says what it is"
done
whole_number --nodes "$nodes" 1
whole_number --node "$node" 0
whole_number --port "$port" 1
[[ $ranks == auto ]] || whole_number --ranks "$ranks" 1
((node < nodes)) || stop "--node $node of --nodes $nodes, expected 0 to $((nodes - 1))"
config_is_there "${rest[@]}"
python=$(find_python)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$ranks" \
    --master-addr "$address" --master-port "$port" "$root/launch/train.py" "${rest[@]}"
