"""Nodes that are network namespaces of this machine, with a link of a given rate between them.

`launch/two_nodes.sh` runs this file to train in them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

DEVICE = "veth0"
PAYLOAD = 1448 / 1514  # of a full Ethernet frame with IPv4, TCP and its timestamps
SENT = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")


@contextmanager
def two_nodes(rate: str) -> Iterator[tuple[str, str]]:
    """Names of two namespaces joined by a link of `rate` (as tc takes it) each way; both are gone at the end.

    Needs root and iproute2. What still runs in them at the end is killed.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} is not here; install iproute2")
    if os.geteuid():
        raise RuntimeError("network namespaces need root; run it with sudo")
    number = os.getpid()  # several of these programs do not meet
    nodes, ends = (f"distaccum{number}-0", f"distaccum{number}-1"), (f"da{number}", f"db{number}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is below still happens
    try:
        for node in nodes:
            run(f"ip netns add {node}", cure="in a container it needs --privileged")
        run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for i, (node, end) in enumerate(zip(nodes, ends, strict=True)):
            run(f"ip link set {end} netns {node} name {DEVICE}")
            run(f"ip -n {node} addr add {address(i)}/24 dev {DEVICE}")
            run(f"ip -n {node} link set lo up")
            run(f"ip -n {node} link set {DEVICE} up")
            shape = f"tc -n {node} qdisc add dev {DEVICE} root tbf rate {rate} burst 128k latency 50ms"
            run(shape, cure="expected a rate such as 1gbit, and a kernel that has sch_tbf")
        yield nodes
    finally:
        for node in nodes:
            left = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout.split()
            for process in left:
                os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
        subprocess.run(["ip", "link", "del", ends[0]], capture_output=True)  # had it not been moved yet
        signal.signal(signal.SIGTERM, before)


def address(node: int) -> str:
    return f"10.77.1.{node + 1}"


def run(command: str, cure: str = "") -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"'{command}' failed: {said[-1]}{'; ' + cure if cure else ''}")


def on_each(nodes: Sequence[str], options: list[str], seconds: float) -> str:
    """What rank 0 of this program prints with these options (some lines), a rank on each node."""
    started = []
    try:
        for rank, node in enumerate(nodes):
            variables = {
                "MASTER_ADDR": address(0),
                "MASTER_PORT": "29577",
                "WORLD_SIZE": str(len(nodes)),
                "RANK": str(rank),
                "NODE_RANK": str(rank),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", node, sys.executable, sys.argv[0], *options]
            out = subprocess.PIPE if rank == 0 else sys.stderr
            started.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, text=True))
        until = time.monotonic() + seconds
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                break  # and leaves the others waiting for it
            if time.monotonic() > until:
                raise RuntimeError(f"the ranks did not end within {seconds:.0f} seconds")
            time.sleep(0.2)
        if any(process.poll() for process in started):
            raise RuntimeError("a rank failed; its own error stands above")
        assert started[0].stdout is not None
        return started[0].stdout.read()
    finally:
        for process in started:
            process.kill()
            process.wait()


def train(rate: str, out: Path, syncs: Sequence[str], options: Sequence[str]) -> None:
    """Trains under each `sync`, and prints what node 1 sent: its gradients and little else."""
    root, rows = Path(__file__).resolve().parents[2], []
    with two_nodes(rate) as nodes:
        for sync in syncs:
            before, started = sent_by(nodes[1]), []
            try:
                for i, node in enumerate(nodes):
                    where = ["--nodes", "2", "--node", str(i), "--address", address(0), "--ranks", "1", "--"]
                    command = ["ip", "netns", "exec", node, "bash", str(root / "launch" / "nodes.sh"), *where]
                    run_options = ["--device", "cpu", *options, "--sync", sync, "--out", str(out / sync)]
                    started.append(subprocess.Popen([*command, *run_options]))
                if any(one.wait() for one in started):
                    raise SystemExit(1)
            finally:
                for one in started:
                    one.terminate()  # torchrun tells its workers
                    with suppress(subprocess.TimeoutExpired):
                        one.wait(timeout=5)
            (out / sync / "sent").write_text(str(sent_by(nodes[1]) - before))
            updates = [json.loads(line) for line in (out / sync / "log.jsonl").read_text().splitlines()]
            seconds = statistics.median([update["seconds"] for update in updates][1:] or [updates[0]["seconds"]])
            rows.append((sync, int((out / sync / "sent").read_text()) / len(updates) / 1e6, seconds))
    print(f"\ntwo nodes, a link of {rate}:")
    print(f"{'reduced':<24}{'MB sent per update and node':>30}{'seconds per update':>22}")
    for sync, megabytes, seconds in rows:
        name = "once per update" if sync == "last" else "in each micro-step"
        print(f"{name:<24}{megabytes:>30.1f}{seconds:>22.2f}")


def sent_by(node: str) -> int:
    done = subprocess.run(["ip", "netns", "exec", node, "cat", str(SENT)], capture_output=True, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    rate, out, syncs, *options = sys.argv[1:]
    try:
        train(rate, Path(out), syncs.split(), options)
    except RuntimeError as error:
        print(f"two_nodes.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None
