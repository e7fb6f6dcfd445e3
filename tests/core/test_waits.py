"""No window waits for a device: nothing reads a tensor on the host inside of it, and one flag at its edge."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum import Accumulator, Update, Window, count_samples
from distaccum.extensions import NoiseScale, WideSums
from tests.support.counting import Counting
from tests.support.windows import accumulating, loss_of


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
    window.backward(loss_of(model, inputs))


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


WAYS = [
    pytest.param(one_of, {}, id="plain"),
    pytest.param(one_of, {"max_norm": 1.0}, id="max_norm"),
    pytest.param(one_of, {"extensions": [NoiseScale()]}, id="noise"),
    pytest.param(one_of, {"extensions": [WideSums(torch.float64)]}, id="wide"),
    pytest.param(parts_of, {}, id="parts"),
    pytest.param(heads_of, {}, id="heads"),
    pytest.param(names_of, {"reduction": {"squares": "mean", "sums": "sum_to_mean"}}, id="names"),
]


@pytest.mark.parametrize(("run", "options"), WAYS)
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


class Operations(TorchDispatchMode):
    """Counts operations, each of which launches a kernel on a device, or makes a view."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def operations_of(num: int, *, by_hand: bool) -> int:
    model, accumulator = accumulating(nn.Linear(3, 2, device="meta"), 0.1, steps=num, on_nonfinite="ignore")
    micro_batches = [torch.randn(2, 3, device="meta") for _ in range(num)]
    window = accumulator.window(micro_batches)
    with Operations() as count:
        for inputs in micro_batches if by_hand else window:
            loss = loss_of(model, inputs)
            (loss / num).backward() if by_hand else window.backward(loss)
        if not by_hand:
            window.step()
    return count.num


def test_micro_step_on_a_device_launches_no_more_kernels_than_one_that_divides_by_hand():
    ours, hand = (operations_of(8, by_hand=kind) - operations_of(4, by_hand=kind) for kind in (False, True))
    assert ours <= hand
