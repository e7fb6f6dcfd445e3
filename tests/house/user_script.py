"""A user's script, as type checkers see it: mypy and test_types.py check it, and nothing runs it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import assert_type

from distaccum import Accumulator, Extension, Update, Window

Pair = tuple[Tensor, Tensor]


class Log(Extension):
    def end(self, window: Window, update: Update | None) -> None: ...


def loader() -> Iterator[Pair]:
    yield torch.zeros(2, 3), torch.zeros(2)


model = torch.nn.Linear(3, 1)
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, extensions=[Log()])
for window in accumulator.windows(loader()):
    assert_type(window, Window[Pair])
    for inputs, targets in window:
        assert_type(inputs, Tensor)
        window.backward((model(inputs)[:, 0] - targets).square().mean())
    update = window.step()
    assert_type(update.loss, float)


def loss_fn(batch: Pair) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


assert_type(accumulator.update((torch.zeros(2, 3), torch.zeros(2)), loss_fn), Update)
assert_type(accumulator.split({"x": torch.zeros(2, 3)}), Window[dict[str, Tensor]])
assert_type(accumulator.window([torch.zeros(2, 3)]), Window[Tensor])
