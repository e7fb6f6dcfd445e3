"""Ranks that share samples: tensor and sequence parallelism beside FSDP2, on 2 x 2 and 2 x 2 x 2 ranks.

The oracle is one big batch of the samples of the data-parallel ranks, in one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import full
from problems import error, gradient, join, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError, count_tokens

# Sizes of micro-batches by data-parallel rank: even, uneven, a dry rank.
WINDOWS = [[[2, 2], [2, 2]], [[3, 1], [2, 4, 1]], [[], [3, 1]]]
SHAPES = {"2": (2,), "2 x 2": (2, 2), "2 x 2 x 2": (2, 2, 2)}


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


def make_text() -> Text:
    torch.manual_seed(3)
    return Text().double()


def parallelized(net: Text, tensor: Any, plan: str) -> Text:
    for block in net.blocks:
        if plan == "sequence":  # norms see a part of each row's tokens
            cut = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, tensor, cut)
            into = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
            out = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
            for prepare in (into, out):
                parallelize_module(block, tensor, prepare)
        else:
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if plan == "loss":
        parallelize_module(net, tensor, {"leave": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    return net


def sharded(shape: tuple[int, ...], plan: str, wrap: str = "blocks") -> tuple[Text, int]:
    """The model on a mesh whose last dimension is tensor parallel, and this rank's place among the data's."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    if len(shape) == 1:  # no data parallelism
        return parallelized(make_text(), init_device_mesh("cpu", shape), plan), 0
    names = ("data", "tensor") if len(shape) == 2 else ("replica", "data", "tensor")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = parallelized(make_text(), mesh["tensor"], plan)
    over = mesh[names[:-1]] if len(shape) == 3 else mesh["data"]
    if wrap == "blocks":
        for block in net.blocks:
            fully_shard(block, mesh=over)
    fully_shard(net, mesh=over)
    return net, dist.get_rank() // shape[-1]


def criterion(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def batches_of(layout: Any, index: int, rank: int) -> list[Any]:
    return [make_batch(size, seed=100 * index + 10 * rank + i) for i, size in enumerate(layout[rank])]


def law_on_a_mesh(shape: str, plan: str, sync: str, options: dict[str, Any], wrap: str = "blocks") -> Any:
    """By window: how far the step, the norm and the loss are off."""
    net, rank = sharded(SHAPES[shape], plan, wrap)
    num = dist.get_world_size() // SHAPES[shape][-1]
    clip = options.get("max_norm", 1e9)
    options = {"max_norm": clip, "steps": 9, **options}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), sync=sync, count=count_tokens("labels"), **options)
    seen = []
    for index, pair in enumerate(WINDOWS):
        layout = [pair[r % 2] for r in range(num)] if num > 1 else [pair[1]]
        before = [full(p).detach().clone() for p in net.parameters()]
        own = batches_of(layout, index, rank)
        window = accumulator.window(own)
        with loss_parallel():
            for batch in window:
                window.backward(criterion(net, batch))
        update = window.step()
        plain = make_text()
        nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in before]), plain.parameters())
        loss = criterion(plain, join([b for r in range(num) for b in batches_of(layout, index, r)]))
        loss.backward()
        norm = gradient(plain).norm().item()
        moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, net.parameters(), strict=True)])
        exact = gradient(plain) * min(1.0, clip / (norm + 1e-6))
        seen.append((error(moved, exact), abs(update.grad_norm - norm) / norm, abs(update.loss - loss.item())))
    return seen


def within(seen: Any, bound: float = 1e-10) -> None:
    for of_rank in seen:
        assert len(of_rank) == len(WINDOWS)
        for numbers in of_rank:
            assert max(numbers) <= bound, of_rank


@pytest.mark.parametrize("plan", ["tensor", "sequence", "loss"])
@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_law_holds_beside_tensor_parallel_ranks(ranks, plan, sync):
    within(ranks(4).run(law_on_a_mesh, "2 x 2", plan, sync, {}))


@pytest.mark.parametrize("plan", ["tensor", "sequence", "loss"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}])
def test_law_holds_without_data_parallelism(ranks, plan, options):
    within(ranks(2).run(law_on_a_mesh, "2", plan, "last", options))


def test_clipping_counts_each_element_once(ranks):
    within(ranks(4).run(law_on_a_mesh, "2 x 2", "sequence", "last", {"max_norm": 0.05}))


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
@pytest.mark.parametrize("sync", ["last", "replicas"])
def test_law_holds_on_hybrid_meshes_beside_tensor_parallel_ranks(ranks, plan, sync):
    within(ranks(8).run(law_on_a_mesh, "2 x 2 x 2", plan, sync, {}))


# Ranks of one tensor-parallel group whose plans differ


def differing(how: str) -> str:
    net, rank = sharded((2, 2), "tensor")
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.0))
    batches = [make_batch(2, seed=rank), make_batch(2, seed=rank + 5)]
    if dist.get_rank() == 3:
        if how == "number":
            batches.pop()
        elif how == "length":
            batches[0] = make_batch(3, seed=rank)
        else:
            batches[0] = make_batch(2, seed=77)
    try:
        accumulator.window(batches)
    except DistaccumError as raised:
        window = accumulator.window([make_batch(2, seed=rank)])  # the next one is exact
        for batch in window:
            window.backward(criterion(net, batch))
        return str(raised) if window.step().stepped else "no step"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "said"),
    [("number", "micro-batches [2, 1]"), ("length", "counts [(4.0,), (5.0,)]"), ("data", "other numbers in their")],
)
def test_plans_of_ranks_that_share_samples_must_be_equal(ranks, how, said):
    for message in ranks(4).run(differing, how):
        assert "ranks [2, 3] compute on the same samples together, and have " + said in message
        assert "by the data-parallel rank" in message


def fails_on_one(how: str) -> Any:
    """update() where one tensor-parallel rank fails before any forward communicates."""
    net, rank = sharded((2, 2), "tensor")
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.1), micro_batch_size=4)
    before = [full(p).detach().clone() for p in net.parameters()]
    calls = 0

    def loss_fn(batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = criterion(net, batch)
        if dist.get_rank() == 1 and calls == 1:
            raise torch.OutOfMemoryError("none left") if how == "memory" else ValueError("a broken sample")
        return loss

    batch = make_batch(4, seed=rank)
    message = ""
    try:
        update = accumulator.update(batch, loss_fn)
        message = f"stepped with {update.micro_batches}"
    except (DistaccumError, ValueError) as raised:
        message = f"{type(raised).__name__}: {raised}"
    moved = max(float((full(p).detach() - b).abs().max()) for p, b in zip(net.parameters(), before, strict=True))
    return message, moved > 0


def test_failure_of_a_tensor_parallel_rank_undoes_the_window_on_all(ranks):
    seen = ranks(4).run(fails_on_one, "error")
    assert seen[1][0] == "ValueError: a broken sample"
    for rank in (0, 2, 3):
        assert "failed in update 0" in seen[rank][0]
    assert not any(moved for _, moved in seen)


def test_memory_of_a_tensor_parallel_rank_halves_the_micro_batch_on_all(ranks):
    for message, moved in ranks(4).run(fails_on_one, "memory"):
        assert message == "stepped with 2" and moved


def overflow(foreach: bool | None) -> Any:
    """Only one tensor-parallel rank's part of a gradient overflows."""
    net, rank = sharded((2, 2), "tensor")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.1, foreach=foreach), scaler=scaler)
    window = accumulator.window([make_batch(2, seed=rank)])
    for batch in window:
        window.backward(criterion(net, batch))
    if dist.get_rank() == 3:
        net.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")
    update = window.step()
    return update.stepped, update.reason, scaler.get_scale()


@pytest.mark.parametrize("foreach", [None, False])
def test_overflow_in_one_part_skips_the_update_on_all_ranks(ranks, foreach):
    for seen in ranks(4).run(overflow, foreach):
        assert seen == (False, "the scaled gradients overflowed", 2.0)


def placements(plan: str) -> Any:
    """Of gradients that are partial sums after the first micro-batch, and after the loop."""
    net, _ = sharded((2,), plan)
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.0), count=count_tokens("labels"))
    window, partial = accumulator.window([make_batch(2, seed=i) for i in range(2)]), []
    for batch in window:
        window.backward(criterion(net, batch))
        partial.append(names_of_partial(net))
    partial.append(names_of_partial(net))
    window.step()
    return partial


def names_of_partial(net: nn.Module) -> list[str]:
    gradients = [(name, p.grad) for name, p in net.named_parameters() if hasattr(p.grad, "placements")]
    return [name for name, gradient in gradients if any(one.is_partial() for one in gradient.placements)]


def test_partial_sums_are_settled_once_after_the_last_backward(ranks):
    for first, last, after in ranks(2).run(placements, "sequence"):
        assert first and first == last
        assert after == []


def on_an_equal_mesh(what: str) -> float:
    """As where a job makes its mesh twice: DTensor may place a result on the mesh of an earlier call, on some ranks."""
    net, _ = sharded((2, 2), "tensor")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.0), max_norm=1e9)
    norms = []
    for replaces in (False, True):
        window = accumulator.window([make_batch(2, seed=dist.get_rank() // 2)])
        for batch in window:
            window.backward(criterion(net, batch))
        weight = net.blocks[0].up.weight
        if replaces and dist.get_rank() == 3:
            gradient = DTensor.from_local(weight.grad.to_local(), mesh, weight.placements)
            if what == "parameter":
                weight.data = DTensor.from_local(weight.to_local(), mesh, weight.placements)
            weight.grad = gradient
        norms.append(window.step().grad_norm)
    return abs(norms[1] - norms[0])


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_norm_waits_for_no_group_that_only_some_ranks_have(ranks, what):
    assert max(ranks(4).run(on_an_equal_mesh, what, seconds=20)) <= 1e-12
