"""Accelerate: objects from `prepare` on real ranks, with its singletons restored."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import engine_name
from problems import big_batch, error, gradient, make_batch, make_net, make_net_without_router, sample_loss, weights
from ranks import RankError
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distaccum import Accumulator, DistaccumError


@contextmanager
def accelerators(**environment: str) -> Iterator[Any]:
    """Yields a factory of Accelerators on CPU in this job's process group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    if world > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    try:
        yield lambda **options: Accelerator(**{"cpu": True, **options})
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(found)


def state_of(accelerator: Any) -> Any:
    gradient_state = accelerator.gradient_state
    return (
        accelerator.step,
        gradient_state.sync_gradients,
        gradient_state.num_steps,
        list(gradient_state.dataloader_references),
        {k: v for k, v in accelerator.state.__dict__.items() if k != "_shared_state"},
    )


def batches(index: int, sizes: list[int]) -> list[Any]:
    return [make_batch(size, seed=100 * index + i) for i, size in enumerate(sizes)]


UNEVEN = [[[3, 1, 2], [2, 2, 2]], [[4], [1, 2]], [[], [5, 1]]]


def prepared(given: bool) -> Any:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    seen = []
    with accelerators() as make:
        accelerator = make()
        net = make_net_without_router()
        optimizer = SGD(net.parameters(), lr=0.5)
        schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        found = state_of(accelerator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Accelerate warns that it would step the schedule more often
            accumulator = Accumulator(
                model, optimizer, scheduler=schedule, accelerator=accelerator if given else None, max_norm=100.0
            )
        for index, layout in enumerate(UNEVEN if world > 1 else UNEVEN[:1]):
            reference = make_net()
            del reference.router
            torch.nn.utils.vector_to_parameters(weights(model), reference.parameters())
            before = weights(model)
            window = accumulator.window(batches(10 * index + rank, layout[rank]))
            for batch in window:
                window.backward(sample_loss(model, batch))
            everything = [b for r in range(world) for b in batches(10 * index + r, layout[r])]
            joined = {key: torch.cat([batch[key] for batch in everything]) for key in everything[0]}
            sample_loss(reference, joined).backward()
            lr = schedule.get_last_lr()[0]
            assert window.step().stepped
            seen.append((error((before - weights(model)) / lr, gradient(reference)), lr))
        assert state_of(accelerator) == found
        assert not accelerator.optimizer_step_was_skipped
    return seen


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_prepared_model_trains_exactly_on_two_ranks(ranks, given):
    for seen in ranks(2).run(prepared, given):
        assert [lr for _, lr in seen] == [0.5, 0.25, 0.5 / 3]  # one step per update, not one per process
        assert max(wrong for wrong, _ in seen) <= 1e-10


def warnings_of_a_schedule(split_batches: bool, is_prepared: bool = True, **options: Any) -> list[str]:
    from accelerate import DataLoaderConfiguration

    with accelerators() as make, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        accelerator = make(dataloader_config=DataLoaderConfiguration(split_batches=split_batches), **options)
        net = make_net_without_router()
        optimizer = SGD(net.parameters(), lr=0.5)
        schedule: Any = LambdaLR(optimizer, lambda update: 1.0)
        net, optimizer = accelerator.prepare(net, optimizer)
        schedule = accelerator.prepare(schedule) if is_prepared else schedule
        warned.clear()
        Accumulator(net, optimizer, scheduler=schedule, accelerator=accelerator)
    return [str(one.message) for one in warned]


def schedules() -> list[list[str]]:
    unlinked = {"step_scheduler_with_optimizer": False}
    return [
        warnings_of_a_schedule(False),
        warnings_of_a_schedule(True),
        warnings_of_a_schedule(False, **unlinked),
        warnings_of_a_schedule(False, is_prepared=False),
    ]


def test_warning_names_the_factor_of_a_schedule_stepped_per_process(ranks):
    (warned, *silent), on_rank_1 = ranks(2).run(schedules)
    assert len(warned) == 1
    assert "2 times per update" in warned[0] and "divide the lengths that were meant for Accelerate" in warned[0]
    assert warned[0].partition("(warm-up, total) ")[2].startswith("by 2")
    assert not any(silent) and not any(on_rank_1)
    assert warnings_of_a_schedule(False) == []


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_prepared_model_trains_exactly_in_one_process(given):
    ((wrong, lr),) = prepared(given)
    assert wrong <= 1e-12
    assert lr == 0.5


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_accumulation_by_accelerate_is_refused(given):
    with accelerators() as make:
        accelerator = make(gradient_accumulation_steps=4)
        net, optimizer = accelerator.prepare(*(lambda net: (net, SGD(net.parameters(), lr=1.0)))(make_net()))
        with pytest.raises(DistaccumError, match=r"accumulates over 4 steps.*leave it at 1"):
            Accumulator(net, optimizer, accelerator=accelerator if given else None)
        accelerator.gradient_accumulation_steps = 1
        accumulator = Accumulator(net, optimizer, accelerator=accelerator if given else None)
        accelerator.gradient_accumulation_steps = 2
        with pytest.raises(DistaccumError, match="accumulates over 2 steps"):
            accumulator.window([make_batch(1, seed=0)])


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_scaler_of_accelerate_scales_once_and_skips_an_overflow(given):
    with accelerators() as make:
        accelerator = make()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        net = make_net_without_router().float()
        net, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=1.0))
        accumulator = Accumulator(net, optimizer, accelerator=accelerator if given else None)
        micro_batches = [make_batch(size, seed=size, dtype=torch.float32) for size in (3, 1)]
        before = weights(net)
        window = accumulator.window(micro_batches)
        for batch in window:
            window.backward(sample_loss(net, batch))
        assert window.step().stepped
        reference = make_net_without_router().float()
        sample_loss(reference, {"x": torch.cat([batch["x"] for batch in micro_batches])}).backward()
        assert error(before - weights(net), gradient(reference)) <= 1e-6
        assert accelerator.scaler.get_scale() == 8.0
        before = weights(net)
        window = accumulator.window(micro_batches)
        for batch in window:
            window.backward(sample_loss(net, batch) * float("inf"))
        with pytest.raises(DistaccumError, match="loss of this window is not finite"):
            window.step()
        window = accumulator.window(micro_batches)
        for batch in window:
            loss = sample_loss(net, batch)
            loss.register_hook(lambda g: g * float("inf"))
            window.backward(loss)
        update = window.step()
        assert not update.stepped
        assert accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == 4.0
        assert torch.equal(before, weights(net))


def test_accumulators_on_one_accelerator_do_not_disturb_each_other():
    with accelerators() as make:
        accelerator = make()
        nets = [make_net_without_router() for _ in range(2)]
        made = [accelerator.prepare(net, SGD(net.parameters(), lr=1.0)) for net in nets]
        one, two = (Accumulator(net, optimizer, steps=2, accelerator=accelerator) for net, optimizer in made)
        loader = [make_batch(size, seed=size) for size in (3, 1)]
        exact = big_batch("samples mean", loader)[1]
        before = weights(nets[0])
        (first, second) = (next(accumulator.windows(loader)) for accumulator in (one, two))
        for batch, same in zip(first, second, strict=True):  # windows alternate, as in a GAN
            first.backward(sample_loss(nets[0], batch))
            second.backward(sample_loss(nets[1], same))
        first.step()
        assert error(before - weights(nets[0]), exact[: before.numel()]) <= 1e-12
        assert torch.equal(weights(nets[1]), before)
        second.step()
        assert torch.equal(weights(nets[1]), weights(nets[0]))


def test_window_whose_scale_was_updated_in_mid_window_is_discarded():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    nets = [make_net_without_router().float() for _ in range(2)]
    one, two = (Accumulator(net, SGD(net.parameters(), lr=1.0), scaler=scaler) for net in nets)
    loader = [make_batch(size, seed=size, dtype=torch.float32) for size in (3, 1)]
    before = weights(nets[1])
    first, second = one.window(loader), two.window(loader)
    for batch, same in zip(first, second, strict=True):
        first.backward(sample_loss(nets[0], batch))
        second.backward(sample_loss(nets[1], same))
    assert first.step().stepped
    with pytest.raises(DistaccumError, match=r"scale was updated while this window was open.*GradScaler of its own"):
        second.step()
    assert torch.equal(weights(nets[1]), before)
    third = two.window(loader)
    for batch in third:
        third.backward(sample_loss(nets[1], batch))
    assert third.step().stepped and torch.equal(weights(nets[1]), weights(nets[0]))


def test_discarded_window_leaves_another_of_its_scaler_alone():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    nets = [make_net_without_router().float() for _ in range(2)]
    one, two = (Accumulator(net, SGD(net.parameters(), lr=1.0), scaler=scaler) for net in nets)
    loader = [make_batch(size, seed=size, dtype=torch.float32) for size in (3, 1)]
    first, second = one.window(loader), two.window(loader)
    for batch, same in zip(first, second, strict=True):
        first.backward(sample_loss(nets[0], batch))
        second.backward(sample_loss(nets[1], same))
    second.discard()
    assert first.step().stepped


def a_loop_that_is_left(steps: int) -> Any:
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
            for i, window in enumerate(accumulator.windows(loader)):
                for (inputs,) in window:
                    window.backward(net(inputs).square().mean())
                    if i == leave_at:
                        break
                if i == leave_at:
                    break
                counts.append(window.step().counts["samples"])
                for (inputs,) in evaluation:
                    with torch.no_grad():
                        accelerator.gather_for_metrics(net(inputs))
            assert state_of(accelerator) == found
    return counts


def test_evaluation_and_break_leave_the_state_of_accelerate_as_found(ranks):
    for counts in ranks(2).run(a_loop_that_is_left, 3):
        # 14 samples in batches of 2 on 2 ranks; Accelerate repeats the first samples, so each rank has 4 batches.
        assert counts == [12, 12, 4]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from [torch.ones(5)] * 3
        raise OSError("the disk is gone")


def draws_for_all_ranks() -> None:
    with accelerators() as make:
        accelerator = make()
        net = nn.Linear(5, 1)
        net, optimizer, loader = accelerator.prepare(net, SGD(net.parameters(), lr=0.0), DataLoader(Endless()))
        for window in Accumulator(net, optimizer, steps=2, accelerator=accelerator).windows(loader):
            for inputs in window:
                window.backward(net(inputs).mean())
            window.step()


def test_error_of_a_loader_that_dispatches_is_raised_where_it_draws(ranks):
    """Not after the other rank's report, which waits there for its batch."""
    with pytest.raises(RankError, match=r"^rank 0 Traceback(.|\n)*OSError: the disk is gone"):
        ranks(2).run(draws_for_all_ranks, seconds=20)


def saved_by_accelerate(folder: str) -> Any:
    def refused(save: Any) -> str:
        try:
            save(folder)
        except DistaccumError as error:
            return str(error)
        return "nothing was raised"

    class Loader(list):
        def state_dict(self) -> dict[str, int]:
            return {"at": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    with accelerators() as make:
        accelerator = make()
        net = make_net_without_router()
        net, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=1.0))
        accumulator = Accumulator(net, optimizer, steps=2, accelerator=accelerator)
        accelerator.register_for_checkpointing(accumulator)
        messages = [refused(accelerator.save_state)]  # no rank has a part of its own
        for loader in (batches(dist.get_rank(), [1, 2, 3, 4]), Loader(batches(dist.get_rank(), [1, 2]))):
            for window in accumulator.windows(loader):
                before = weights(net)
                for i, batch in enumerate(window):
                    window.backward(sample_loss(net, batch))
                    if i == 0:
                        messages.append(refused(accelerator.save_state))
                window.step()
                messages.append(refused(accelerator.save_state))
        everything = [b for r in range(2) for b in batches(r, [1, 2])]
        reference = make_net_without_router()
        torch.nn.utils.vector_to_parameters(before, reference.parameters())
        sample_loss(reference, {"x": torch.cat([b["x"] for b in everything])}).backward()
        wrong = error(before - weights(net), gradient(reference))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(folder)
        is_told = any("no part for rank 1: its random numbers are left out" in str(one.message) for one in caught)
        assert is_told == (dist.get_rank() == 1)  # Accelerate itself restores them
        index = accumulator.index
        del window, accumulator, loader
        accelerator._custom_objects.clear()
        return messages, wrong, index, len(accelerator._save_model_state_pre_hook)


def test_save_state_is_refused_where_each_ranks_loader_has_a_state(ranks):
    with tempfile.TemporaryDirectory() as folder:
        for messages, wrong, index, hooks in ranks(2).run(saved_by_accelerate, folder):
            free, alone = "nothing was raised", "save accumulator.state_dict() on each rank, to a file of its own"
            # Before all; in each of two windows and after it; the same with a stateful loader.
            assert messages[:5] == [free] * 5 and [alone in one for one in messages[5:]] == [True, True]
            assert wrong <= 1e-10, "the window continued"
            assert index == 2, "the state saved last"
            assert hooks == 0, "no hook of a deleted Accumulator is left"


def fsdp2_of_accelerate() -> Any:
    """Accelerate uses FSDP only on accelerators, so its state is set to report some."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    with accelerators() as make:
        state = PartialState(cpu=True)
        state._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
        try:
            accelerator = make(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
            net = make_net_without_router()
            net, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=1.0))
            accumulator = Accumulator(net, optimizer, accelerator=accelerator, max_norm=100.0)
            seen = []
            for index, layout in enumerate([UNEVEN[0], UNEVEN[1], UNEVEN[2]]):
                before = torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])
                window = accumulator.window(batches(10 * index + dist.get_rank(), layout[dist.get_rank()]))
                for batch in window:
                    window.backward(sample_loss(net, batch))
                window.step()
                after = torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])
                reference = make_net_without_router()
                torch.nn.utils.vector_to_parameters(before, reference.parameters())
                everything = [b for r in range(2) for b in batches(10 * index + r, layout[r])]
                sample_loss(reference, {"x": torch.cat([b["x"] for b in everything])}).backward()
                seen.append(error(before - after, gradient(reference)))
            return engine_name(net, optimizer, accelerator=accelerator), max(seen)
        finally:
            for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
                del os.environ[key]


def test_fsdp2_model_from_prepare_trains_exactly(ranks):
    for engine, wrong in ranks(2).run(fsdp2_of_accelerate):
        assert engine == "FSDP2 (fully_shard)"
        assert wrong <= 1e-10


def deepspeed_of_accelerate(stage: int) -> Any:
    from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs
    from engines import import_deepspeed, zero_config, zero_weights

    class Plugin(DeepSpeedPlugin):
        def set_deepspeed_weakref(self) -> None:
            """Only transformers needs it."""

    import_deepspeed()
    # The plugin would create a process group; here it finds this job's.
    with accelerators(DS_ACCELERATOR="cpu") as make:
        config = {**zero_config(stage), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
        accelerator = make(
            cpu=False,
            deepspeed_plugin=Plugin(hf_ds_config=config),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        net = make_net_without_router().float()
        optimizer = SGD(net.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
        engine, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        with warnings.catch_warnings(record=True) as warned:  # Accelerate itself steps a prepared schedule of torch
            warnings.simplefilter("always")
            accumulator = Accumulator(engine, optimizer, scheduler=schedule, accelerator=accelerator)
        assert [str(one.message)[:30] for one in warned] == ["Accelerate steps a prepared sc"] * (dist.get_rank() == 0)
        seen = []
        for index, layout in enumerate(UNEVEN[:2]):
            before, lr = zero_weights(engine), schedule.get_last_lr()[0]
            mine = batches(10 * index + dist.get_rank(), layout[dist.get_rank()])
            window = accumulator.window([{"x": batch["x"].float()} for batch in mine])
            for batch in window:
                window.backward(sample_loss(engine, batch))
            window.step()
            reference = make_net_without_router()
            torch.nn.utils.vector_to_parameters(before.double(), reference.parameters())
            everything = [b for r in range(2) for b in batches(10 * index + r, layout[r])]
            sample_loss(reference, {"x": torch.cat([b["x"].float().double() for b in everything])}).backward()
            seen.append((error((before.double() - zero_weights(engine).double()) / lr, gradient(reference)), lr))
        window = accumulator.window([{"x": batch["x"].float()} for batch in mine])
        try:
            for batch in window:
                accelerator.backward(sample_loss(engine, batch))  # steps the engine
        except DistaccumError as refused:
            seen.append(str(refused))
        name = engine_name(engine, optimizer, accelerator=accelerator)
    return name, seen


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_engine_from_prepare_trains_exactly(ranks, stage):
    for engine, (one, two, refused) in ranks(2).run(deepspeed_of_accelerate, stage):
        assert engine == "DeepSpeed"
        assert max(one[0], two[0]) <= 1e-5
        assert (one[1], two[1]) == (1.0, 0.5)
        assert "accelerator.backward(), which calls it" in refused
