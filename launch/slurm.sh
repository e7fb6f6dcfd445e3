#!/usr/bin/env bash
#SBATCH --job-name=distaccum
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A Slurm job: one torchrun on each node, which starts a process per GPU, with all cores and all memory of the node.
#
#   sbatch [options of sbatch] launch/slurm.sh [options of train.py]
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh --config configs/nodes.toml
#
# Submit it in the repository's root. Three minutes before its time is up the job saves,
# ends (torchrun waits 150 seconds for that; before torch 2.13, 30), and queues itself again.
# Submitted again, or requeued, it goes on from its newest checkpoint: --resume is always given. The folder of the run
# must be one that node 0 sees again; DeepSpeed needs one that all nodes see. Accounts, partitions and the modules
# that your cluster wants go on sbatch's command line or into the lines at the top; SRUN="--container-image=..." has
# more options for srun. If a process fails, the job ends on all nodes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" # sbatch runs a copy of this file from elsewhere
[[ -f launch/lib.sh ]] || {
    echo "slurm.sh: $PWD has no launch/lib.sh; submit the job in the repository's root" >&2
    exit 2
}
# shellcheck disable=SC1091 # which is checked by itself
source launch/lib.sh

case ${1:-} in -h | --help) help launch/slurm.sh && exit ;; esac
[[ -n ${SLURM_JOB_ID:-} ]] || stop "no Slurm job here; submit it: sbatch launch/slurm.sh --config configs/nodes.toml"
address=$(first_host) # here, since a container has no scontrol
cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}}
read -ra more <<<"${SRUN:-}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}

is_over=''
srun --ntasks-per-node=1 --kill-on-bad-exit=1 ${cores:+--cpus-per-task="$cores"} "${more[@]}" \
    bash launch/nodes.sh --address "$address" -- --resume "$@" &
step=$!
trap 'is_over=yes; kill -TERM "$step"' USR1 # srun passes it on to all its tasks
status=0
wait "$step" || status=$?
[[ -z $is_over ]] || { status=0 && wait "$step" || status=$?; } # the signal ended the first wait
if [[ -n $is_over && $status != 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
