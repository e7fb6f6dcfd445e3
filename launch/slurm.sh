#!/usr/bin/env bash
#SBATCH --job-name=distaccum
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A Slurm job: one torchrun on each node, which starts a process per GPU.
#
#   sbatch [options of sbatch] launch/slurm.sh [options of train.py]
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh --config configs/nodes.toml
#
# Submit it in the repository's root. Three minutes before its time is up the job gets a signal to stop, saves after
# one of the next micro-batches, and ends (torchrun waits 30 seconds for that).
# Submitted again, or requeued, it goes on from its newest checkpoint: --resume is always given. The folder of the run
# must be one that node 0 sees again; DeepSpeed needs one that all nodes see. Accounts, partitions and the modules
# that your cluster wants go on sbatch's command line or into the lines at the top.
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
exec srun --ntasks-per-node=1 bash launch/nodes.sh -- --resume "$@"
