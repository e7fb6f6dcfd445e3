"""Windows on meshes of 2 x 2 ranks against the same loops by hand: time, and the collectives of each.

    python launch/bench/meshes.py --out launch/results/meshes

- tensor:  fully_shard over two data ranks, beside two tensor-parallel ranks.
- context: fully_shard over all four ranks, of which two have parts of the same sequences.
- experts: fully_shard over all four, and over two of them for experts that two ranks share.
- stages:  a pipeline of two stages (1F1B, 4 chunks), with fully_shard over two data ranks in each.

A window is 4 micro-batches. The loop by hand knows its tokens in advance, multiplies each loss by its share and reduces
in the last micro-batch, as torch's documentation says; once more by hand is the noise. "distaccum" counts the tokens,
plans and records; with its default it also takes the norm of the gradient, to look for values that are not finite.
Time: of whole windows on the first rank (forward, backward, step of SGD, clearing), by turns, once by the wall's clock
and once by the processor's, which does not count waiting; read the ratios.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_turns, ratios, some_ranks, spelled, table, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum import Accumulator, count_tokens

MESHES = ("tensor", "context", "experts", "stages")
LOOPS = ("by hand", "by hand again", "distaccum", "distaccum, default")
STEPS, CHUNKS, ROWS, WORDS, VOCABULARY = 4, 4, 8, 64, 128
SMALL = 256  # numbers: a collective of at most these carries no gradient
TIMES = {"of the wall": time.perf_counter, "of the processor": time.process_time}
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down


class AddUp(torch.autograd.Function):
    """The sum over ranks, forward and backward: what parts of sequences or of experts exchange here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, whole = group, x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class Mixing(nn.Module):
    """Every token gets the mean over the sequence, which ranks with parts of it add up."""

    def __init__(self, group: dist.ProcessGroup, ranks: int) -> None:
        super().__init__()
        self.group, self.ranks = group, ranks

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = AddUp.apply(x.mean(1, keepdim=True), self.group) / self.ranks
        return x + mean


class Experts(nn.Module):
    """Each rank has some rows of a weight, which all ranks of the group use: the sum over ranks is the output."""

    def __init__(self, width: int, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(width, width) / width, mesh, [Shard(0)]))
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        mine = x.chunk(self.ranks, dim=-1)[self.rank] @ weight.to_local()
        mixed: Tensor = AddUp.apply(mine, self.group) / self.ranks
        return x + mixed


@dataclass
class Job:
    """A model on a mesh, and how its micro-batches are run."""

    model: Any  # what the Accumulator gets
    parameters: list[nn.Parameter]
    ranks: int  # that the wrapper averages over
    batches: list[Batch]
    options: dict[str, Any]
    share: float = 1.0  # of a loss by hand, in a pipeline
    schedule: Any = None
    modules: tuple[Any, ...] = ()

    def by_hand(self, optimizer: SGD) -> None:
        for i, (x, labels) in enumerate(self.batches):
            is_last = i + 1 == len(self.batches)
            if self.schedule is not None:
                self.schedule.step(*self.given(x, labels)[0], **self.given(x, labels)[1], finalize_gradients=is_last)
                continue
            for module in self.modules:
                module.set_requires_gradient_sync(is_last)
            (criterion(self.model(x), labels) * self.share).backward()
        optimizer.step()
        optimizer.zero_grad()

    def given(self, x: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        stage = dist.get_rank() % 2
        return ((x,), {}) if stage == 0 else ((), {"target": labels})

    def windows(self, accumulator: Accumulator) -> None:
        window = accumulator.window(self.batches)
        for x, labels in window:
            if self.schedule is not None:
                window.run(x, target=labels, return_outputs=False)
            else:
                window.backward(criterion(self.model(x), labels))
        window.step()


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make(kind: str, width: int) -> Job:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", kind))
    both, rank = init_device_mesh("cpu", (4,)), mesh["data"].get_local_rank()
    enter, leave = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
    options: dict[str, Any] = {"count": count_tokens(1), "reduction": "sum_to_mean"}
    if kind == "stages":
        return stages(mesh, [nn.Sequential(enter, Block(width)), nn.Sequential(Block(width), leave)], rank, options)
    if kind == "tensor":
        blocks = [Block(width) for _ in range(2)]
        for block in blocks:
            parallelize_module(block, mesh[kind], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "context":
        blocks = [Block(width), Mixing(mesh[kind].get_group(), 2), Block(width)]
        options["mesh"] = mesh["data"]
    else:
        blocks = [Block(width), Experts(width, mesh[kind]), Block(width)]
        fully_shard(blocks[1], mesh=mesh["data"], shard_placement_fn=lambda _: Shard(1))
        blocks[1].set_gradient_divide_factor(4)
        blocks[1].set_force_sum_reduction_for_comms(True)  # gloo cannot multiply as it sums
        rank = dist.get_rank()
    model = nn.Sequential(enter, *blocks, leave)
    over = mesh["data"] if kind == "tensor" else both
    wrapped = [fully_shard(block, mesh=over) for block in model if isinstance(block, Block)]
    fully_shard(model, mesh=over)
    batches = [batch(10 * rank + i) for i in range(STEPS)]
    if kind == "context":
        batches = [tuple(one.chunk(2, dim=1)[mesh[kind].get_local_rank()] for one in pair) for pair in batches]  # type: ignore[misc]
    modules = (model, *wrapped, *([blocks[1]] if kind == "experts" else []))
    ranks = 2 if kind == "tensor" else 4
    job = Job(model, list(model.parameters()), ranks, batches, options, modules=modules)
    job.share = ranks / tokens_of(batches, both.get_group(), copies=2 if kind == "tensor" else 1)
    return job


def stages(mesh: Any, every: list[nn.Sequential], rank: int, options: dict[str, Any]) -> Job:
    here = mesh["stages"].get_local_rank()
    part: Any = fully_shard(every[here], mesh=mesh["data"])
    stage = PipelineStage(part, here, 2, CPU, group=mesh["stages"].get_group())
    batches = [batch(10 * rank + i) for i in range(STEPS)]
    share = 2 / tokens_of(batches, mesh["data"].get_group(), copies=1)
    job = Job(None, list(part.parameters()), 2, batches, options)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return criterion(logits, labels) * job.share

    job.schedule = job.model = Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=loss_fn, scale_grads=False)
    job.share = share
    return job


def tokens_of(batches: list[Batch], group: Any, copies: int) -> float:
    total = torch.tensor(float(sum(int(labels.ne(-100).sum()) for _, labels in batches)))
    dist.all_reduce(total, group=group)
    return float(total) / copies


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, VOCABULARY, (ROWS, WORDS), generator=generator)
    return x, x.roll(-1, dims=1).masked_fill(torch.rand(x.shape, generator=generator) < 0.3, -100)


def loop_of(name: str, kind: str, width: int) -> tuple[Callable[[], None], Job]:
    job = make(kind, width)
    optimizer = SGD(job.parameters, lr=1e-3)
    if name.startswith("by hand"):
        return lambda: job.by_hand(optimizer), job
    job.share = 1.0
    looks = "raise" if name.endswith("default") else "ignore"
    accumulator = Accumulator(job.model, optimizer, on_nonfinite=looks, **job.options)  # type: ignore[arg-type]
    return lambda: job.windows(accumulator), job


class Collectives(TorchDispatchMode):
    """Counts them by kind, by the ranks that take part, and whether they are small."""

    KINDS = (
        ("reduce_scatter", "reduce-scatter"),
        ("allgather", "all-gather"),
        ("all_gather", "all-gather"),
        ("allreduce", "all-reduce"),
        ("all_reduce", "all-reduce"),
        ("alltoall", "all-to-all"),
        ("recv", "receive"),
        ("send", "send"),
    )

    def __init__(self, names: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.names, self.seen = names, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "from_local") for kind in types):
            return NotImplemented  # a DTensor's own dispatch comes again with its parts
        kind = next((kind for text, kind in self.KINDS if text in str(func)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            leaves = torch.utils._pytree.tree_leaves(args)
            size = max((one.numel() for one in leaves if isinstance(one, Tensor)), default=0)
            among = self.names.get(self.ranks_of(leaves), "other")
            self.seen[f"{among}: {'small ' if size <= SMALL else ''}{kind}"] += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def ranks_of(leaves: list[Any]) -> tuple[int, ...]:
        for one in leaves:
            try:  # names of groups stand beside those of operations
                if isinstance(one, str):
                    group: Any = dist.distributed_c10d._resolve_process_group(one)
                elif isinstance(one, torch.ScriptObject):
                    group = dist.ProcessGroup.unbox(one)
                else:
                    continue
            except RuntimeError:
                continue
            return tuple(sorted(dist.get_process_group_ranks(group)))
        return ()


def counted(kind: str, width: int) -> dict[str, dict[str, int]]:
    """The collectives of one window after the first, by hand and with the library."""
    rank = dist.get_rank()
    names = {(rank % 2, rank % 2 + 2): "data", (rank // 2 * 2, rank // 2 * 2 + 1): kind, (0, 1, 2, 3): "all four"}
    found = {}
    for name in ("by hand", "distaccum", "distaccum, default"):
        loop, _ = loop_of(name, kind, width)
        loop()
        with Collectives(names) as mode:
            loop()
        found[name] = dict(sorted(mode.seen.items()))
    return found


def timed(kind: str, width: int, rounds: int, warm_up: int) -> dict[str, dict[str, list[float]]]:
    loops = {name: loop_of(name, kind, width)[0] for name in LOOPS}
    for loop in loops.values():
        for _ in range(warm_up):
            loop()
    together = {name: lambda: dist.barrier() for name in LOOPS}
    return {name: in_turns(loops, rounds, CPU, before=together, clock=clock) for name, clock in TIMES.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind in options.meshes:
        print(f"{kind}: {options.rounds} rounds", flush=True)
        with some_ranks(4) as ranks:
            by_clock = ranks.run(timed, kind, options.width, options.rounds, options.warm_up, seconds=600)[0]
            collectives = ranks.run(counted, kind, options.width, seconds=300)[0]
        result[kind] = {
            "milliseconds": {clock: 1e3 * median(times["by hand"]) for clock, times in by_clock.items()},
            "ratios": {
                clock: {name: ratios(taken, times["by hand"]) for name, taken in times.items()}
                for clock, times in by_clock.items()
            },
            "collectives": collectives,
        }
    return result


def lines_of(result: dict[str, Any]) -> list[str]:
    heads = ["mesh, time", "by hand, ms", *(f"{name}, ratio" for name in LOOPS[1:])]
    rows = [
        [f"{kind}, {clock}", f"{taken:.1f}", *(spelled(of["ratios"][clock][name]) for name in LOOPS[1:])]
        for kind, of in result.items()
        for clock, taken in of["milliseconds"].items()
    ]
    lines = ["## Time of a window", "", *table(heads, rows), "## Collectives of a window, on the first rank", ""]
    for kind, of in result.items():
        seen = of["collectives"]
        names = sorted({name for counts in seen.values() for name in counts})
        rows = [[name, *(counts.get(name, 0) for counts in seen.values())] for name in names]
        lines += [f"### {kind}", "", *table(["among: what", *seen], rows)]
    return lines


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES), help="(all)")
    parser.counts("--rounds", 25, "rounds of all loops by turns")
    parser.counts("--width", 256, "of the model")
    parser.counts("--warm-up", 20, "windows of each loop ahead of its times")
    options = parser.parse_args()
    result = measure(options)
    notes = (
        f"Four gloo ranks on this machine. A micro-batch is {ROWS} rows of {WORDS} tokens, the model two blocks of "
        f"width {options.width}. Ratios to the loop by hand, round by round: the median, the least and the most of "
        f"{options.rounds}. Small: at most {SMALL} numbers, which carry no gradient.",
        "By hand nothing is planned, recorded or looked at. distaccum adds the plan (two rounds of small messages "
        "among the four), the record of the loss, and what FSDP2's ranks tell each other of unused parameters; with "
        "the default of `on_nonfinite` also the norm. Each dimension that reduces does so once per window and wrapped "
        f"module. This is counted in the second window, and timed after {options.warm_up}: by then the four leave "
        "plans in memory that they share.",
    )
    about = circumstances(CPU)
    write(options.out, "\n".join([*header("Meshes", about, *notes), *lines_of(result)]), {**about, "meshes": result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
