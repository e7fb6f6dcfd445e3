"""Parameters of which each rank holds its own part, beside fully_shard, FSDP1 and DDP."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.extensions import NoiseScale
from tests.support.oracle import step_off
from tests.support.ranks import on_ranks
from tests.support.windows import refused, run_window


class Experts(nn.Module):
    """Two rows on each of two ranks; every sample needs all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        if hasattr(table, "redistribute"):  # backward sums over ranks; each keeps its own rows
            table = table.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self.inner(x) @ table.T


def wrapped(how: str, placement: Any) -> Experts:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    net = Experts()
    net.table = nn.Parameter(distribute_tensor(net.table.detach(), mesh, [placement]))
    if how == "ignored_params":
        return fully_shard(net, mesh=mesh, ignored_params={net.table})
    if how == "a part":
        fully_shard(net.inner, mesh=mesh)
    else:
        net.inner = FullyShardedDataParallel(net.inner, use_orig_params=True, device_id=torch.device("cpu"))
    return net


def batches_of(rank: int, turn: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    sizes = [[[2, 1, 3], [2]], [[1], [4, 1]], [[2, 3], []]][turn][rank]
    return [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in sizes]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("how", ["ignored_params", "a part"])
@on_ranks(2)
def test_parameter_sharded_outside_of_fully_shard_is_exact(how, sync):
    model = wrapped(how, Shard(0))
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0, foreach=False), sync=sync, max_norm=1e9)
    for turn in range(3):
        window, whole = accumulator.window(batches_of(dist.get_rank(), turn)), batches_of(0, turn) + batches_of(1, turn)
        assert max(step_off(model, window, Experts(), torch.cat(whole))) <= 1e-10


@on_ranks(2)
def test_dtensor_of_unknown_gradient_is_refused():
    """Also that a loss over the data-parallel ranks is."""
    for how, placement, sync, said, cure in (
        ("a part", Replicate(), "last", "table is a DTensor outside of FSDP2", "Place it as Shard over data-par"),
        ("a part", Shard(0), "gathered", "with table, cut over the data-parallel ranks", ""),
        ("FSDP1", Shard(0), "last", "table is a DTensor outside of FSDP1", "use fully_shard"),
    ):
        model = wrapped(how, placement)
        message = refused(Accumulator, model, SGD(model.parameters(), lr=0.0, foreach=False), sync=sync)
        assert said in message and cure in message
    model = wrapped("a part", Shard(0))
    window = Accumulator(model, SGD(model.parameters(), lr=0.0, foreach=False)).window([torch.ones(2, 4).double()])

    def loss_of_all(model: Any, x: Tensor) -> Tensor:
        return DTensor.from_local(model(x), model.table.device_mesh, [Shard(0)]).square().mean()

    message = refused(run_window, window, model, loss_of_all)
    assert "a DTensor over the data-parallel ranks [0, 1]" in message and "take the loss of local outputs" in message


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize(("kind", "placement"), [("loss_parallel", "R"), ("replicated", "R"), ("sharded", "P")])
@on_ranks(2)
def test_dtensor_loss_is_taken_over_all_of_its_ranks(kind, placement):
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    outputs = Replicate() if kind == "replicated" else Shard(-1)
    plan = {
        "one": ColwiseParallel(output_layouts=Replicate()),
        "two": ColwiseParallel(output_layouts=outputs, use_local_output=False),
    }
    model = parallelize_module(Wide(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])

    data = [torch.randn(size, 4, dtype=torch.float64) for size in (2, 4)]
    window = Accumulator(model, SGD(model.parameters(), lr=1.0, foreach=False), max_norm=1e9).window(data)

    def criterion(net: nn.Module, x: Tensor) -> Tensor:
        outputs = net(x)
        if kind == "loss_parallel":
            return nn.functional.cross_entropy(outputs, torch.arange(len(outputs)) % 4)
        return outputs.square().mean()

    def run(x: Tensor) -> None:
        loss = criterion(model, x)
        assert str(loss.placements[0])[0] == placement
        window.backward(loss)

    def of_all(net: nn.Module, batches: list[Tensor]) -> Tensor:
        return sum(len(x) / 6 * criterion(net, x) for x in batches)

    with loss_parallel():
        assert max(step_off(model, window, Wide(), data, of_all, run)) <= 1e-10


@pytest.mark.parametrize("how", ["DDP", "FSDP1"])
@on_ranks(2)
def test_options_that_read_the_gradient_are_refused_over_hidden_parts(how):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(Wide(), mesh["tensor"], {"one": ColwiseParallel(), "two": RowwiseParallel()})
    model: Any
    if how == "DDP":
        model = DistributedDataParallel(net, device_mesh=mesh["data"])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that a mesh of one rank is not cut
            model = FullyShardedDataParallel(net, device_mesh=mesh["data"], device_id=torch.device("cpu"))
    optimizer = SGD(model.parameters(), lr=0.0)
    cure = "leave these out, with on_nonfinite='ignore'"
    for options, said in (
        ({}, ["on_nonfinite='raise' or", "over tensor-parallel modules", cure]),
        ({"max_norm": 1.0, "on_nonfinite": "ignore"}, ["max_norm=1.0,", cure]),
        ({"extensions": [NoiseScale()], "on_nonfinite": "ignore"}, ["NoiseScale() with", "or leave it out"]),
    ):
        message = refused(Accumulator, model, optimizer, **options)
        assert all(part in message for part in said), message
    accumulator = Accumulator(model, optimizer, on_nonfinite="ignore")
    assert run_window(accumulator.window([torch.ones(2, 4, dtype=torch.float64)] * 2), model).step().stepped
