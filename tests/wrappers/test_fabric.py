"""Fabric: what `fabric.setup` returned, on real ranks, under each strategy that runs on CPUs."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from tests.support.engines import (
    KINDS,
    Kind,
    import_deepspeed,
    layers,
    summoned_weights,
    windows_off,
    wrappers,
    zero_config,
    zero_weights,
)
from tests.support.oracle import everything, own
from tests.support.problems import join, make_batch, make_net_without_router, sample_loss
from tests.support.ranks import launched, on_ranks
from tests.support.windows import error, gradient, gradient_of, hooked, run_window, warned, weights


def make_fabric(strategy: Any = "auto", **options: Any) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    world = dist.get_world_size() if dist.is_initialized() and strategy != "auto" else 1
    plugins = [*options.pop("plugins", ()), LightningEnvironment()]
    fabric = Fabric(**{"accelerator": "cpu", "devices": world, "strategy": strategy, "plugins": plugins, **options})
    fabric.launch()
    return fabric


def strategy_of(name: str) -> Any:
    """Fabric's strategy; those that it refuses on CPUs without its look at the device."""
    from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    class Sharded(FSDPStrategy):
        """Under another name, since Fabric looks at the type."""

    class ZeRO(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            with patch("lightning_fabric.strategies.deepspeed._validate_device_index_selection"):
                self._setup_distributed()

        def _init_deepspeed_distributed(self) -> None:
            import_deepspeed()

        def _initialize_engine(self, model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> Any:
            return *wrappers.deepspeed(model, optimizer, self.config), scheduler  # without the GPU's number

    if name == "DDP":
        return DDPStrategy(find_unused_parameters=True)  # no loss uses the router
    if name == "FSDP1":
        return Sharded()
    if name == "FSDP2":
        return ModelParallelStrategy(
            lambda net, mesh: wrappers.fully_sharded(net, layers(net), mesh=mesh["data_parallel"]),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
        )
    if name.startswith("ZeRO"):
        return ZeRO(config=zero_config(int(name[-1])))
    return "auto"


def set_up(name: str):
    def wrapped(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, Any]:
        if name == "FSDP1":  # Fabric's own call asks for a GPU; what is wrapped it takes as it is
            net = wrappers.fsdp1(net, layers(net))
        if name.startswith("ZeRO"):
            import_deepspeed()  # before the environment is kept: its forwards read it
        with launched():
            fabric = make_fabric(strategy_of(name))
            if name == "FSDP2":
                model = fabric.setup_module(net)
                return model, fabric.setup_optimizers(SGD(model.parameters(), lr=lr))
            return fabric.setup(net, SGD(net.parameters(), lr=lr))

    return wrapped


def within(read: Any) -> Any:
    """Reads the weights of what Fabric wrapped."""
    return lambda model: read(model._forward_module)


ZERO = {f"ZeRO {n}": Kind(set_up(f"ZeRO {n}"), within(zero_weights), dtype=torch.float32) for n in (1, 2, 3)}
FABRIC = {
    "auto": Kind(set_up("auto"), weights, world=1),
    "DDP": Kind(set_up("DDP"), weights),
    "FSDP1": Kind(set_up("FSDP1"), within(summoned_weights), dtype=torch.float32),  # Fabric casts its inputs
    "FSDP2": Kind(set_up("FSDP2"), weights),
    **ZERO,
}


CASES = [*((name, "samples mean") for name in FABRIC), ("DDP", "tokens sum_to_mean")]


@pytest.mark.parametrize(("name", "case"), CASES)
@on_ranks(lambda name, case: FABRIC[name].world)
def test_law_holds_on_what_fabric_set_up(name, case):
    with patch.dict(KINDS, FABRIC):
        for off in windows_off(name, "last", case):
            assert max(off) <= FABRIC[name].bound


def mixed(scaler: Any = None) -> Any:
    from lightning_fabric.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed" if scaler is not None else "bf16-mixed", "cpu", scaler)


SIZES = (3, 1, 2)
BATCHES = [make_batch(size, seed=size, dtype=torch.float32) for size in SIZES]


def in_mixed(scaler: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    with launched():
        fabric = make_fabric(plugins=[mixed(scaler)], **options)
        net = make_net_without_router().float()
        return fabric, *fabric.setup(net, SGD(net.parameters(), lr=1.0))


def run(window: Any, model: Any, factor: float = 1.0) -> Any:
    loss_fn = lambda model, batch: hooked(sample_loss(model, batch), lambda g: g * factor)  # noqa: E731
    return run_window(window, model, loss_fn).step()


def moved_by(model: Any, accumulator: Accumulator) -> Tensor:
    before = weights(model)
    assert run(accumulator.window(BATCHES), model).stepped
    return before - weights(model)


def exact_gradient() -> Tensor:
    return gradient_of(make_net_without_router().float(), join(BATCHES), sample_loss)


def test_autocast_of_fabric_is_active_and_its_own_backward_still_wanted():
    fabric, model, optimizer = in_mixed()
    for batch, size in zip(BATCHES, SIZES, strict=True):
        fabric.backward(sample_loss(model, batch) * (size / sum(SIZES)))
    by_hand = gradient(model)
    optimizer.zero_grad()
    moved = moved_by(model, Accumulator(model, optimizer))
    assert error(moved, by_hand) <= 1e-6
    assert 1e-4 <= error(moved, exact_gradient()) <= 3e-2, "computed in bfloat16"
    with pytest.raises(RuntimeError, match="requires you to call `fabric"):
        sample_loss(model, BATCHES[0]).backward()


def test_scaler_of_the_precision_plugin_scales_once_and_skips_an_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, model, optimizer = in_mixed(scaler)
    accumulator = Accumulator(model, optimizer)
    assert 1e-5 <= error(moved_by(model, accumulator), exact_gradient()) <= 3e-3, "computed in float16"
    assert scaler.get_scale() == 8.0
    before = weights(model)
    update = run(accumulator.window(BATCHES), model, float("inf"))
    assert (update.stepped, update.reason) == (False, "the scaled gradients overflowed")
    assert scaler.get_scale() == 4.0 and torch.equal(before, weights(model))


class Own(nn.Module):
    """Its loss is a method, which Fabric sends through the wrapper's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net_without_router()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        return sample_loss(self.net, batch)


@pytest.mark.parametrize("what", ["compiled again", "a loss in a method", "calls that stayed"])
@on_ranks(2)
def test_window_under_fabrics_ddp_is_exact(what):
    torch._dynamo.reset()
    net = Own() if what == "a loss in a method" else make_net_without_router()
    with launched():
        fabric = make_fabric(strategy_of("DDP"))
        given = torch.compile(net, backend="aot_eager") if what == "compiled again" else net
        model, optimizer = fabric.setup(given, SGD(net.parameters(), lr=1.0))
    layout, before = [[3, 1], [2]], weights(model)
    window = Accumulator(model, optimizer).window(own(layout))
    with warned():  # dynamo's own
        for i, batch in enumerate(window):
            with fabric.no_backward_sync(model, enabled=i == 0 and what == "calls that stayed"):
                loss = model.training_step(batch) if what == "a loss in a method" else sample_loss(model, batch)
                window.backward(loss)
    exact = gradient_of(make_net_without_router(), everything(layout), sample_loss)
    if what == "calls that stayed":
        fabric.clip_gradients(model, optimizer, clip_val=0.01)
        assert exact.abs().max() > 0.01
        exact.clamp_(-0.01, 0.01)
    window.step()
    assert error(before - weights(model), exact) <= 1e-10


def test_backward_and_step_of_fabric_within_a_window_are_refused():
    fabric, model, optimizer = in_mixed()
    accumulator = Accumulator(model, optimizer)
    for said, call in (
        ("gradients came into the window", fabric.backward),
        (r"optimizer.step\(\) before the window's own", lambda _: optimizer.step()),
    ):
        window = accumulator.window(BATCHES)
        with pytest.raises(DistaccumError, match=said):
            for batch in window:
                call(sample_loss(model, batch))
                window.backward(sample_loss(model, batch))
    assert run(accumulator.window(BATCHES), model).stepped


def test_second_owner_of_backward_step_or_scale_is_refused():
    from lightning_fabric.plugins.precision import Precision
    from lightning_fabric.strategies import SingleDeviceStrategy

    class Doubling(SingleDeviceStrategy):
        def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            super().backward(tensor * 2, module, *args, **kwargs)

    class Noting(Precision):
        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            return super().optimizer_step(optimizer, **kwargs)

    for options, name in (({"strategy": Doubling("cpu")}, "Doubling.backward"), ({"plugins": [Noting()]}, "Noting.")):
        with launched():
            fabric = make_fabric(**{"strategy": "auto", **options})
            net = make_net_without_router()
            model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=1.0))
        with pytest.raises(ValueError, match=name):
            Accumulator(model, optimizer)
    _, model, optimizer = in_mixed(torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"scaler= beside the precision plugin's own.*leave scaler= out"):
        Accumulator(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
