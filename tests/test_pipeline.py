"""Stages of a model on several ranks, run by torch's pipeline schedules: alone, and with DDP or FSDP2 for each stage.

The oracle is one big batch through all layers, in one process.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import TORCH, full
from problems import IGNORED, error, make_batch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens
from distaccum.extensions import NoiseScale, WideSums

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="stages of torch 2.9 greet in another dtype: gloo aborts")
CHUNKS = 2
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
# Micro-batches of 4 samples by data rank: even, uneven, a dry rank.
WINDOWS = [(2, 2), (1, 3), (0, 2)]


def make_layers() -> list[nn.Sequential]:
    torch.manual_seed(3)
    sizes = [5, 8, 8, 8, 4]
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in itertools.pairwise(sizes)]


def by_stage(kind: str) -> list[nn.Sequential]:
    layers = make_layers()
    if kind in ("GPipe", "1F1B"):  # one stage on each of two ranks
        return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    return layers


def criterion(outputs: Tensor, labels: Tensor, how: str = "mean") -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how)


class Pipe:
    """This rank's stages of the model, and their schedule."""

    def __init__(self, kind: str, wrap: str, loss_fn: Any = criterion, **options: Any) -> None:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        ranks = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "stage"))
        self.rank, self.num = self.mesh["data"].get_local_rank(), ranks // 2
        here, every = self.mesh["stage"].get_local_rank(), by_stage(kind)
        self.here = [here] if len(every) == 2 else [here, 3 - here] if kind == "ZBVZeroBubble" else [here, here + 2]
        self.modules: list[nn.Module] = [every[i] for i in self.here]
        if wrap in ("fsdp2", "replicate"):
            for module in self.modules:
                (fully_shard if wrap == "fsdp2" else replicate)(module, mesh=self.mesh["data"])
        elif wrap == "ddp":
            group = self.mesh["data"].get_group()
            self.modules = [DistributedDataParallel(module, process_group=group) for module in self.modules]
        group = self.mesh["stage"].get_group()
        stages = [
            pipelining.PipelineStage(module, i, len(every), torch.device("cpu"), group=group)
            for i, module in zip(self.here, self.modules, strict=True)
        ]
        options = {"scale_grads": False, **options}
        make = getattr(pipelining, f"Schedule{kind}")
        self.schedule = make(stages[0] if len(every) == 2 else stages, CHUNKS, loss_fn=loss_fn, **options)
        self.is_last = len(every) - 1 in self.here

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]

    def of_rank(self, every: nn.Sequential) -> list[nn.Parameter]:
        return [p for i in self.here for p in every[i].parameters()]


def batches_of(window: int, rank: int, num: int) -> list[Any]:
    batches = [make_batch(4, seed=100 * window + 10 * rank + i) for i in range(num)]
    if window == 1 and rank == 1:
        batches[0]["labels"][:2] = IGNORED  # a chunk in which nothing counts
        batches[1]["labels"][:] = IGNORED  # a micro-batch, which every stage leaves out
    return [(one["x"], one["labels"]) for one in batches]


def law_of_stages(kind: str, wrap: str, options: dict[str, Any]) -> Any:
    """By window: how far the step of this rank's stages, the norm and the loss are off."""
    how = "mean" if options.get("reduction", "mean") == "mean" else "sum"
    pipe = Pipe(kind, wrap, lambda outputs, labels: criterion(outputs, labels, how))
    clip = options.get("max_norm", 1e9)
    options = {"max_norm": clip, "count": count_tokens(1), **options}
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), **options)
    exact, seen = nn.Sequential(*by_stage(kind)), []
    for index, layout in enumerate(WINDOWS):
        layout = layout[-pipe.num :]
        before = [full(p).detach().clone() for p in pipe.parameters()]
        window = accumulator.window(batches_of(index, pipe.rank, layout[pipe.rank]))
        for x, labels in window:
            outputs = window.run(x, target=labels)
            assert (outputs is not None) == pipe.is_last
        update = window.step()
        x, labels = map(
            torch.cat, zip(*[b for r in range(pipe.num) for b in batches_of(index, r, layout[r])], strict=True)
        )
        exact.zero_grad()
        loss = criterion(exact(x), labels, "sum" if options.get("reduction") == "sum" else "mean")
        loss.backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in exact.parameters()))
        with torch.no_grad():
            for p in exact.parameters():
                p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
                p.sub_(p.grad)
        moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, pipe.parameters(), strict=True)])
        wanted = torch.cat([p.grad.flatten() for p in pipe.of_rank(exact)])
        off = abs(update.loss - loss.item()) / abs(loss.item())
        assert update.counts == {"tokens": int(labels.ne(IGNORED).sum())}
        seen.append((error(moved, wanted), abs(update.grad_norm - norm) / norm, off))
    return seen


def within(seen: Any, bound: float = 1e-10) -> None:
    for of_rank in seen:
        assert len(of_rank) == len(WINDOWS)
        for numbers in of_rank:
            assert max(numbers) <= bound, of_rank


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_law_holds_over_stages(ranks, kind, wrap):
    within(ranks(4).run(law_of_stages, kind, wrap, {}))


@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_law_holds_over_stages_without_data_parallelism(ranks, kind):
    within(ranks(2).run(law_of_stages, kind, "none", {}))


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "sum_to_mean"}, {"max_norm": 0.05}])
@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_law_holds_over_stages_for_each_reduction_and_clipped(ranks, options, wrap):
    within(ranks(4).run(law_of_stages, "1F1B", wrap, options))


def named_losses() -> Any:
    """A loss over tokens and one over samples, of which some chunks have no token."""
    pipe = Pipe("1F1B", "ddp", two_losses)
    counts = {"tokens": count_tokens(1), "samples": count_samples}
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), count=counts)
    exact = nn.Sequential(*by_stage("1F1B"))
    x, labels = map(torch.cat, zip(*[b for r in range(2) for b in batches_of(1, r, 3)], strict=True))
    wanted = two_losses(exact(x), labels)
    sum(wanted.values()).backward()
    before = [p.detach().clone() for p in pipe.parameters()]
    window, losses = accumulator.window(batches_of(1, pipe.rank, 3)), []
    for x, labels in window:
        window.run(x, target=labels, losses=losses)
    update = window.step()
    moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, pipe.parameters(), strict=True)])
    off = error(moved, torch.cat([p.grad.flatten() for p in pipe.of_rank(exact)]))
    return off, max(abs(update.losses[name] - value.item()) for name, value in wanted.items()), len(losses)


def two_losses(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"tokens": criterion(outputs, labels), "samples": outputs.square().mean()}


def test_named_losses_are_exact_over_stages(ranks):
    for rank, (off, of_loss, num) in enumerate(ranks(4).run(named_losses)):
        assert off <= 1e-10 and of_loss <= 1e-10
        assert num == (CHUNKS if rank % 2 else 0)  # of the last micro-batch, on the last stage


class Part(nn.Module):
    """A stage whose two layers tensor-parallel ranks cut between them."""

    def __init__(self, size: int, tensor: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 8), nn.Linear(8, 4)
        self.double()
        if tensor is not None:
            parallelize_module(self, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def three_dimensions(num: int) -> Any:
    """Data ranks, and stages and tensor-parallel ranks, two of each."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh("cpu", (num, 2, 2), mesh_dim_names=("data", "stage", "tensor"))
    data, here = mesh["data"].get_local_rank(), mesh["stage"].get_local_rank()
    torch.manual_seed(3)
    exact = nn.Sequential(Part(5), Part(4))
    part = Part([5, 4][here], mesh["tensor"])
    for mine, other in zip(part.parameters(), exact[here].parameters(), strict=True):
        whole = distribute_tensor(other.detach(), mine.device_mesh, mine.placements)
        mine.data.copy_(whole)
    if num > 1:
        fully_shard(part, mesh=mesh["data"])
    stage = pipelining.PipelineStage(part, here, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = pipelining.Schedule1F1B(stage, CHUNKS, loss_fn=criterion, scale_grads=False)
    accumulator = Accumulator(schedule, SGD(part.parameters(), lr=1.0), count=count_tokens(1), max_norm=1e9)
    x, labels = map(torch.cat, zip(*[b for r in range(num) for b in batches_of(1, r, 1 + r)], strict=True))
    loss = criterion(exact(x), labels)
    loss.backward()
    before = [full(p).detach().clone() for p in part.parameters()]
    window = accumulator.window(batches_of(1, data, 1 + data))
    for x, labels in window:
        window.run(x, target=labels)
    update = window.step()
    moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, part.parameters(), strict=True)])
    norm = math.hypot(*(float(p.grad.norm()) for p in exact.parameters()))
    wanted = torch.cat([p.grad.flatten() for p in exact[here].parameters()])
    return error(moved, wanted), abs(update.grad_norm - norm) / norm, abs(update.loss - loss.item())


@pytest.mark.parametrize("num", [1, 2])
def test_law_holds_over_stages_beside_tensor_parallel_ranks(ranks, num):
    for numbers in ranks(4 * num).run(three_dimensions, num):
        assert max(numbers) <= 1e-10


# Misuse, and windows that are left


def message_of(call: Any) -> str:
    try:
        call()
    except (DistaccumError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def misused() -> list[str]:
    pipe = Pipe("1F1B", "ddp")
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), count=count_tokens(1), micro_batch_size=4)
    batches = batches_of(0, pipe.rank, 1)
    said = []

    window = accumulator.window(batches)
    for x, _ in window:
        said.append(message_of(lambda x=x: window.backward(x.clone().requires_grad_().sum())))
        break
    window.discard()

    window = accumulator.window(batches)
    for x, labels in window:
        window.run(x, target=labels)
        said.append(message_of(lambda x=x, labels=labels: window.run(x, target=labels)))
        break
    window.discard()

    for call in (
        lambda: accumulator.update(batches[0], lambda batch: pipe.modules[0](batch[0]).sum()),
        lambda: accumulator.check(batches[0], lambda batch: pipe.modules[0](batch[0]).sum()),
        lambda: accumulator.contrast(batches[0], lambda batch: batch[0].flatten(1), lambda x: x.sum()),
        lambda: accumulator.window([tuple(one[:3] for one in batches[0])]),
        lambda: Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), extensions=[NoiseScale()]),
        lambda: Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), sync="every"),
        lambda: Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), extensions=[WideSums(torch.float64)]),
    ):
        said.append(message_of(call))
    other = batches_of(5, dist.get_rank(), 1)  # other samples on each stage
    said.append(message_of(lambda: accumulator.window(other)))
    return said


def test_misuse_of_a_pipeline_is_refused_on_all_stages(ranks):
    for said in ranks(4).run(misused):
        assert "window.backward() with a Schedule1F1B" in said[0] and "call window.run(inputs" in said[0]
        assert "DistaccumError" in said[1]  # a second run in one micro-batch
        for call, message in zip(("update", "check", "contrast"), said[2:5], strict=True):
            assert f"{call}() takes a function that returns a loss" in message
        assert "a micro-batch has 3 samples" in said[5] and "a multiple of 2" in said[5]
        assert "NoiseScale() with a pipeline's schedule" in said[6]
        assert "sync='every' with a pipeline" in said[7]
        assert "WideSums with a pipeline's schedule" in said[8]
        assert "compute on the same samples together, and have" in said[9]


def test_run_is_refused_without_a_pipeline():
    net = nn.Linear(2, 1)
    window = Accumulator(net, SGD(net.parameters(), lr=0.1)).window([torch.ones(1, 2)])
    for x in window:
        with pytest.raises(DistaccumError, match=r"window.run\(\) with a plain module"):
            window.run(x)
        break


def left(wrap: str) -> Any:
    """A window that is left by break, one that is used for evaluation in between, and an exact one."""
    pipe = Pipe("1F1B", wrap)
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), count=count_tokens(1))
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    for x, labels in window:
        window.run(x, target=labels)
        break
    window.discard()
    x, labels = batches_of(3, 0, 1)[0]
    losses: list[Tensor] = []
    with torch.no_grad():
        options = {"target": labels, "losses": losses} if pipe.is_last else {}
        pipe.schedule.eval(*([] if pipe.is_last else [x]), **options)
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    for x, labels in window:
        window.run(x, target=labels)
    if wrap == "fsdp2":  # whose gradients an evaluation clears
        with torch.no_grad():
            pipe.schedule.eval(*([] if pipe.is_last else [x]), **({"target": labels} if pipe.is_last else {}))
        assert "gradients were cleared between the window's loop and its step()" in message_of(window.step)
    window.discard()
    return losses, law_after(pipe, accumulator)


def law_after(pipe: Pipe, accumulator: Accumulator) -> float:
    exact = nn.Sequential(*by_stage("1F1B"))
    x, labels = map(torch.cat, zip(*[b for r in range(2) for b in batches_of(0, r, 2)], strict=True))
    criterion(exact(x), labels).backward()
    before = [full(p).detach().clone() for p in pipe.parameters()]
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    for x, labels in window:
        window.run(x, target=labels)
    window.step()
    moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, pipe.parameters(), strict=True)])
    return error(moved, torch.cat([p.grad.flatten() for p in pipe.of_rank(exact)]))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_window_that_is_left_leaves_no_trace_in_a_pipeline(ranks, wrap):
    for losses, off in ranks(4).run(left, wrap):
        assert off <= 1e-10
        for loss in losses:  # whole: no window weighs what is only looked at
            assert float(loss) > 0.5


def with_a_frozen_stage(frozen: int) -> Any:
    """A window that overflows in the other stage, and one after it: the scale, and how far step and norm are off."""
    pipe = Pipe("1F1B", "none")
    for module in pipe.modules if dist.get_rank() == frozen else []:
        module.requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = SGD(pipe.parameters(), lr=1.0)
    accumulator = Accumulator(pipe.schedule, optimizer, count=count_tokens(1), max_norm=0.05, scaler=scaler)
    said = []
    for overflows in (True, False):
        before = [p.detach().clone() for p in pipe.parameters()]
        window = accumulator.window(batches_of(0, 0, 2))
        for x, labels in window:
            window.run(x, target=labels)
        for p in pipe.parameters() if overflows and dist.get_rank() != frozen else []:
            p.grad.fill_(math.inf)
        update = window.step()
        said.append(update.reason)
    every = by_stage("1F1B")
    every[frozen].requires_grad_(False)
    x, labels = map(torch.cat, zip(*batches_of(0, 0, 2), strict=True))
    criterion(nn.Sequential(*every)(x), labels).backward()
    exact = torch.cat([p.grad.flatten() for p in every[1 - frozen].parameters()])
    moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, pipe.parameters(), strict=True)])
    wanted = exact * 0.05 / exact.norm() if dist.get_rank() != frozen else torch.zeros_like(moved)
    off = float((moved - wanted).abs().max()), abs(update.grad_norm - float(exact.norm()))
    return said, scaler.get_scale(), max(off)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_stage_takes_part_in_norm_and_scale(ranks, frozen):
    for said, scale, off in ranks(2).run(with_a_frozen_stage, frozen):
        assert said == ["the scaled gradients overflowed", None]
        assert scale == 2.0 and off <= 1e-6  # clipping adds 1e-6 to the norm


def in_one_process() -> float:
    """All layers are one stage."""
    every = nn.Sequential(*make_layers())
    stage = pipelining.PipelineStage(every, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, CHUNKS, loss_fn=criterion, scale_grads=False)
    accumulator = Accumulator(schedule, SGD(every.parameters(), lr=1.0), count=count_tokens(1), max_norm=1e9)
    window = accumulator.window(batches_of(0, 0, 2))
    for x, labels in window:
        window.run(x, target=labels)
    exact = nn.Sequential(*make_layers())
    x, labels = map(torch.cat, zip(*batches_of(0, 0, 2), strict=True))
    criterion(exact(x), labels).backward()
    off = [error(p.grad, q.grad) for p, q in zip(every.parameters(), exact.parameters(), strict=True)]
    window.step()
    return max(off)


def test_law_holds_over_one_stage_in_one_process(ranks):
    assert max(ranks(1).run(in_one_process)) <= 1e-10


def lost_weights(kind: str, how: str) -> str:
    """Stages of which torch reduces gradients too early, or loses some: measured in torch 2.15."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    every = by_stage(kind)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    here, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
    places, stages = [here] if len(every) == 2 else [here, here + 2], []
    for place in places:
        whole = [] if how == "inside" else [every[place]]
        for module in [*(one for one in every[place] if list(one.parameters())), *whole]:
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=False if how == "kept" else None)
        stages.append(pipelining.PipelineStage(every[place], place, len(every), torch.device("cpu"), group=group))
    make = getattr(pipelining, f"Schedule{kind}")
    schedule = make(stages if len(every) > 2 else stages[0], CHUNKS, loss_fn=criterion, scale_grads=False)
    parameters = [p for place in places for p in every[place].parameters()]
    try:
        accumulator = Accumulator(schedule, SGD(parameters, lr=0.1), count=count_tokens(1))
        accumulator.window(batches_of(0, mesh["data"].get_local_rank(), 1))
    except (DistaccumError, ValueError) as raised:
        return str(raised)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "how", "said"),
    [
        ("1F1B", "inside", "was called on a module inside of a stage of the Schedule1F1B"),
        ("1F1B", "layers", "nothing"),
        ("InterleavedZeroBubble", "layers", "are parts again after forward"),
        ("InterleavedZeroBubble", "kept", "nothing"),
    ],
)
def test_sharded_stages_whose_gradients_torch_would_lose_are_refused(ranks, kind, how, said):
    for message in ranks(4).run(lost_weights, kind, how):
        assert said in message


def frozen_beginning(kind: str) -> str:
    pipe = Pipe(kind, "none")
    for place, module in zip(pipe.here, pipe.modules, strict=True):
        module.requires_grad_(place > 1)
    try:
        Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), count=count_tokens(1))
    except ValueError as raised:
        return str(raised)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "said"), [("InterleavedZeroBubble", "stages before 2 are frozen"), ("Interleaved1F1B", "nothing")]
)
def test_frozen_first_stages_are_refused_where_backward_is_split(ranks, kind, said):
    for message in ranks(2).run(frozen_beginning, kind):
        assert said in message


def of_other_lengths() -> list[str]:
    """Windows that would exchange tensors of two shapes, and one after a call without gradients, which frees them."""
    pipe = Pipe("1F1B", "ddp")
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.0), count=count_tokens(1))

    def run(*lengths: int) -> None:
        window = accumulator.window(
            [tuple(one[:length] for one in batches_of(0, pipe.rank, 1)[0]) for length in lengths]
        )
        for x, labels in window:
            window.run(x, target=labels)
        window.step()

    said = [message_of(lambda lengths=lengths: run(*lengths)) for lengths in ((4, 2), (4, 4), (2,), (4,))]
    x, labels = batches_of(3, 0, 1)[0]
    pipe.schedule.eval(*([] if pipe.is_last else [x]), **({"target": labels} if pipe.is_last else {}))
    said.append(message_of(lambda: run(2, 2)))
    return said


def test_micro_batches_of_other_lengths_are_refused_on_all_stages(ranks):
    for said in ranks(4).run(of_other_lengths, seconds=20):
        assert "has 2 samples and another 4" in said[0] and "has 2 samples and another 4" in said[2]
        assert [said[1], *said[3:]] == ["nothing"] * 3


def in_chunks_of_its_own() -> str:
    pipe = Pipe("1F1B", "ddp")
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.0), count=count_tokens(1))
    window = accumulator.window(batches_of(0, pipe.rank, 1))
    for x, labels in window:
        message = message_of(lambda x=x, labels=labels: window.run(arg_mbs=[(x,)] * 2, target_mbs=[labels] * 2))
        break
    window.discard()
    return message


def test_chunks_that_were_not_counted_are_refused(ranks):
    for message in ranks(4).run(in_chunks_of_its_own):
        assert "run() got arg_mbs, target_mbs, chunks of your own" in message
