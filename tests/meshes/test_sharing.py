"""Tensor and sequence parallelism beside FSDP2, on 2 x 2 and 2 x 2 x 2 ranks, against one big batch in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from tests.support.oracle import everything, step_off
from tests.support.problems import make_batch, micro_batches_of, seeded
from tests.support.ranks import mesh_of, on_ranks
from tests.support.windows import refused, run_window, warned, weights

# Sizes of micro-batches by data-parallel rank: even, uneven, a dry rank.
WINDOWS = [[[2, 2], [2, 2]], [[3, 1], [2, 4, 1]], [[], [3, 1]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Text(nn.Module):
    """Two blocks between layers that no plan cuts, with the vocabulary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


make_text = partial(seeded, Text)


def parallelized(net: Text, tensor: Any, plan: str) -> Text:
    for block in net.blocks:
        if plan == "sequence":  # norms see a part of each row's tokens
            up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
            whole, part = (Replicate(),), (Shard(1),)
            into = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=True)
            out = PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole)
            for cut in ({"norm": SequenceParallel(), "up": up, "down": down}, into, out):
                parallelize_module(block, tensor, cut)
        else:
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if plan in LOSSES:  # of outputs that stay a DTensor
        outputs = Replicate() if plan == "replicated loss" else Shard(-1)
        parallelize_module(net, tensor, {"leave": ColwiseParallel(output_layouts=outputs, use_local_output=False)})
    return net


def sharded(shape: tuple[int, ...], plan: str, wrap: str = "root too") -> tuple[Text, int]:
    """The model on a mesh whose last dimension is tensor parallel, and this rank's place among the data's."""
    if len(shape) == 1:  # no data parallelism
        return parallelized(make_text(), mesh_of(shape), plan), 0
    names = ("data", "tensor") if len(shape) == 2 else ("replica", "data", "tensor")
    mesh = mesh_of(shape, *names)
    net = parallelized(make_text(), mesh["tensor"], plan)
    over = mesh[names[:-1]] if len(shape) == 3 else mesh["data"]
    for block in net.blocks:
        fully_shard(block, mesh=over)
    if wrap != "blocks alone":
        fully_shard(net, mesh=over)
    return net, dist.get_rank() // shape[-1]


def criterion(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def names_of_partial(net: nn.Module) -> list[str]:
    gradients = [(name, p.grad) for name, p in net.named_parameters() if hasattr(p.grad, "placements")]
    return [name for name, gradient in gradients if any(one.is_partial() for one in gradient.placements)]


# By plan, the loss of outputs that stay a DTensor, and how it lies over the tensor-parallel ranks.
LOSSES = {"loss": (criterion, "R"), "replicated loss": (squares, "R"), "partial loss": (squares, "P")}


PLANS = [
    *((4, plan, "last", 1e9, "root too") for plan in ("tensor", "sequence", *LOSSES)),
    *((4, "sequence", sync, 0.05, "root too") for sync in ("every", "gathered")),
    *((2, plan, "last", clip, "") for plan, clip in (("tensor", 1e9), ("sequence", 0.05))),
    (4, "tensor", "last", 0.05, "blocks alone"),  # beside plain parameters
    *((8, "sequence", sync, 1e9, "root too") for sync in ("replicas", "last")),
]


@pytest.mark.parametrize(("world", "plan", "sync", "clip", "wrap"), PLANS)
@on_ranks()
def test_law_holds_beside_tensor_parallel_ranks(world, plan, sync, clip, wrap):
    num = world // 2
    net, rank = sharded({2: (2,), 4: (2, 2), 8: (2, 2, 2)}[world], plan, wrap)
    optimizer = SGD(net.parameters(), lr=1.0, foreach=False if wrap == "blocks alone" else None)
    loss_fn, placement = LOSSES.get(plan, (criterion, ""))
    count = count_samples if loss_fn is squares else count_tokens("labels")
    accumulator = Accumulator(net, optimizer, sync=sync, count=count, max_norm=clip)
    for index, pair in enumerate(WINDOWS):
        layout = [pair[r % 2] for r in range(num)] if num > 1 else [pair[1]]
        window = accumulator.window(micro_batches_of(layout, index, rank))
        unsettled: list[list[str]] = []  # after each backward, and after the last

        def run(batch: Any, window: Any = window, unsettled: Any = unsettled) -> None:
            loss = loss_fn(net, batch)
            assert plan not in LOSSES or str(loss.placements[0])[0] == placement
            window.backward(loss)
            unsettled.append(names_of_partial(net))

        def look(unsettled: Any = unsettled) -> None:
            unsettled.append(names_of_partial(net))

        with loss_parallel():
            looks = {"clip": clip, "between": look}
            assert max(step_off(net, window, make_text(), everything(layout, index), loss_fn, run, **looks)) <= 1e-10
        if (world, plan) == (2, "sequence"):
            assert unsettled[0] and unsettled == [unsettled[0]] * len(window) + [[]], "settled once"


@pytest.mark.parametrize(
    ("how", "said"),
    [("number", "micro-batches [2, 1]"), ("length", "counts [(4.0,), (5.0,)]"), ("data", "other numbers in their")],
)
@on_ranks(4)
def test_plans_of_ranks_that_share_samples_must_be_equal(how, said):
    net, rank = sharded((2, 2), "tensor")
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.0))
    batches = [make_batch(2, seed=rank), make_batch(2, seed=rank + 5)]
    others = {"number": [], "length": [make_batch(3, seed=rank)], "data": [make_batch(2, seed=77)]}
    message = refused(accumulator.window, [*others[how], batches[1]] if dist.get_rank() == 3 else batches)
    assert run_window(accumulator.window([make_batch(2, seed=rank)]), net, criterion).step().stepped, "the next one"
    assert "ranks [2, 3] compute on the same samples together, and have " + said in message
    assert "by the data-parallel rank" in message


@pytest.mark.parametrize("how", ["memory", "error"])
@on_ranks(4)
def test_failure_of_tensor_parallel_ranks_is_undone_where_it_is_and_told_to_nobody(how):
    net, rank = sharded((2, 2), "tensor")
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.1), micro_batch_size=4)
    before, calls, updates = weights(net), 0, []

    def loss_fn(batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = criterion(net, batch)
        if calls == 1:
            raise torch.OutOfMemoryError("none left") if how == "memory" else ValueError("a broken sample")
        return loss

    said = refused(lambda: updates.append(accumulator.update(make_batch(4, seed=rank), loss_fn)))
    assert "failed where the other ranks cannot hear of it" in said
    assert torch.equal(before, weights(net))
    accumulator.update(make_batch(4, seed=rank), loss_fn)


@on_ranks(2)
def test_loss_over_data_parallel_ranks_is_refused():
    mesh = mesh_of((2,))
    net = fully_shard(make_text(), mesh=mesh)
    window = Accumulator(net, SGD(net.parameters(), lr=0.0)).window([make_batch(2, seed=0)])

    def loss_of_all(net: nn.Module, batch: Any) -> Any:
        return DTensor.from_local(net(batch["x"]), mesh, [Shard(0)]).square().mean()

    message = refused(run_window, window, net, loss_of_all)
    assert "a DTensor over the data-parallel ranks [0, 1]" in message and "take the loss of local outputs" in message


@on_ranks(2)
def test_tensor_parallel_modules_are_refused_under_ddp_and_fsdp1():
    mesh = mesh_of((1, 2), "data", "tensor")
    for wrap in (DistributedDataParallel, partial(FullyShardedDataParallel, device_id=torch.device("cpu"))):
        net = parallelized(make_text(), mesh["tensor"], "tensor")
        with warned():  # FSDP1's, that a mesh of one rank is not cut
            model = wrap(net, device_mesh=mesh["data"])
        said = refused(Accumulator, model, SGD(model.parameters(), lr=0.0))
        assert "is a DTensor or a part of one, and " in said
        assert "use fully_shard over the data-parallel mesh" in said
