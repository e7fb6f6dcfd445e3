"""Choice of the engine, refused wrappers, and an engine from outside the package."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from engines import KINDS, engine_name, fully_sharded, layers, with_sgd
from problems import error, full_batch_gradient, gradient, loss_of, make_net, make_net_without_router, micro_batches_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.engines import Engine, known_engines, register
from distaccum.private import require


def chosen(name: str) -> str:
    model, optimizer = KINDS[name].wrap(make_net(KINDS[name].dtype), 0.1)
    Accumulator(model, optimizer)
    return engine_name(model, optimizer)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("DDP", "DistributedDataParallel"),
        ("FSDP2, parts", "FSDP2 (fully_shard)"),
        ("FSDP1", "FSDP1 (FullyShardedDataParallel)"),
        ("ZeRO 1", "DeepSpeed"),
    ],
)
def test_engine_is_chosen_by_type(ranks, name, engine):
    assert ranks(2).run(chosen, name) == [engine] * 2


def test_choice_of_an_engine_imports_no_other_library():
    code = """
import sys, torch
from distaccum import Accumulator
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # imports many modules itself
before = set(sys.modules)
accumulator = Accumulator(net, optimizer, steps=2)
new = set(sys.modules) - before
assert not [name for name in new if name.split(".")[0] in ("accelerate", "deepspeed") or "fsdp" in name], new
assert "deepspeed" not in sys.modules and "accelerate" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def message_of(*args: Any, **options: Any) -> str:
    try:
        Accumulator(*args, **options)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_unknown_wrapper_is_refused_with_a_list_of_known_ones():
    net = nn.DataParallel(make_net())
    message = message_of(net, SGD(net.parameters(), lr=0.1))
    assert "DataParallel, which has no engine here" in message
    for known in ("DistributedDataParallel", "FSDP2 (fully_shard)", "FSDP1", "DeepSpeed"):
        assert known in message


def plain_in_a_job() -> str:
    net = make_net()
    return message_of(net, SGD(net.parameters(), lr=0.1))


def two_kinds() -> str:
    sharded, one = fully_sharded()(make_net_without_router(), 0.1)
    other = DistributedDataParallel(make_net_without_router())
    return message_of([sharded, other], [one, SGD(other.parameters(), lr=0.1)])


def unknown_policy() -> str:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.1)
    return message_of(model, optimizer, sync="replicas")


class LightningModule(nn.Linear):
    """Recognised by the name of its class, as Lightning's own."""


def plain_for_a_reason() -> list[str]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    composed, lightning = replicate(nn.Linear(2, 2)), LightningModule(2, 2)
    parallel = parallelize_module(
        nn.Linear(2, 2), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"], ColwiseParallel()
    )
    messages = [message_of(net, SGD(net.parameters(), lr=0.1)) for net in (composed, lightning, parallel)]
    stage = PipelineStage(nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu"))
    divides, without_loss = ScheduleGPipe(stage, 2), ScheduleGPipe(stage, 2, scale_grads=False)
    for model in (stage, divides, without_loss, [without_loss, nn.Linear(2, 2)]):
        with pytest.raises((TypeError, ValueError)) as raised:
            Accumulator(model)  # type: ignore[arg-type]  # no module
        messages.append(f"{type(raised.value).__name__}: {raised.value}")
    return messages


def test_wrappers_that_look_plain_are_refused_with_their_own_cure(ranks):
    for composed, lightning, parallel, stage, divides, without_loss, two in ranks(2).run(plain_for_a_reason):
        assert "replicate.DDP, which has no engine here; use DistributedDataParallel(module)" in composed
        assert "give the Accumulator trainer.strategy.model" in lightning
        assert "a tensor-parallel module alone in a job of 2 ranks" in parallel and "mesh=mesh['data']" in parallel
        assert "TypeError: model is a pipeline's PipelineStage, expected its schedule" in stage
        assert "ValueError: the ScheduleGPipe divides gradients" in divides and "with scale_grads=False" in divides
        assert "ValueError: the ScheduleGPipe has no loss_fn" in without_loss
        assert "ValueError: model holds a ScheduleGPipe and 1 more" in two


def test_swapped_model_and_optimizer_are_named():
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model=SGD without forward.*the model comes first, then the optimizer"):
        Accumulator(SGD(net.parameters(), lr=0.1), net)  # type: ignore[arg-type]


def test_plain_module_mixed_wrappers_and_unknown_sync_are_refused(ranks):
    for message in ranks(2).run(plain_in_a_job):
        assert "a plain module in a job of 2 ranks" in message and "FSDP2" in message
    for message in ranks(2).run(two_kinds):
        assert "DistributedDataParallel and FSDP2 (fully_shard), expected one kind" in message
    for message in ranks(2).run(unknown_policy):
        assert "sync='replicas', expected one of 'last', 'every', 'gathered' for FSDP2" in message


class Summing(nn.Module):
    """A wrapper that no library has: it sums gradients over ranks on request."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


# The example of docs/engine.md, word for word.


@register
@final
class SummingEngine(Engine):
    name = "Summing"
    policies = ("last",)

    @classmethod
    def wraps(cls, module):
        return isinstance(module, Summing)

    def __init__(self, models, sync):
        super().__init__(models, sync, dist.group.WORLD)
        self.divisor = 1  # it sums

    def begin(self, plan, parameters):
        self._parameters = parameters

    def finish(self):
        for parameter in self._parameters:
            if parameter.grad is None:  # a rank that had no micro-batch
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)


def with_an_engine_from_outside() -> Any:
    model = Summing(make_net_without_router())
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), max_norm=100.0)
    seen = []
    for index, layout in enumerate([[[2, 1], [3]], [[4], []]]):
        window = accumulator.window(micro_batches_of(layout, index, dist.get_rank()))
        for batch in window:
            window.backward(loss_of(model, batch))
        exact = full_batch_gradient(
            make_net_without_router(), [b for r in range(2) for b in micro_batches_of(layout, index, r)]
        )
        wrong = error(gradient(model), exact)
        update = window.step()
        seen.append((wrong, abs(update.grad_norm - exact.norm().item())))
    return seen


def test_engine_from_outside_the_package_is_exact(ranks):
    assert SummingEngine in known_engines()
    for seen in ranks(2).run(with_an_engine_from_outside):
        for wrong, norm in seen:
            assert wrong <= 1e-12
            assert norm <= 1e-12


# torch.compile over each wrapper


def compiled(name: str) -> Any:
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
    net = make_net_without_router()
    if name == "FSDP2":
        for layer in layers(net):
            fully_shard(layer)
        model, optimizer = with_sgd(fully_shard(net), 1.0)
    elif name == "DDP":
        model, optimizer = with_sgd(DistributedDataParallel(net), 1.0)
    else:
        model, optimizer = KINDS[name].wrap(net.to(KINDS[name].dtype), 1.0)
    weights = KINDS[name].weights
    optimizers = None if name.startswith("ZeRO") else optimizer
    if name.startswith("ZeRO"):
        model.compile(backend="aot_eager")
        run = model
    else:
        run = torch.compile(model, backend="aot_eager")
    accumulator = Accumulator(run, optimizers)
    seen = []
    for index, layout in enumerate([[[2, 2, 2], [2, 2]], [[2, 2], [2]]]):
        before = weights(model).double()
        window = accumulator.window(micro_batches_of(layout, index, dist.get_rank(), KINDS[name].dtype))
        for batch in window:
            window.backward(loss_of(run, batch))
        window.step()
        plain = make_net_without_router()
        nn.utils.vector_to_parameters(before, plain.parameters())
        batches = [b for r in range(2) for b in micro_batches_of(layout, index, r, KINDS[name].dtype)]
        exact = full_batch_gradient(plain, [{key: b[key].double() for key in ("x",)} for b in batches])
        seen.append(error(before - weights(model).double(), exact))
    return max(seen)


@pytest.mark.parametrize("name", ["DDP", "FSDP2", "ZeRO 1"])
def test_compiled_model_is_exact(ranks, name):
    for wrong in ranks(2).run(compiled, name):
        assert wrong <= KINDS[name].bound


def test_missing_private_name_is_an_error_that_names_the_versions():
    require("torch", nn.Linear(1, 1), "weight")
    with pytest.raises(DistaccumError, match=r"Linear of this version of torch has no _gone, .*; use torch 2.9 to"):
        require("torch", nn.Linear(1, 1), "weight", "_gone")
