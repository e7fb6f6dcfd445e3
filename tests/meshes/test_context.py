"""Context parallelism over the ranks of FSDP2 or DDP, against one big batch of whole sequences in one process."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_tokens
from distaccum.extensions import NoiseScale
from tests.support.collectives import gathered
from tests.support.oracle import step_off
from tests.support.problems import IGNORED, Batch, join, make_batch, make_net, seeded
from tests.support.ranks import mesh_of, on_ranks
from tests.support.windows import error, gradient, refused, run_window, warned, weights

TOKENS = 6
# Sizes of micro-batches by data rank: even, uneven, a dry rank.
WINDOWS = [[[2, 2], [2, 2]], [[3, 1], [2, 4, 1]], [[], [3, 1]]]


def attention_over(group: Any) -> Any:
    """Attention of this rank's queries over the keys and values of all ranks."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [k.shape[2]] * dist.get_world_size(group)
        return attention(q, gathered(k, sizes, group, dim=2), gathered(v, sizes, group, dim=2))

    return attend


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v


class Reader(nn.Module):
    """An attention over all tokens between layers on each."""

    def __init__(self, attend: Any = attention) -> None:
        super().__init__()
        self.attend = attend
        self.enter, self.qkv, self.leave = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        return self.leave(x + self.attend(q, k, v).transpose(1, 2).flatten(2))


def make_reader(attend: Any = attention) -> Reader:
    return seeded(partial(Reader, attend))


def on_a_mesh(wrap: str = "FSDP2") -> tuple[nn.Module, Any]:
    mesh = mesh_of((dist.get_world_size() // 2, 2), "data", "context")
    net = make_reader(attention_over(mesh["context"].get_group()))
    if wrap == "DDP":
        return DistributedDataParallel(net), mesh
    both = mesh_of((dist.get_world_size(),))  # the same ranks, flat
    fully_shard(net.qkv, mesh=both)
    fully_shard(net, mesh=both)
    return net, mesh


def criterion(model: nn.Module, batch: Any, how: str) -> Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction=how)


def batches_of(layout: Any, index: int, rank: int) -> list[Any]:
    batches = [make_batch(size, seed=100 * index + 10 * rank + i) for i, size in enumerate(layout[rank])]
    if index == 1:  # nothing counts in one part of the first, nor in the whole second
        batches[0]["labels"][:, TOKENS // 2 :] = IGNORED
        batches[1]["labels"][:] = IGNORED
    return batches


def cut(batch: Any, mesh: Any) -> Any:
    rank, num = mesh.get_local_rank(), mesh.size()
    return {key: value.chunk(num, dim=1)[rank].contiguous() for key, value in batch.items()}


def part_of_tokens(context):
    """A count of whole labels that are cut later."""
    tokens = count_tokens("labels")
    return lambda batch: tokens(batch) / context.size()


PARTS = [
    *((wrap, "last", how, False) for wrap in ("FSDP2", "DDP") for how in ("mean", "sum", "sum_to_mean")),
    *(("FSDP2", sync, "mean", False) for sync in ("every", "gathered")),
    *((wrap, "last", "sum_to_mean", True) for wrap in ("FSDP2", "DDP")),  # whole labels that are cut later
]


@pytest.mark.parametrize(("wrap", "sync", "reduction", "whole"), PARTS)
@on_ranks(4)
def test_law_holds_with_parts_of_sequences(wrap, sync, reduction, whole):
    net, mesh = on_a_mesh(wrap)
    num, rank, context = mesh["data"].size(), mesh["data"].get_local_rank(), mesh["context"]
    count = part_of_tokens(context) if whole else count_tokens("labels")
    options = {"sync": sync, "reduction": reduction, "count": count, "max_norm": 1e9, "mesh": mesh["data"]}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), **options)
    how = "mean" if reduction == "mean" else "sum"
    for index, pair in enumerate(WINDOWS):
        layout = [pair[r % 2] for r in range(num)]
        mine = batches_of(layout, index, rank)
        window = accumulator.window(mine if whole else [cut(one, context) for one in mine])
        everyone = join([b for r in range(num) for b in batches_of(layout, index, r)])
        assert list(window.counts.values()) == [int(everyone["labels"].ne(IGNORED).sum())]

        def run(batch: Batch, window: Any = window) -> None:
            window.backward(criterion(net, cut(batch, context) if whole else batch, how))

        of_all = partial(criterion, how="sum" if reduction == "sum" else "mean")
        assert max(step_off(net, window, make_reader(), everyone, of_all, run)) <= 1e-10


@on_ranks(4)
def test_law_holds_where_torch_cuts_sequences():
    """torch's context_parallel cuts in place, the outer quarters to rank 0; its attention has no CPU kernel."""
    from torch.distributed.tensor.experimental import context_parallel

    net, mesh = on_a_mesh()
    options = {"count": part_of_tokens(mesh["context"]), "max_norm": 1e9, "mesh": mesh["data"]}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), reduction="sum_to_mean", **options)
    batches = [{key: value[:, :4].contiguous() for key, value in make_batch(2, seed=i).items()} for i in range(4)]
    everyone = join(batches)
    window = accumulator.window(batches[mesh["data"].get_local_rank() :: 2])

    def run(batch: Batch) -> None:
        with context_parallel(mesh["context"], buffers=list(batch.values()), buffer_seq_dims=[1, 1]):
            assert batch["x"].shape == (2, 2, 5)
            window.backward(criterion(net, batch, "sum"))

    assert max(step_off(net, window, make_reader(), everyone, partial(criterion, how="mean"), run)) <= 1e-10


@on_ranks(4)
def test_whole_labels_that_all_parts_count_are_refused_on_all_ranks():
    net, mesh = on_a_mesh()
    options = {"reduction": "sum_to_mean", "count": count_tokens("labels"), "mesh": mesh["data"]}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=0.0), **options)
    whole = [make_batch(2, seed=mesh["data"].get_local_rank()) for _ in range(2)]
    message = refused(accumulator.window, whole)
    window = accumulator.window([cut(one, mesh["context"]) for one in whole])  # the next one
    assert run_window(window, net, partial(criterion, how="sum")).step().stepped
    assert "so that all are counted 2 times; cut them before the window; or, where" in message


@on_ranks(4)
def test_options_that_need_whole_samples_are_refused():
    net, mesh = on_a_mesh()
    tokens, data = count_tokens("labels"), mesh["data"]
    make = partial(Accumulator, net, SGD(net.parameters(), lr=0.1))
    accumulator = make(count=tokens, mesh=data, micro_batch_size=1)
    batch = cut(make_batch(2, seed=0), mesh["context"])
    both = mesh_of((2, 2), "a", "b")
    for call, said in (
        (lambda: make(count=tokens, mesh=data, extensions=[NoiseScale()]), "have parts of the same samples; use data"),
        (lambda: make(mesh=data), "count=count_samples with a mesh"),
        (lambda: make(count=tokens, mesh=both), "nothing"),  # all of them carry data, as if no mesh were given
        (lambda: make(count=tokens, mesh="data"), "expected the dimensions of a DeviceMesh"),
        (lambda: accumulator.check(batch, lambda one: criterion(net, one, "mean")), "check() with a mesh"),
        (lambda: accumulator.contrast(batch, lambda one: net(one["x"]), torch.sum), "contrast() with a mesh"),
    ):
        assert said in refused(call)


@on_ranks(4)
def test_update_cuts_parts_alike_and_counts_samples_once():
    net, mesh = on_a_mesh()
    options = {"batch_size": 8, "micro_batch_size": 2, "max_norm": 1e9, "mesh": mesh["data"]}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), count=count_tokens("labels"), **options)
    rank, exact = mesh["data"].get_local_rank(), make_reader()
    criterion(exact, join([make_batch(5, seed=rank) for rank in range(2)]), "mean").backward()
    before = weights(net)
    update = accumulator.update(cut(make_batch(5, seed=rank), mesh["context"]), lambda one: criterion(net, one, "mean"))
    off = error(before - weights(net), gradient(exact))
    lengths = []
    for window in accumulator.windows([cut(make_batch(2, seed=rank + i), mesh["context"]) for i in range(4)]):
        lengths.append(run_window(window, net, partial(criterion, how="mean")).step().micro_batches)
    assert off <= 1e-10 and update.micro_batches == 3 and lengths == [2, 2]


@on_ranks(4)
def test_ranks_of_a_larger_mesh_that_nobody_claims_are_refused_or_warned_of():
    """Context parallelism with the model wrapped over the data alone, and shards without their replicas."""
    mesh = mesh_of((2, 2), "data", "context")
    model = fully_shard(make_net(), mesh=mesh["data"])
    optimizer = SGD(model.parameters(), lr=0.1)
    count = count_tokens("labels")
    said = refused(Accumulator, model, optimizer, count=count, mesh=mesh["data"])
    assert "dimensions ('data', 'context'), over whose ranks [" in said and "wrap the model over them too" in said
    with warned() as texts:
        Accumulator(model, optimizer)
    assert sum("so they train apart" in text for text in texts) == (mesh["data"].get_local_rank() == 0)
