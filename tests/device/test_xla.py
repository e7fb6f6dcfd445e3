"""The law on a device that is not the host: torch_xla's client for CPUs (`bash tests/run.sh --device xla`).

A tensor there lives elsewhere, its operations are traced and run later, and reading it is a transfer that torch_xla
counts. Each oracle is computed on the host.
"""

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_backend  # registers it
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch_xla.debug import metrics

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens
from distaccum.extensions import NoiseScale, Spans, WideSums
from tests.runs import test_heads
from tests.runs.test_update import Limited
from tests.support.oracle import everything, step_off
from tests.support.problems import CASES, Batch, make_batch, make_net, micro_batches_of, sample_loss, token_loss, trunk
from tests.support.windows import error, gradient_of, loss_of, run_window, weights

DEVICE = torch_xla.device()
SIZES = (1, 6, 2), (3, 2)  # of micro-batches, by window: uneven, and short


def there(given: Any) -> Any:
    """A batch or a module, on the device."""
    return {key: column.to(DEVICE) for key, column in given.items()} if isinstance(given, dict) else given.to(DEVICE)


def batches_of(index: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """The micro-batches of a window, on the host."""
    return micro_batches_of([SIZES[index]], index, 0, dtype)


def accumulating(model: nn.Module, lr: float = 1.0, **options: Any) -> Accumulator:
    return Accumulator(model, SGD(model.parameters(), lr=lr), **options)


def weights_here(model: nn.Module) -> Tensor:
    return weights(model).cpu()


def num_reads() -> int:
    """How often the host has waited for values of the device, in this process."""
    found = metrics.metric_data("TransferFromDeviceTime")
    return found[0] if found else 0


def windows_off(
    model: nn.Module,
    accumulator: Accumulator,
    case: str = "samples mean",
    make: Callable[[], Any] = make_net,
    place: Callable[[Batch], Batch] = there,
    **more: Any,
) -> float:
    """The largest relative error of the steps, norms and losses of two windows.

    `make` makes the same net on the host; `place` puts a batch on the device.
    """
    loss_fn, how, reduction, _ = CASES[case]
    of_all = partial(loss_fn, how="mean" if reduction == "sum_to_mean" else how)
    dtype, errors = next(model.parameters()).dtype, list[float]()
    for index in range(len(SIZES)):
        batches = batches_of(index, dtype)
        window = accumulator.window([place(batch) for batch in batches])
        whole = everything([SIZES[index]], index, dtype)

        def run(batch: Batch, window: Any = window) -> None:
            window.backward(loss_fn(model, batch, how))
            if window.index:
                torch_xla.sync()  # runs what is traced so far, as programs for large models do

        errors += step_off(model, window, make(), whole, of_all, run, read=weights_here, **more)
    return max(errors)


@pytest.mark.parametrize("case", CASES)
def test_windows_equal_one_big_batch(case):
    _, _, reduction, count = CASES[case]
    model, lr = there(make_net()), 1 / 32 if reduction == "sum" else 1.0
    accumulator = accumulating(model, lr, reduction=reduction, count=count)
    assert windows_off(model, accumulator, case, lr=lr) <= 1e-10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"on_nonfinite": "ignore"}, 0),
        ({"on_nonfinite": "ignore", "max_norm": 0.01}, 0),
        ({"on_nonfinite": "raise", "max_norm": 0.01}, 1),
        ({"on_nonfinite": "skip", "scaler": GradScaler("xla"), "max_norm": 0.01}, 1),
        ({"on_nonfinite": "skip", "extensions": [NoiseScale(), WideSums(torch.float64), Spans()]}, 1),
    ],
)
def test_window_reads_one_number_or_none(options, expected):
    model = there(make_net(torch.float32))
    accumulator = accumulating(model, steps=2, **options)
    batches = [there(make_batch(2, seed=i, dtype=torch.float32)) for i in range(6)]
    for window in accumulator.windows(batches):
        before = num_reads()
        run_window(window, model)
        assert num_reads() == before
        update = window.step()
        assert num_reads() == before + expected
        assert update.loss > 0 and num_reads() == before + expected + 1


def test_labels_on_the_device_are_counted_with_one_read_per_plan():
    model, reads = there(make_net()), []
    accumulator = accumulating(model, steps=2, count=count_tokens("labels"), on_nonfinite="ignore")
    batches = [make_batch(2, seed=i) for i in range(6)]
    before = num_reads()
    for window in accumulator.windows([there(batch) for batch in batches]):
        mine = batches[2 * window.index : 2 * window.index + 2]
        assert window.counts["tokens"] == sum(int((batch["labels"] != -100).sum()) for batch in mine)
        run_window(window, model, token_loss).step()
        reads.append(num_reads() - before)
        before = num_reads()
    assert reads == [1, 1, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip", "ignore"])
def test_nonfinite_gradient_is_treated_as_on_the_host(on_nonfinite, value):
    model = there(make_net())
    accumulator, before = accumulating(model, on_nonfinite=on_nonfinite), weights_here(model)
    window = accumulator.window([there(batch) for batch in batches_of(1)])
    for i, batch in enumerate(window):
        window.backward(sample_loss(model, batch) * (value if i else 1.0))
    if on_nonfinite == "raise":
        with pytest.raises(DistaccumError, match="the loss of micro-batch 1 on rank 0 is"):
            window.step()
    else:
        assert window.step().stepped == (on_nonfinite == "ignore")
    assert torch.equal(weights_here(model), before) == (on_nonfinite != "ignore")
    if on_nonfinite != "ignore":
        assert windows_off(model, accumulator) <= 1e-10


def test_scaler_grows_clips_and_skips_an_overflow():
    scaler = GradScaler("xla", init_scale=2.0**10, growth_interval=2)
    model = there(make_net(torch.float32))
    accumulator = accumulating(model, scaler=scaler, max_norm=0.03)
    assert windows_off(model, accumulator, clip=0.03) <= 1e-5
    assert scaler.get_scale() == 2.0**11
    before = weights_here(model)
    window = accumulator.window([there(batch) for batch in batches_of(1, torch.float32)])
    for batch in window:
        loss = sample_loss(model, batch)
        loss.register_hook(lambda gradient: gradient * math.inf)
        window.backward(loss)
    assert window.step().reason == "the scaled gradients overflowed"
    assert scaler.get_scale() == 2.0**10 and torch.equal(weights_here(model), before)


def test_update_cuts_a_batch_and_replays_it_when_memory_is_short():
    model = there(make_net())
    batch = make_batch(11, seed=1)
    loss_fn = Limited(model, 3)
    before = weights_here(model)
    accumulating(model, micro_batch_size="auto").update(there(batch), loss_fn)
    assert error(before - weights_here(model), gradient_of(make_net(), batch)) <= 1e-10
    assert loss_fn.sizes[0] == 11 and max(loss_fn.sizes[-4:]) <= 3


@pytest.mark.parametrize("view", [False, True])
def test_ddp_on_one_rank_equals_one_big_batch(view):
    dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(there(trunk()), gradient_as_bucket_view=view)
        assert windows_off(model, accumulating(model), make=trunk) <= 1e-10
    finally:
        dist.destroy_process_group()


def test_batches_sharded_over_two_devices_equal_one_big_batch():
    command = [sys.executable, "-m", "tests.device.two_devices"]
    ended = subprocess.run(command, env={**os.environ, "CPU_NUM_DEVICES": "2"}, capture_output=True, text=True)
    assert ended.returncode == 0 and float(ended.stdout) <= 1e-10, ended.stderr


def encoded(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).flatten(1)


def alike(representations: Tensor) -> Tensor:
    """A loss over all pairs."""
    return (representations @ representations.T - torch.eye(len(representations)).to(representations)).square().mean()


def test_contrast_equals_the_loss_over_all_pairs():
    model, batch = there(make_net()), make_batch(7, seed=1)
    before = weights_here(model)
    accumulating(model, micro_batch_size=3).contrast(there(batch), partial(encoded, model), alike)
    exact = gradient_of(make_net(), batch, lambda *both: alike(encoded(*both)))
    assert error(before - weights_here(model), exact) <= 1e-10


def test_contrast_draws_the_same_dropout_twice():
    model = there(nn.Sequential(trunk(), nn.Dropout(0.5)))
    # It compares the two itself, and raises before it steps if they differ.
    accumulator, batch = accumulating(model, micro_batch_size=3), there(make_batch(7, seed=1))
    assert accumulator.contrast(batch, partial(encoded, model), alike).stepped


def test_check_compares_on_the_device_and_names_dropout():
    model, batch = there(nn.Linear(5, 4).double()), there(make_batch(5, seed=1))
    for count, cause in (count_tokens("labels"), None), (count_samples, "count: "):
        report = accumulating(model, micro_batch_size=3, count=count).check(batch, partial(token_loss, model))
        assert report.equivalent == (cause is None) and all(found.startswith(cause) for found in report.causes)
    dropping = nn.Sequential(model, nn.Dropout(0.5))
    report = accumulating(dropping, micro_batch_size=3).check(batch, partial(loss_of, dropping))
    assert report.causes[0].startswith("dropout: ") and "and it is" in report.causes[0]


def test_heads_run_one_at_a_time():
    model = there(test_heads.Tasks())
    batches = batches_of(0)
    window = accumulating(model).window([there(batch) for batch in batches])
    assert test_heads.off(model, window, batches, read=weights_here) <= 1e-10


def resume_from(saved: bytes | None, save_in: tuple[int, int] | None = None) -> tuple[Tensor, bytes]:
    """The weights at the end of a job of three windows, and its state after that backward: (window, micro-batch)."""
    model = there(nn.Sequential(trunk(), nn.Dropout(0.3)))
    optimizer, box = Adam(model.parameters(), lr=0.01), io.BytesIO()
    accumulator = Accumulator(model, optimizer, steps=2)
    if saved is not None:
        of_model, of_optimizer, state = torch.load(io.BytesIO(saved))
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        accumulator.load_state_dict(state)
    batches = [there(make_batch(2, seed=i)) for i in range(6)]
    for window in accumulator.windows(batches[2 * accumulator.index :]):
        for i, batch in enumerate(window):
            window.backward(loss_of(model, batch))
            if (window.index, i) == save_in:
                torch.save([model.state_dict(), optimizer.state_dict(), accumulator.state_dict()], box)
        window.step()
    return weights_here(model), box.getvalue()


def test_job_killed_in_a_window_draws_the_same_dropout_when_it_resumes():
    torch_xla.manual_seed(1)
    whole, _ = resume_from(None)
    torch_xla.manual_seed(1)
    watched, saved = resume_from(None, save_in=(1, 1))
    assert torch.equal(watched, whole)
    torch_xla.manual_seed(2)
    assert not torch.equal(resume_from(None)[0], whole)
    assert torch.equal(resume_from(saved)[0], whole)
