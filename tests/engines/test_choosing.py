"""Choice of the engine, refused wrappers, and an engine from outside the package."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, choosing
from distaccum.engines import Engine
from tests.support.engines import KINDS, fully_sharded, mesh_of, wrappers
from tests.support.oracle import everything, own, step_off
from tests.support.problems import make_net, make_net_without_router
from tests.support.programs import ROOT
from tests.support.ranks import on_ranks
from tests.support.versions import needs
from tests.support.windows import accumulating, refused, warned, weights


def test_job_of_several_ranks_without_a_process_group_is_refused(monkeypatch):
    net = make_net()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    message = refused(Accumulator, net, SGD(net.parameters(), lr=0.1))
    assert "WORLD_SIZE=2 and no process group" in message and "init_process_group()" in message
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert refused(Accumulator, net, SGD(net.parameters(), lr=0.1)) == "nothing"


class LightningModule(nn.Linear):
    """Recognised by the name of its class, as Lightning's own."""


@on_ranks(2)
def test_hybrid_strategy_of_one_shard_is_refused():
    """Torch warns that it switches to NO_SHARD, over the one rank of the shard, and reduces nothing."""
    mesh = mesh_of((2, 1), "replicas", "shards")
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        with warned():
            model = wrappers.fsdp1(make_net_without_router(), [], strategy=name, device_mesh=mesh)
        said = refused(Accumulator, model, SGD(model.parameters(), lr=0.1))
        assert "over 2 replicas of 1 shards" in said and "with several shards; use fully_shard" in said, said


@needs("torch", "2.13", "FSDP2")
@on_ranks(2)
def test_wrappers_that_cannot_accumulate_are_refused_with_their_own_cure():
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    composed, lightning = replicate(nn.Linear(2, 2)), LightningModule(2, 2)
    parallel = parallelize_module(nn.Linear(2, 2), mesh_of((2, 1), "a", "b")["b"], ColwiseParallel())
    stage = PipelineStage(nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu"))
    divides, without_loss = ScheduleGPipe(stage, 2), ScheduleGPipe(stage, 2, scale_grads=False)
    sharded, one = fully_sharded()(make_net_without_router(), 0.1)
    ddp = DistributedDataParallel(make_net_without_router())
    sgd = SGD(ddp.parameters(), lr=0.1)
    for cure, net in (
        ("replicate.DDP, which has no engine here; use torch's DistributedDataParallel(module)", composed),
        ("give the Accumulator trainer.strategy.model", lightning),
        ("a tensor-parallel module alone in a job of 2 ranks", parallel),
    ):
        assert cure in refused(Accumulator, net, SGD(net.parameters(), lr=0.1))
    for cure, *given in (
        ("TypeError: model is a pipeline's PipelineStage, expected its schedule", stage),
        ("ValueError: the ScheduleGPipe divides gradients", divides),
        ("ValueError: the ScheduleGPipe has no loss_fn", without_loss),
        ("ValueError: model holds a ScheduleGPipe and 1 more", [without_loss, nn.Linear(2, 2)]),
        ("a plain module in a job of 2 ranks", nn.Linear(2, 2)),
        ("DistributedDataParallel and FSDP2 (fully_shard), expected one kind", [sharded, ddp], [one, sgd]),
    ):
        assert cure in refused(Accumulator, *given)
    said = refused(Accumulator, sharded, one, sync="replicas")
    assert "sync='replicas', expected one of 'last', 'every', 'gathered' for FSDP2" in said


class Summing(nn.Module):
    """A wrapper that no library has: it sums gradients over ranks in each backward, unless told to postpone that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.frozen = module, nn.Parameter(torch.ones(1), requires_grad=False)
        self.group, self.postpone = dist.group.WORLD, False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def _reduce(self, parameter: Tensor) -> None:
        if not self.postpone:
            dist.all_reduce(parameter.grad)

    def reduce_gradients(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


# The example of the page on engines: SummingEngine.
exec(re.search(r"^```python run=no\n(.*?)^```", (ROOT / "docs/how.md").read_text(), re.DOTALL | re.MULTILINE)[1])


@on_ranks(2)
def test_engine_from_outside_the_package_is_exact():
    model, accumulator = accumulating(Summing(make_net_without_router()), 1.0, max_norm=100.0)
    unmoved: list[bool] = []
    looks = {
        "read": lambda model: weights(model.module),
        "between": lambda: unmoved.append(model.frozen.grad is None),  # or weight decay would move it
    }
    for index, layout in enumerate([[[2, 1], [3]], [[4], []]]):
        window, whole = accumulator.window(own(layout, index)), everything(layout, index)
        assert max(step_off(model, window, make_net_without_router(), whole, **looks)) <= 1e-12
    assert unmoved == [True] * 2 and not model.postpone


class Averaging(DistributedDataParallel):
    """A subclass of a known wrapper, which the library's own engine would take."""


@on_ranks(2)
def test_registered_engine_takes_a_subclass_of_a_known_wrapper(monkeypatch):
    class Own(Engine):
        name, wraps = "Own", staticmethod(lambda module: isinstance(module, Averaging))

        def __init__(self, models, sync):
            super().__init__(models, sync, has_group and dist.group.WORLD)

    monkeypatch.setattr(choosing, "registered", [Own])
    model = Averaging(make_net_without_router())
    has_group = True
    assert "Accumulator(Own, 2 ranks" in repr(accumulating(model)[1])
    has_group = None
    assert "Own has no group in a job of 2 ranks" in refused(accumulating, model)


@pytest.mark.parametrize("name", ["FSDP2", "ZeRO 1"])
@on_ranks(2)
def test_compiled_model_is_exact(name):
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
    kind = KINDS[name]
    model, _ = kind.wrap(make_net_without_router().to(kind.dtype), 1.0)
    optimizer = SGD(model.parameters(), lr=1.0) if name == "FSDP2" else None
    if optimizer is None:
        model.compile(backend="aot_eager")
    compiled = model if optimizer is None else torch.compile(model, backend="aot_eager")
    accumulator = Accumulator(compiled, optimizer)
    for index, layout in enumerate([[[2, 2, 2], [2, 2]], [[2, 2], [2]]]):
        window, whole = accumulator.window(own(layout, index, kind.dtype)), everything(layout, index, kind.dtype)
        assert max(step_off(compiled, window, make_net_without_router(), whole, read=kind.weights)) <= kind.bound
