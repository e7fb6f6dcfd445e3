"""The time and the memory of a training run with and without `distaccum.audit`.

    python launch/bench/audit.py --out launch/results/audit
    python launch/bench/audit.py --rounds 1 --updates 33 --ranks 1 --shapes large  # 50 million parameters alone

The two take turns update by update, as processes or as jobs of two ranks (DDP, gloo): a machine whose pace changes
slows both. Their weights must be equal bit by bit.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_ranks, peak_of, quartiles, spelled, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import distaccum

STEPS, ROWS, TOKENS = 4, 8, 32  # micro-steps per update, rows of each, tokens per row
FIRST = 16  # updates in which every receipt is taken
SHAPES = {"8 tensors": (0, 192), "36 tensors": (2, 96), "large": (6, 1024)}  # layers of a transformer, width


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.inputs = nn.Embedding(256, width)
        blocks = [nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0) for _ in range(layers)]
        self.blocks = nn.Sequential(*(blocks or [nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)]))
        self.outputs = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, rows: Tensor) -> Tensor:
        return self.outputs(self.blocks(self.inputs(rows)))


def train(shape: str, updates: int, is_audited: bool, turns: dist.Store) -> tuple[float, float, float, Tensor]:
    """Trains; returns the seconds of the first updates, those of the others, the MB at the peak, and the weights."""
    torch.manual_seed(0)
    net: nn.Module = Net(*SHAPES[shape])
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 256, (STEPS, ROWS, TOKENS))
    took = []
    clock = time.perf_counter if dist.is_initialized() else time.process_time

    def train_all() -> None:
        turns.set("True -1", "")
        for update in range(updates):  # the first is not timed
            turns.wait([f"{not is_audited} {update - (not is_audited)}"])
            began = clock()
            for i, micro_batch in enumerate(rows):
                is_last = i + 1 == STEPS
                with nullcontext() if is_last or model is net else model.no_sync():
                    loss = cross_entropy(model(micro_batch).flatten(0, 1), micro_batch.flatten()) / STEPS
                    loss.backward()
            sgd.step()
            sgd.zero_grad()
            took.append(clock() - began)
            turns.set(f"{is_audited} {update}", "")

    with distaccum.audit(model) if is_audited else nullcontext():
        megabytes = peak_of(train_all, CPU)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return sum(took[1:FIRST]), sum(took[FIRST:]), megabytes, weights


def train_often(is_audited: bool, folder: str, shape: str, updates: int, rounds: int) -> list[Any]:
    ranks = dist.get_world_size()
    if ranks == 1:  # a process without a group
        dist.destroy_process_group()
    lengths = [2, *[updates] * rounds]  # what a process pays once is no part of the memory
    stores = [dist.FileStore(str(Path(folder, str(turn)))) for turn in range(len(lengths))]
    return [train(shape, num, is_audited, store) for num, store in zip(lengths, stores, strict=True)][1:]


def measure(ranks: int, updates: int, rounds: int, shape: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        given = (folder, shape, updates, rounds)
        run = partial(in_ranks, ranks, train_often, seconds=3000)
        jobs = [pool.submit(run, is_audited, *given) for is_audited in (False, True)]
        pairs = [*zip(*(job.result()[0] for job in jobs), strict=True)]
    assert all(torch.equal(audited[3], plain[3]) for plain, audited in pairs), "the audit changed the weights"
    milliseconds = quartiles([1e3 * plain[1] / STEPS / (updates - FIRST) for plain, _ in pairs])["median"]
    first, others = (quartiles([audited[i] / plain[i] for plain, audited in pairs]) for i in (0, 1))
    more = quartiles([audited[2] - plain[2] for plain, audited in pairs])
    row = {"ranks": ranks, "shape": shape, "milliseconds": milliseconds}
    return {**row, "first": first, "others": others, "megabytes": more}


def main() -> None:
    parser = Options(__doc__)
    parser.counts("--ranks", [1, 2], "1 is one process")
    parser.counts("--updates", 200, "per run")
    parser.counts("--rounds", 8)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="which models")
    options = parser.parse_args()
    if options.updates <= FIRST:
        parser.error(f"--updates {options.updates}, expected more than {FIRST}")
    torch.set_num_threads(1)
    about = circumstances(CPU)
    lines = header(
        "What an audit costs",
        about,
        f"Ratio of the time of {options.updates} updates of {STEPS} micro-steps under `distaccum.audit` to that "
        f"without, in turns of an update, {options.rounds} rounds: the median, and how far the middle half reaches. "
        f"Receipts are taken in each of the first {FIRST} updates, and in every 16th of the others. One process by its "
        "own time, ranks (DDP on gloo) by the clock of rank 0. In every round the weights are the same to the bit. The "
        "large model has 51 million parameters in 77 tensors, 204 MB of gradients.",
    )
    every = [(ranks, shape) for ranks in options.ranks for shape in options.shapes]
    rows = [measure(ranks, options.updates, options.rounds, shape) for ranks, shape in every]
    heads = ("parameters", "ranks", "ms per micro-step", f"first {FIRST} updates", "the others", "more MB")
    kinds = ("first", "others", "megabytes")
    cells = [
        (row["shape"], row["ranks"], f"{row['milliseconds']:.1f}", *(spelled(row[kind]) for kind in kinds))
        for row in rows
    ]
    write(options.out, "\n".join([*lines, *table(heads, cells)]), {**about, "rows": rows})


if __name__ == "__main__":
    main()
