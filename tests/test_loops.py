"""Common accumulation loops: the wrong result of each beside the right one from this library.

The gradient of the one weight is the mean (or sum) of its samples: for 1 to 5 the mean is 3, the sum 15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, Update, Window, count_samples, count_tokens
from distaccum.extensions import NoiseScale, WideSums

SAMPLES = torch.arange(1.0, 6.0)  # 1 2 3 4 5


def one_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, SGD(model.parameters(), lr=1.0)


def mean_of(model, samples):
    return model(samples.unsqueeze(1)).mean()


def right(model, optimizer, micro_batches, loss=mean_of, **options):
    """The gradient of each window, from this library."""
    options = options or {"steps": len(micro_batches)}
    accumulator = Accumulator(model, optimizer, **options)
    gradients = []
    for window in accumulator.windows(micro_batches):
        for micro_batch in window:
            window.backward(loss(model, micro_batch))
        gradients.append(model.weight.grad.item())
        window.step()
    return gradients


def test_steps_as_a_float_are_refused():
    model, optimizer = one_weight()
    steps, updates = 100 / 30, 0
    for i, sample in enumerate(SAMPLES.split(1) * 4):
        (mean_of(model, sample) / steps).backward()
        if (i + 1) % steps == 0:  # 3.33 divides none of the 20
            updates += 1
    assert updates == 0
    with pytest.raises(TypeError, match="100 // 50"):
        Accumulator(model, optimizer, steps=100 / 50)


def test_tail_of_an_epoch_is_stepped():
    model, _ = one_weight()
    gradients = []
    for i, sample in enumerate(SAMPLES.split(1)):
        (mean_of(model, sample) / 2).backward()
        if (i + 1) % 2 == 0:
            gradients.append(model.weight.grad.item())
            model.zero_grad()
    assert gradients == [1.5, 3.5]  # sample 5 is lost, or leaks into the next epoch
    assert right(*one_weight(), SAMPLES.split(1), steps=2) == [1.5, 3.5, 5.0]


def test_tail_of_an_epoch_is_divided_by_its_own_length():
    model, _ = one_weight()
    gradients, last = [], 4
    for i, sample in enumerate(SAMPLES.split(1)):
        (mean_of(model, sample) / 2).backward()
        if (i + 1) % 2 == 0 or i == last:
            gradients.append(model.weight.grad.item())
            model.zero_grad()
    assert gradients == [1.5, 3.5, 2.5]
    assert right(*one_weight(), SAMPLES.split(1), steps=2) == [1.5, 3.5, 5.0]


def test_split_keeps_the_remainder_that_int_drops():
    model, _ = one_weight()
    k = 2
    size = int(len(SAMPLES) / k)
    for i in range(k):
        (mean_of(model, SAMPLES[i * size : (i + 1) * size]) / k).backward()
    assert model.weight.grad.item() == 2.5  # of 1 2 3 4
    model, optimizer = one_weight()
    window = Accumulator(model, optimizer, steps=k).split(SAMPLES)
    for part in window:
        window.backward(mean_of(model, part))
    assert model.weight.grad.item() == pytest.approx(3.0)


def test_uneven_parts_do_not_give_a_mean_of_means():
    model, _ = one_weight()
    parts = SAMPLES.split(2)  # 1 2, 3 4, 5
    for part in parts:
        (mean_of(model, part) / len(parts)).backward()
    assert model.weight.grad.item() == pytest.approx(10 / 3)
    assert right(*one_weight(), parts) == pytest.approx([3.0])


def test_window_sees_all_parts_where_a_loop_replays_one():
    model, _ = one_weight()
    batch = SAMPLES[:2]
    for _ in range(4):
        (mean_of(model, batch) / 4).backward()
    assert model.weight.grad.item() == 1.5  # the gradient of one part, at four times its cost
    assert right(*one_weight(), SAMPLES.split(2)) == pytest.approx([3.0])


def test_loss_of_inputs_instead_of_outputs_is_refused():
    model, optimizer = one_weight()
    inputs = torch.ones(2, 1, requires_grad=True)
    (nn.functional.mse_loss(inputs, torch.zeros(2, 1)) / 4).backward()
    assert model.weight.grad is None  # torch raises nothing
    accumulator = Accumulator(model, optimizer)
    window = accumulator.window([torch.ones(2, 1)])
    with pytest.raises(ValueError, match="from the model's outputs"):
        for batch in window:
            window.backward(nn.functional.mse_loss(batch, torch.zeros(2, 1)))


def tokens_of(model, batch):
    kept = batch["labels"] != -100
    return model(batch["x"].unsqueeze(-1)).squeeze(-1)[kept].mean()


def test_tokens_are_averaged_over_the_window():
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 0.0]])
    labels = torch.tensor([[0, 0, 0, 0], [0, -100, -100, -100]])
    micro_batches = [{"x": rows[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)]
    model, _ = one_weight()
    for micro_batch in micro_batches:
        (tokens_of(model, micro_batch) / 2).backward()
    assert model.weight.grad.item() == 3.75
    options = {"steps": 2, "count": count_tokens("labels")}
    assert right(*one_weight(), micro_batches, tokens_of, **options) == pytest.approx([3.0])


def forward_outside_no_sync():
    model, optimizer = one_weight()
    ddp = DistributedDataParallel(model)
    parts = SAMPLES[:4].split(1)
    for _ in range(2):  # DDP rebuilds its buckets in the first window
        with Counting() as wrong:
            for i, part in enumerate(parts):
                loss = mean_of(ddp, part) / len(parts)
                if i < len(parts) - 1:
                    with ddp.no_sync():  # too late: DDP decides in forward
                        loss.backward()
                else:
                    loss.backward()
        ddp.zero_grad()
    accumulator = Accumulator(ddp, optimizer, steps=len(parts))
    for window in accumulator.windows(parts):
        with Counting() as here:
            for part in window:
                window.backward(mean_of(ddp, part))
        window.step()
    return [sum(name == "allreduce_" for name, _ in count.collectives) for count in (wrong, here)]


def test_window_reduces_once_where_a_late_no_sync_does_not(ranks):
    assert ranks(2).run(forward_outside_no_sync) == [[4, 1]] * 2


def sum_of(model, samples):
    return model(samples.unsqueeze(1)).sum()


def world_size_forgotten():
    mine = SAMPLES[dist.get_rank() :: 2]  # 1 3 5 on rank 0, 2 4 on rank 1
    model, _ = one_weight()
    ddp = DistributedDataParallel(model)
    sum_of(ddp, mine).backward()
    wrong = model.weight.grad.item()
    model, optimizer = one_weight()
    ddp = DistributedDataParallel(model)
    accumulator = Accumulator(ddp, optimizer, steps=3, reduction="sum")
    for window in accumulator.windows(mine.split(1)):
        for part in window:
            window.backward(sum_of(ddp, part))
        return wrong, model.weight.grad.item()
    return None


def test_sum_is_not_divided_by_the_number_of_ranks(ranks):
    assert ranks(2).run(world_size_forgotten) == [(7.5, 15.0)] * 2


# Correct loops


def test_batch_of_100_in_halves_is_exact():
    model = nn.Linear(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.randn(100, 3), torch.randint(0, 2, (100,))
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), batch_size=100, micro_batch_size=50)
    window = accumulator.split((x, y))
    for inputs, labels in window:
        assert len(inputs) == 50
        window.backward(cross_entropy(model(inputs), labels))
    seen = model.weight.grad.clone()
    window.step()
    exact = nn.Linear(3, 2)
    exact.load_state_dict(before)
    cross_entropy(exact(x), y).backward()
    assert torch.allclose(seen, exact.weight.grad, rtol=1e-5)


def test_window_reads_no_value_on_the_host():
    model = nn.Linear(3, 2)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=4)
    for window in accumulator.windows([torch.randn(n, 3) for n in (1, 2, 3, 4)]):
        with Counting() as count:
            for inputs in window:
                window.backward(model(inputs).square().mean())
        assert not count.host_reads
        with Counting() as count:
            update = window.step()
        assert not count.host_reads, "the flag of on_nonfinite is on the host"
        with Counting() as count:
            assert update.loss > 0
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=4, on_nonfinite="ignore")
    for window in accumulator.windows([torch.randn(n, 3) for n in (1, 2, 3, 4)]):
        with Counting() as count:
            for inputs in window:
                window.backward(model(inputs).square().mean())
            window.step()
        assert not count.host_reads


def heads_of(window: Window, model: nn.Module, inputs: Tensor) -> None:
    for column, features in window.heads(model(inputs), (0, 1)):
        window.backward(features[:, column].square().mean())


def parts_of(window: Window, model: nn.Module, inputs: Tensor) -> None:
    for column in window.parts((0, 1)):
        window.backward(model(inputs)[:, column].square().mean())


def names_of(window: Window, model: nn.Module, inputs: Tensor) -> None:
    outputs = model(inputs)
    window.backward(squares=outputs.square().mean(), sums=outputs.sum())


def one_of(window: Window, model: nn.Module, inputs: Tensor) -> None:
    window.backward(model(inputs).square().mean())


def on_meta(run: Callable[[Window, nn.Module, Tensor], None], options: dict[str, Any]) -> list[Update]:
    """Updates on a device whose tensors have no values: who reads one, or copies it to the host, raises."""
    model = nn.Sequential(nn.Linear(3, 2, device="meta"), nn.BatchNorm1d(2, device="meta"))
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1, momentum=0.9), steps=2, **options)
    updates = []
    for window in accumulator.windows([torch.randn(n, 3, device="meta") for n in (5, 2, 3, 4, 2)]):
        for inputs in window:
            run(window, model, inputs)
        updates.append(window.step())
    return updates


@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(one_of, {}, id="plain"),
        pytest.param(one_of, {"max_norm": 1.0}, id="max_norm"),
        pytest.param(one_of, {"extensions": [NoiseScale()]}, id="noise"),
        pytest.param(one_of, {"extensions": [WideSums(torch.float64)]}, id="wide"),
        pytest.param(parts_of, {}, id="parts"),
        pytest.param(heads_of, {}, id="heads"),
        pytest.param(names_of, {"reduction": {"squares": "mean", "sums": "sum_to_mean"}}, id="names"),
    ],
)
def test_window_on_a_device_without_values_waits_for_none(run, options):
    if run is names_of:
        options = {**options, "count": dict.fromkeys(options["reduction"], count_samples)}
    assert len(on_meta(run, {"batchnorm": "ignore", **options, "on_nonfinite": "ignore"})) == 3


def test_window_on_a_device_without_values_is_stopped_where_it_reads():
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        on_meta(one_of, {"on_nonfinite": "raise", "batchnorm": "ignore"})  # which reads a norm once per update


def test_counting_sees_host_reads():
    with Counting() as count:
        torch.ones(()).item()
        bool(torch.ones(()))
    assert sum(count.host_reads.values()) == 2
