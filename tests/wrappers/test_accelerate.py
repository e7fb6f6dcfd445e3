"""Accelerate: objects from `prepare` on real ranks, with its singletons restored."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from distaccum import Accumulator, DistaccumError
from tests.support.engines import import_deepspeed, zero_config, zero_weights
from tests.support.oracle import everything, own, step_off
from tests.support.problems import make_batch, make_net_without_router, micro_batches_of
from tests.support.ranks import on_ranks
from tests.support.windows import hooked, loss_of, refused, run_window, warned, weights


@contextmanager
def accelerators(**environment: str) -> Iterator[Any]:
    """Yields a factory of Accelerators on CPU in this job's process group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    environment = {"OMP_NUM_THREADS": "1", **environment}
    if world > 1:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        environment |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    try:
        with patch.dict(os.environ, environment):
            yield lambda **options: Accelerator(**{"cpu": True, **options})
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def state_of(accelerator: Any) -> Any:
    steps = accelerator.gradient_state
    state = {k: v for k, v in accelerator.state.__dict__.items() if k != "_shared_state"}
    return accelerator.step, steps.sync_gradients, steps.num_steps, state


UNEVEN = [[[3, 1, 2], [2, 2, 2]], [[4], [1, 2]], [[], [5, 1]]]
GIVEN = pytest.mark.parametrize("given", [True, False], ids=["given", "found"])


def prepare(accelerator: Any, **options: Any) -> Any:
    net = make_net_without_router()
    net = net.float() if options.pop("narrow", False) else net
    optimizer = SGD(net.parameters(), lr=options.pop("lr", 1.0))
    schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    given = {"accelerator": accelerator} if options.pop("given", True) else {}
    with warned():  # Accelerate would step the schedule more often
        return net, optimizer, schedule, Accumulator(net, optimizer, scheduler=schedule, **given, **options)


def windows_off(model: Any, schedule: Any, accumulator: Accumulator, layouts: Any, read: Any = weights) -> Any:
    """By window: how far its step is off, and its rate."""
    seen, rank, dtype = [], dist.get_rank() if dist.is_initialized() else 0, read(model).dtype
    for index, layout in enumerate(layouts):
        lr, window = schedule.get_last_lr()[0], accumulator.window(micro_batches_of(layout, index, rank, dtype))
        whole = everything(layout, index, dtype)
        seen.append((max(step_off(model, window, make_net_without_router(), whole, read=read, lr=lr)), lr))
    return seen


@pytest.mark.parametrize(("world", "given"), [(1, True), (2, True), (2, False)])
@on_ranks()
def test_prepared_model_trains_exactly(world, given):
    with accelerators() as make:
        accelerator = make()
        model, _, schedule, accumulator = prepare(accelerator, given=given, max_norm=100.0, lr=0.5)
        found = state_of(accelerator)
        seen = windows_off(model, schedule, accumulator, UNEVEN if world > 1 else [one[:1] for one in UNEVEN[:2]])
        assert state_of(accelerator) == found and not accelerator.optimizer_step_was_skipped
    assert [lr for _, lr in seen] == [0.5, 0.25, 0.5 / 3][: len(seen)]  # one step per update, not one per process
    assert max(wrong for wrong, _ in seen) <= 1e-10


@on_ranks(2)
def test_callers_step_of_a_prepared_schedule_is_warned_of():
    with accelerators() as make, warned() as texts:
        model, _, schedule, accumulator = prepare(make(), steps=1)
        for window in accumulator.windows([micro_batches_of(UNEVEN[0], 0, 0)[0]] * 3):
            run_window(window, model).step()
            schedule.step()
    assert sum("beside window.step()" in text for text in texts) == (dist.get_rank() == 0)


@pytest.mark.parametrize(("split_batches", "is_prepared"), [(False, True), (True, True), (False, False)])
@on_ranks(2)
def test_warning_names_the_factor_of_a_schedule_stepped_per_process(split_batches, is_prepared):
    from accelerate import DataLoaderConfiguration

    with accelerators() as make:
        accelerator = make(dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
        net = make_net_without_router()
        optimizer = SGD(net.parameters(), lr=0.5)
        schedule: Any = LambdaLR(optimizer, lambda update: 1.0)
        net, optimizer = accelerator.prepare(net, optimizer)
        schedule = accelerator.prepare(schedule) if is_prepared else schedule
        with warned() as texts:
            Accumulator(net, optimizer, scheduler=schedule, accelerator=accelerator)
    assert len(texts) == (is_prepared and not split_batches and dist.get_rank() == 0)
    assert all("2 times per update" in text and "(warm-up, total) by 2" in text for text in texts)


@GIVEN
def test_accumulation_by_accelerate_is_refused(given):
    with accelerators() as make:
        accelerator = make(gradient_accumulation_steps=4)
        with pytest.raises(DistaccumError, match=r"accumulates over 4 steps.*leave it at 1"):
            prepare(accelerator, given=given)
        accelerator.gradient_accumulation_steps = 1
        *_, accumulator = prepare(accelerator, given=given)
        accelerator.gradient_accumulation_steps = 2
        with pytest.raises(DistaccumError, match="accumulates over 2 steps"):
            accumulator.window([make_batch(1, seed=0)])


@GIVEN
def test_scaler_of_accelerate_scales_once_and_skips_an_overflow(given):
    with accelerators() as make:
        accelerator = make()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        net, _, schedule, accumulator = prepare(accelerator, given=given, narrow=True)
        ((wrong, _),) = windows_off(net, schedule, accumulator, [[[3, 1]]])
        assert wrong <= 1e-6 and accelerator.scaler.get_scale() == 8.0
        before, batches = weights(net), [make_batch(size, seed=size, dtype=torch.float32) for size in (3, 1)]
        with pytest.raises(DistaccumError, match="loss of this window is not finite"):
            run_window(accumulator.window(batches), net, lambda net, batch: loss_of(net, batch) * float("inf")).step()
        window = run_window(accumulator.window(batches), lambda x: hooked(net(x), lambda g: g * float("inf")))
        assert not window.step().stepped and accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == 4.0
        assert torch.equal(before, weights(net))


@on_ranks(2)
def test_evaluation_and_break_leave_the_state_of_accelerate_as_found_and_metrics_have_each_sample_once():
    steps = 3
    with accelerators() as make:
        accelerator = make()
        net = make_net_without_router()
        x = torch.arange(14 * 6 * 5, dtype=torch.float64).view(14, 6, 5) / 100
        loader = DataLoader(TensorDataset(x), batch_size=2)
        evaluation = DataLoader(TensorDataset(x), batch_size=4)
        net, optimizer, loader, evaluation = accelerator.prepare(net, SGD(net.parameters(), lr=0.0), loader, evaluation)
        accumulator = Accumulator(net, optimizer, steps=steps, accelerator=accelerator)
        found = state_of(accelerator)
        counts = []
        for leave_at in (1, 0, 99):
            trained, evaluated = [], []
            for i, window in enumerate(accumulator.windows(loader)):
                for (inputs,) in window:
                    trained.append(len(accelerator.gather_for_metrics(inputs)))
                    window.backward(net(inputs).square().mean())
                    if i == leave_at:
                        break
                if i == leave_at:
                    break
                counts.append(window.step().counts["samples"])
                for (inputs,) in evaluation:
                    with torch.no_grad():
                        evaluated.append(len(accelerator.gather_for_metrics(net(inputs))))
            assert state_of(accelerator) == found
    # 14 samples in batches of 2 on 2 ranks; Accelerate repeats the first samples, so each rank has 4 batches.
    assert counts == [12, 12, 4]
    assert (trained, evaluated) == ([4, 4, 4, 2], [8, 6] * 2)


@on_ranks(2)
def test_fsdp2_model_from_prepare_trains_exactly():
    """Accelerate uses FSDP only on accelerators, so its state is set to report some."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    with accelerators() as make:
        state = PartialState(cpu=True)
        state._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
        accelerator = make(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        net, _, schedule, accumulator = prepare(accelerator, max_norm=100.0)
        assert isinstance(net, FSDPModule)
        assert max(wrong for wrong, _ in windows_off(net, schedule, accumulator, UNEVEN)) <= 1e-10


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_deepspeed_engine_from_prepare_trains_exactly(stage):
    from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs

    class Plugin(DeepSpeedPlugin):
        def set_deepspeed_weakref(self) -> None:
            """Only transformers needs it."""

    import_deepspeed()
    # The plugin would create a process group; here it finds this job's.
    with accelerators(DS_ACCELERATOR="cpu") as make:
        config = {**zero_config(stage), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
        group = InitProcessGroupKwargs(backend="gloo")
        accelerator = make(cpu=False, deepspeed_plugin=Plugin(hf_ds_config=config), kwargs_handlers=[group])
        engine, optimizer, schedule, accumulator = prepare(accelerator, narrow=True)
        with warned() as texts:
            Accumulator(engine, optimizer, scheduler=schedule, accelerator=accelerator)
        assert [text[:30] for text in texts] == ["Accelerate steps a prepared sc"] * (dist.get_rank() == 0)
        seen = windows_off(engine, schedule, accumulator, UNEVEN[:2], zero_weights)
        window = accumulator.window(own(UNEVEN[0], 0, torch.float32))
        said = refused(lambda: [accelerator.backward(loss_of(engine, batch)) for batch in window])  # steps the engine
    assert max(wrong for wrong, _ in seen) <= 1e-5
    assert [lr for _, lr in seen] == [1.0, 0.5]
    assert "accelerator.backward(), which calls it" in said
