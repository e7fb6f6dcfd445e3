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
((EUID == 0)) || stop "network namespaces need root; run it with sudo"
for tool in ip tc; do command -v $tool >/dev/null || stop "$tool is not here; install iproute2"; done
python=$(find_python)

# Every name carries this process's number, so that several of these do not meet.
nodes=("distaccum$$-0" "distaccum$$-1")
agents=()
clean() {
    local status=$? node
    trap - EXIT INT TERM
    set +e
    if ((${#agents[@]})); then
        kill -TERM "${agents[@]}" 2>/dev/null # torchrun tells its workers
        for _ in {1..50}; do
            [[ -z $(ip netns pids "${nodes[0]}") && -z $(ip netns pids "${nodes[1]}") ]] && break
            sleep 0.1
        done
    fi
    for node in "${nodes[@]}"; do
        ip netns pids "$node" 2>/dev/null | xargs -r kill -KILL
        ip netns del "$node" 2>/dev/null
    done
    ip link del "da$$" 2>/dev/null
    wait
    exit $status
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for node in "${nodes[@]}"; do
    ip netns add "$node" 2>/dev/null || stop "ip netns does not work here; in a container it needs --privileged"
done
ip link add "da$$" type veth peer name "db$$"
ip link set "da$$" netns "${nodes[0]}" name veth0
ip link set "db$$" netns "${nodes[1]}" name veth0
for i in 0 1; do
    ip -n "${nodes[i]}" addr add "10.77.0.$((i + 1))/24" dev veth0
    ip -n "${nodes[i]}" link set lo up
    ip -n "${nodes[i]}" link set veth0 up
    tc -n "${nodes[i]}" qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 50ms 2>/dev/null ||
        stop "tc takes no tbf with --rate $rate, expected one such as 200mbit (and a kernel that has sch_tbf)"
done

# Of node 1, to which node 0 sends the first weights: what it sends are its gradients, and little else.
sent() {
    ip netns exec "${nodes[1]}" cat /sys/class/net/veth0/statistics/tx_bytes
}

export GLOO_SOCKET_IFNAME=veth0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHON=$python
for sync in ${only:-last every}; do
    before=$(sent)
    agents=()
    for i in 0 1; do
        ip netns exec "${nodes[i]}" bash "$root/launch/nodes.sh" --nodes 2 --node $i --address 10.77.0.1 --ranks 1 -- \
            --device cpu "${rest[@]}" --sync "$sync" --out "$out/$sync" &
        agents+=($!)
    done
    status=0
    for agent in "${agents[@]}"; do wait "$agent" || status=$?; done
    agents=()
    ((status == 0)) || exit $status
    echo $(($(sent) - before)) >"$out/$sync/sent"
done

"$python" - "$rate" "$out" <<'REPORT'
import json, pathlib, statistics, sys

rate, out = sys.argv[1], pathlib.Path(sys.argv[2])
print(f"\ntwo nodes, a link of {rate}:")
print(f"{'reduced':<24}{'MB sent per update and node':>30}{'seconds per update':>22}")
for sync, name in (("last", "once per update"), ("every", "in each micro-step")):
    if (out / sync / "sent").exists():
        updates = [json.loads(line) for line in (out / sync / "log.jsonl").read_text().splitlines()]
        sent = int((out / sync / "sent").read_text()) / len(updates) / 1e6
        seconds = statistics.median([update["seconds"] for update in updates][1:] or [updates[0]["seconds"]])
        print(f"{name:<24}{sent:>30.1f}{seconds:>22.2f}")
REPORT
