"""How jobs end that never read their last loss: two ranks on gloo, to the end of their interpreters.

    python launch/bench/ends.py  # a hundred of each kind
    python launch/bench/ends.py --times 10 accelerate:late:destroy

A kind is a script (accelerate, function, split, ahead), `late` where rank 1 comes late to its last step, and `destroy`
where the process group is destroyed at the end. Printed is how often the two ranks ended in which way: their exit
statuses (negative: the signal), or "hung" where one's main thread slept and did not end.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BEGIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from distaccum import Accumulator
"""
DDP = """
def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, steps=2)
"""
END = """
    if destroys: dist.destroy_process_group()
main()
"""
SCRIPTS = {
    "accelerate": """
def main():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,)))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accumulator = Accumulator(model, optimizer, steps=2, accelerator=accelerator)
    for epoch in range(2):
        for window in accumulator.windows(loader):
            for x, y in window:
                window.backward(torch.nn.functional.cross_entropy(model(x), y))
            late(window)
            window.step()
    if destroys: accelerator.end_training()
main()
""",
    "function": DDP
    + """
    for window in accumulator.windows([torch.randn(2, 4) for _ in range(7)]):
        for x in window:
            window.backward(model(x).square().mean())
        late(window)
        window.step()
"""
    + END,
    "split": DDP
    + """
    for _ in range(4):
        window = accumulator.split(torch.randn(8, 4))
        for x in window:
            window.backward(model(x).square().mean())
        late(window)
        window.step()
"""
    + END,
    "ahead": DDP
    + """
    data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=2, num_workers=1, multiprocessing_context="fork")
    for window in accumulator.windows(data):
        for x in window:
            window.backward(model(x).square().mean())
        late(window)
        window.step()
        if window.index == 3:
            break
"""
    + END,
}


def start(kind: str, port: str) -> list[int] | None:
    """The ranks' processes; None in each of them, which then runs its script."""
    processes = []
    for rank in range(2):
        process = os.fork()
        if not process:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            return None
        processes.append(process)
    return processes


def ends(processes: list[int], patience: float) -> tuple[str, ...]:
    ended: dict[int, str] = {}
    seen: dict[int, float] = {}  # when each was last seen at work, or waiting for the processor or a disk
    while len(ended) < len(processes):
        for process in processes:
            if process in ended:
                continue
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                ended[process] = str(os.waitstatus_to_exitcode(status))
                continue
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            if process not in seen or state != "S":
                seen[process] = time.monotonic()
            if time.monotonic() - seen[process] > patience:
                os.kill(process, 9)
                os.waitpid(process, 0)
                ended[process] = "hung"
        time.sleep(0.005)
    return tuple(ended[process] for process in processes)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def late(window: object) -> None:
    if is_late and os.environ["RANK"] == "1" and window.index == 3:  # type: ignore[attr-defined]
        time.sleep(0.2)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
every = [name + how for name in SCRIPTS for how in ("", ":late", ":destroy", ":late:destroy")]
parser.add_argument("kinds", nargs="*", default=every, metavar="KIND")
parser.add_argument("--times", type=int, default=100, metavar="N")
parser.add_argument("--patience", type=float, default=5, metavar="SECONDS", help="of a sleeping main thread (5)")
options = parser.parse_args()

import accelerate  # noqa: E402, F401  # once, and not in each job
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

import distaccum  # noqa: E402, F401

torch.set_num_threads(1)
script = None
for kind in options.kinds:
    name, *how = kind.split(":")
    is_late, destroys = "late" in how, "destroy" in how
    counted: Counter[tuple[str, ...]] = Counter()
    for _ in range(options.times):
        processes = start(kind, free_port())
        if processes is None:
            script = SCRIPTS[name]
            break
        counted[ends(processes, options.patience)] += 1
    if script is not None:
        break
    print(f"{kind}:", ", ".join(f"{' and '.join(how)}: {times}" for how, times in counted.items()), flush=True)
if script is not None:  # at the top, so that the interpreter ends with it as with any script
    exec(compile(BEGIN + script, "<script>", "exec"), globals())
