#!/usr/bin/env bash
# Trains on two nodes that are two network namespaces of this machine, joined by a link of a given rate: once with
# gradients reduced once per update, once with a reduction in each micro-step. Prints what went over the wire and the
# time of each. Needs root and iproute2; leaves nothing behind but the runs' folders.
#
#   sudo bash launch/two_nodes.sh [--rate 200mbit] [--out runs/two-nodes] [--only last|every] -- [options of train.py]
#   sudo bash launch/two_nodes.sh --rate 1gbit -- --updates 4 --engine fsdp2
#
# --rate  of the link, as tc takes it (200mbit)
# --out   the folder of the runs (runs/two-nodes), which must not hold any
# --only  one of the two runs
# PYTHON=... names an interpreter other than that of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC1091 # which is checked by itself
source "$root/launch/lib.sh"

rate=200mbit out=runs/two-nodes only=''
rest=()
read_options "rate out only" "$@"
case $only in '' | last | every) ;; *) stop "--only $only, expected last or every" ;; esac
python=$(find_python)
export PYTHON=$python GLOO_SOCKET_IFNAME=veth0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" "$root/launch/bench/nodes.py" "$rate" "$out" "${only:-last every}" "${rest[@]}"
