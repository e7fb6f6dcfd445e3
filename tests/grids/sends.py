"""Measures what a window sends and keeps on every engine and policy, and the error of its gradient.

    python -m tests.grids.sends --out launch/results/engines  # a few minutes
    python -m tests.grids.sends --only FSDP2                  # the engines whose name contains it

The wrappers are those of the tests (support/engines.py), around a net of 1.6 million parameters in float32, on two gloo
ranks (four where a mesh has two dimensions). Collectives are counted in the process, in the third of three windows.
"""

from __future__ import annotations

import gc
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distaccum import Accumulator
from tests.support.counting import Counting
from tests.support.engines import CASES, KINDS, LAYOUTS, full_weights, laws, zero_weights
from tests.support.problems import error, gradient
from tests.support.ranks import Ranks

sys.path.append(str(Path(__file__).parents[2] / "launch" / "bench"))
from kit import CPU, Options, circumstances, header, write

STEPS = 8
NUM_WINDOWS = len(CASES) * len(LAYOUTS)
LR = 16.0  # large, so that rounding of the weights does not hide the gradient
MOVED = ("allgather", "reduce_scatter", "allreduce")


class Net(nn.Module):
    """Two layers, which some kinds wrap one by one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
        self.head = nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


PARAMETER_BYTES = sum(4 * p.numel() for p in Net().parameters())


def inputs(index: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return [torch.randn(1 + (i + rank) % 3, 256, generator=generator) for i in range(STEPS)]


def measure(name: str, sync: str) -> dict[str, Any]:
    kind = KINDS[name]
    warnings.simplefilter("ignore")
    model, optimizer = kind.wrap(Net(), LR)
    accumulator = Accumulator(model, optimizer, sync=sync)
    rank, world = (dist.get_rank(), dist.get_world_size()) if kind.world > 1 else (0, 1)
    for index in range(3):
        before = all_weights(model)
        sent: list[list[tuple[str, int]]] = []
        with Counting() as count:
            window = accumulator.window(inputs(index, rank))
            sent.append(count.take())
            standing = alive()
            for i, x in enumerate(window):
                loss = model(x).square().mean()
                window.backward(loss)
                sent.append(count.take())
                if i == STEPS // 2:
                    del loss
                    kept = alive() - standing
            sent[-1] += count.take()
            update = window.step()
            sent.append(count.take())
    nn.utils.vector_to_parameters(before, (plain := Net()).parameters())
    everything = torch.cat([x for r in range(world) for x in inputs(index, r)]).double()
    plain.double()(everything).square().mean().backward()
    moved = (before.double() - all_weights(model).double()) / LR
    assert update.stepped
    assert all(total([one]) == total(sent[2:3]) for one in sent[2:STEPS])
    return {
        "error": error(moved, gradient(plain)),
        "kept": kept / PARAMETER_BYTES,
        "first": total(sent[1:2]),
        "next": total(sent[2:3]),
        "last": total(sent[STEPS : STEPS + 1]),
        "small": sum(size < 1000 for window in sent for _, size in window),
        "in_step": total(sent[STEPS + 1 :]),
    }


def total(sent: list[list[tuple[str, int]]]) -> dict[str, dict[str, float]]:
    """By kind: the number of collectives, and their size on this rank in multiples of the parameters."""
    kinds: dict[str, dict[str, float]] = {}
    for name, size in (one for part in sent for one in part):
        if size >= 1000:
            kind = next(known for known in (*MOVED, name) if name.strip("_").startswith(known))
            entry = kinds.setdefault(kind, {"count": 0, "numbers": 0.0})
            entry["count"] += 1
            entry["numbers"] += 4 * size / PARAMETER_BYTES
    return kinds


def alive() -> int:
    """Bytes of all tensors that Python can reach; each storage counts once."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if not isinstance(one, torch.Tensor):
            continue
        for tensor in (one, one.grad if one.is_leaf else None):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def all_weights(model: nn.Module) -> torch.Tensor:
    if type(model).__name__ == "DeepSpeedEngine":
        return zero_weights(model)
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel
    if any(isinstance(module, fsdp) for module in model.modules()):
        with fsdp.summon_full_params(model):
            by_name = {n.replace("_fsdp_wrapped_module.", ""): p.detach() for n, p in model.named_parameters()}
            return torch.cat([by_name[name].flatten() for name, _ in Net().named_parameters()]).clone()
    return full_weights(model)


def say(kinds: dict[str, dict[str, float]]) -> str:
    words = {"allgather": "gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce"}
    texts = (f"{e['count']} {words.get(kind, kind)} ({e['numbers']:.2f})" for kind, e in kinds.items())
    return ", ".join(texts) or "-"


def table(rows: list[dict[str, Any]]) -> str:
    parts = ("first", "next", "last", "in_step")
    lines = [
        "| engine | sync | first micro-step | each next | the last | in step | small | kept | error | law |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sent = " | ".join(say(row[part]) for part in parts)
        facts = f"{row['small']} | {row['kept']:.2f} | {row['error']:.0e} | {row['law']:.0e}"
        lines.append(f"| {row['engine']} | {row['sync']} | {sent} | {facts} |")
    return "\n".join(lines)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="only the engines whose name contains this")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started: dict[int, Ranks] = {}
    for name, kind in KINDS.items():
        for sync in kind.policies if kind.world > 1 and options.only in name else ():
            ranks = started.setdefault(kind.world, Ranks(kind.world))
            first = ranks.run(measure, name, sync, seconds=120)[0]
            seen = [one for of_rank in ranks.run(laws, name, sync, seconds=120) for one in of_rank.values()]
            law = max(max(window.gradient, window.loss) for windows in seen for window in windows)
            rows.append({"engine": name, "sync": sync, "ranks": kind.world, **first, "law": law})
            print(f"{name}, {sync}", file=sys.stderr)
    for ranks in started.values():
        ranks.stop()
    about = {**circumstances(CPU), "command": "python -m tests.grids.sends"}
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("accelerate", "deepspeed"))
    lines = header(
        "What each engine and policy sends and keeps",
        about,
        f"{versions}. Windows of {STEPS} micro-steps. Number of collectives, and in brackets how many numbers they "
        "hold on a rank (sent and received), in multiples of the model's parameters. *Small* ones (under 1000 numbers) "
        "are the plan, record and norm, and those that the engine adds. *Kept*: bytes alive in the middle of a "
        "window beyond those before it, in multiples of the parameters' bytes. *Error*: error of the change of the "
        "weights in float32, against one big batch in float64. *Law*: the largest error, in float64 (ZeRO in float32), "
        f"of a gradient or a recorded loss in {NUM_WINDOWS} windows of a small net: even, short, uneven, and with a "
        "rank without data, for means and sums over samples and tokens. Without the library each micro-step costs as "
        "much as `every`; with the engine's own switch it costs as much as `last`.",
    )
    write(options.out, "\n".join([*lines, table(rows)]), {**about, "parameter_bytes": PARAMETER_BYTES, "rows": rows})


if __name__ == "__main__":
    main()
