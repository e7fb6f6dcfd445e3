"""Torch's pipeline schedules, alone and with DDP or FSDP2 for each stage, against one big batch in one process."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from distaccum.extensions import NoiseScale, WideSums
from tests.support.oracle import step_off
from tests.support.problems import IGNORED, make_batch
from tests.support.ranks import mesh_of, on_ranks
from tests.support.versions import needs
from tests.support.windows import refused, weights

pytestmark = needs("torch", "2.13", "a pipeline")  # stages of torch 2.9 greet in another dtype: gloo aborts
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
        ranks = dist.get_world_size()
        self.mesh = mesh_of((ranks // 2, 2), "data", "stage")
        self.rank, self.num = self.mesh["data"].get_local_rank(), ranks // 2
        here, every = self.mesh["stage"].get_local_rank(), by_stage(kind)
        self.here = [here] if len(every) == 2 else [here, 3 - here] if kind == "ZBVZeroBubble" else [here, here + 2]
        self.modules: list[nn.Module] = [every[i] for i in self.here]
        if wrap == "replicate":
            for module in self.modules:
                replicate(module, mesh=self.mesh["data"])
        elif wrap.startswith("fsdp2"):
            self.shard(wrap.removeprefix("fsdp2 "))
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

    def shard(self, how: str) -> None:
        """Each stage, and its layers ("layers"); these alone ("inside"); both, gathered after forward ("kept")."""
        for stage in self.modules:
            layers = [layer for layer in stage if list(layer.parameters())] if how != "fsdp2" else []
            for module in [*layers, *[stage] * (how != "inside")]:
                fully_shard(module, mesh=self.mesh["data"], reshard_after_forward=False if how == "kept" else None)

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]

    def weights(self, _: Any = None) -> Tensor:
        """Those of all stages, in their order."""
        mine = {i: weights(module) for i, module in zip(self.here, self.modules, strict=True)}
        dist.all_gather_object(both := [mine] * 2, mine, group=self.mesh["stage"].get_group())
        return torch.cat([values for _, values in sorted({**both[0], **both[1]}.items())])

    def window_off(self, window: Any, exact: nn.Module, batch: Any, loss_fn: Any = None, clip: float = 1e9) -> float:
        """The largest error of the step, the norm and the loss."""
        of_all = lambda net, both: (loss_fn or criterion)(net(both[0]), both[1])  # noqa: E731
        run = lambda both: window.run(both[0], target=both[1])  # noqa: E731
        return max(step_off(self.schedule, window, exact, batch, of_all, run, clip, self.weights))


def batches_of(window: int, rank: int, num: int) -> list[Any]:
    batches = [make_batch(4, seed=100 * window + 10 * rank + i) for i in range(num)]
    if window == 1 and rank == 1:
        batches[0]["labels"][:2] = IGNORED  # a chunk in which nothing counts
        batches[1]["labels"][:] = IGNORED  # a micro-batch, which every stage leaves out
    return [(one["x"], one["labels"]) for one in batches]


def whole(index: int, layout: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all data ranks."""
    every = [batch for r, num in enumerate(layout) for batch in batches_of(index, r, num)]
    return torch.cat([x for x, _ in every]), torch.cat([labels for _, labels in every])


def run(window: Any) -> Any:
    for x, labels in window:
        outputs = window.run(x, target=labels)
    return outputs if len(window) else None


PIPES = [
    *((4, kind, "ddp", "mean", 1e9) for kind in SCHEDULES),
    *((4, kind, "fsdp2", "mean", 1e9) for kind in ("1F1B", "Interleaved1F1B")),
    *((2, kind, "none", "mean", 1e9) for kind in ("GPipe", "InterleavedZeroBubble")),
    *((4, "1F1B", wrap, how, 0.05) for wrap, how in (("ddp", "sum"), ("replicate", "sum_to_mean"))),
]


@pytest.mark.parametrize(("world", "kind", "wrap", "reduction", "clip"), PIPES)
@on_ranks()
def test_law_holds_over_stages(world, kind, wrap, reduction, clip):
    how = "mean" if reduction == "mean" else "sum"
    pipe = Pipe(kind, wrap, lambda outputs, labels: criterion(outputs, labels, how))
    options = {"reduction": reduction, "max_norm": clip, "count": count_tokens(1)}
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), **options)
    exact, of_all = nn.Sequential(*by_stage(kind)), partial(criterion, how="sum" if reduction == "sum" else "mean")
    for index, layout in enumerate(WINDOWS):
        batch = whole(index, layout := layout[-pipe.num :])
        window = accumulator.window(batches_of(index, pipe.rank, layout[pipe.rank]))
        assert window.counts == {"tokens": int(batch[1].ne(IGNORED).sum())}
        assert pipe.window_off(window, exact, batch, of_all, clip) <= 1e-10


def two_losses(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"tokens": criterion(outputs, labels), "samples": outputs.square().mean()}


@on_ranks(4)
def test_named_losses_are_exact_over_stages():
    """A loss over tokens and one over samples, of which some chunks have no token."""
    pipe = Pipe("1F1B", "ddp", two_losses)
    counts = {"tokens": count_tokens(1), "samples": count_samples}
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), count=counts, max_norm=1e9)
    window, of_all = accumulator.window(batches_of(1, pipe.rank, 3)), lambda *both: sum(two_losses(*both).values())
    assert pipe.window_off(window, nn.Sequential(*by_stage("1F1B")), whole(1, (3, 3)), of_all) <= 1e-10


@on_ranks(4)
def test_misuse_of_a_pipeline_is_refused_on_all_stages():
    pipe = Pipe("1F1B", "ddp")
    optimizer = SGD(pipe.parameters(), lr=0.1)
    accumulator = Accumulator(pipe.schedule, optimizer, count=count_tokens(1), micro_batch_size=4)
    batches = batches_of(0, pipe.rank, 1)
    x, labels = mine = batches[0]
    chunks = {"arg_mbs": [(x,)] * 2, "target_mbs": [labels] * 2}
    for said, *calls in (
        ("window.backward() with a Schedule1F1B", lambda window: window.backward(x.clone().requires_grad_().sum())),
        ("DistaccumError", *[lambda window: window.run(x, target=labels)] * 2),  # a second run in one micro-batch
        ("run() got arg_mbs, target_mbs, of chunks", lambda window: window.run(**chunks)),
    ):
        window = accumulator.window(batches)
        next(iterator := iter(window))
        assert said in [refused(call, window) for call in calls][-1]
        iterator.close()
        window.discard()
    other = batches_of(5, dist.get_rank(), 1)  # other samples on each stage
    make = partial(Accumulator, pipe.schedule, optimizer)
    noise = partial(make, extensions=[NoiseScale()])
    for said, call in (
        ("update() takes a function that returns a loss", lambda: accumulator.update(mine, torch.sum)),
        ("check() takes a function that returns a loss", lambda: accumulator.check(mine, torch.sum)),
        ("contrast() takes a function that returns a loss", lambda: accumulator.contrast(mine, len, torch.sum)),
        ("a micro-batch has 3 samples", lambda: accumulator.window([(x[:3], labels[:3])])),
        ("whose ranks have parts of the same samples; use data parallelism alone, or leave it out", noise),
        ("sync='every' with a pipeline", lambda: make(sync="every")),
        ("WideSums with a pipeline's schedule", lambda: make(extensions=[WideSums(torch.float64)])),
        ("compute on the same samples together, and have", lambda: accumulator.window(other)),
    ):
        assert said in refused(call)


def evaluated(pipe: Pipe, index: int, **options: Any) -> None:
    x, labels = batches_of(index, 0, 1)[0]
    pipe.schedule.eval(*([] if pipe.is_last else [x]), **({"target": labels, **options} if pipe.is_last else {}))


@on_ranks(4)
def test_window_that_is_left_leaves_no_trace_in_a_pipeline():
    pipe = Pipe("1F1B", "fsdp2")
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), count=count_tokens(1), max_norm=1e9)
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    for x, labels in window:
        window.run(x, target=labels)
        break
    window.discard()
    losses: list[Tensor] = []
    with torch.no_grad():
        evaluated(pipe, 3, losses=losses)
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    assert (run(window) is not None) == pipe.is_last
    with torch.no_grad():  # which clears gradients of FSDP2
        evaluated(pipe, 3)
    assert "gradients were cleared between the window's loop and its step()" in refused(window.step)
    window.discard()
    window = accumulator.window(batches_of(0, pipe.rank, 2))
    assert pipe.window_off(window, nn.Sequential(*by_stage("1F1B")), whole(0, (2, 2))) <= 1e-10
    assert all(float(loss) > 0.5 for loss in losses), "whole: no window weighs what is only looked at"


LOST = [
    ("1F1B", "inside", "was called on a module inside of a stage of the Schedule1F1B"),
    ("1F1B", "layers", "nothing"),
    ("InterleavedZeroBubble", "kept", "runs backward for inputs and for weights apart"),
]


@pytest.mark.parametrize(("kind", "how", "said"), LOST)
@on_ranks(4)
def test_sharded_stages_whose_gradients_torch_would_lose_are_refused(kind, how, said):
    """Stages of which torch reduces gradients too early, or may lose some: measured in torch 2.15."""
    pipe = Pipe(kind, f"fsdp2 {how}")

    def plan() -> None:
        accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.1), count=count_tokens(1))
        accumulator.window(batches_of(0, pipe.rank, 1))

    assert said in (why := refused(plan)), why


@on_ranks(2)
def test_frozen_first_stages_are_refused_where_backward_is_split():
    for kind, said in (("InterleavedZeroBubble", "stages before 2 are frozen"), ("Interleaved1F1B", "nothing")):
        pipe = Pipe(kind, "none")
        for place, module in zip(pipe.here, pipe.modules, strict=True):
            module.requires_grad_(place > 1)
        assert said in refused(Accumulator, pipe.schedule, SGD(pipe.parameters(), lr=0.1), count=count_tokens(1))


@pytest.mark.parametrize("how", ["no optimizer", "an empty one"])
@on_ranks(2)
def test_frozen_stage_needs_no_optimizer(how):
    pipe = Pipe("1F1B", "none")
    is_frozen = 0 in pipe.here
    for module in pipe.modules:
        module.requires_grad_(not is_frozen)
    empty = None if how == "no optimizer" else SGD([{"params": []}], lr=0.1)
    optimizer = empty if is_frozen else SGD(pipe.parameters(), lr=0.1)
    accumulator = Accumulator(pipe.schedule, optimizer, count=count_tokens(1), max_norm=0.5)
    before = [p.detach().clone() for p in pipe.parameters()]
    run(window := accumulator.window(batches_of(0, pipe.rank, 1)))
    update = window.step()
    assert update.stepped and update.grad_norm > 0
    same = [torch.equal(p, q) for p, q in zip(pipe.parameters(), before, strict=True)]
    assert all(same) if is_frozen else not any(same)


@on_ranks(4)
def test_micro_batches_of_other_lengths_are_refused_on_all_stages():
    """Windows that would exchange tensors of two shapes, and one after a call without gradients, which frees them."""
    pipe = Pipe("1F1B", "ddp")
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=0.0), count=count_tokens(1))

    def of(*lengths: int) -> None:
        batch = batches_of(0, pipe.rank, 1)[0]
        run(window := accumulator.window([tuple(one[:length] for one in batch) for length in lengths]))
        window.step()

    said = [refused(of, *lengths) for lengths in ((4, 2), (4, 4), (2,), (4,))]
    evaluated(pipe, 3)
    said = [*said, refused(of, 2, 2)]
    assert "has 2 samples and another 4" in said[0] and "has 2 samples and another 4" in said[2]
    assert [said[1], *said[3:]] == ["nothing"] * 3
