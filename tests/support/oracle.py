"""Compares windows on this rank with one big batch in one process."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.problems import Batch, Choosing, join, make_net_without_router, micro_batches_of
from tests.support.windows import backward, error, gradient, gradient_of, loss_of, run_window, set_weights, weights

Layout = Sequence[Sequence[int]]  # the sizes of a window's micro-batches by rank


def own(layout: Layout, index: int = 0, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """This rank's micro-batches."""
    return micro_batches_of(layout, index, dist.get_rank(), dtype)


def everything(layout: Layout, index: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """The micro-batches of all ranks in one batch, in float64."""
    whole = join([batch for rank in range(len(layout)) for batch in micro_batches_of(layout, index, rank, dtype)])
    return {**whole, "x": whole["x"].double()}


def gradients_off(
    model: nn.Module,
    accumulator: Any,
    layouts: Iterable[Layout],
    make: Callable[[], nn.Module] = make_net_without_router,
    loss_fn: Callable[..., Tensor] = loss_of,
) -> list[float]:
    """The error of the gradient of each window; the optimizer's rate is 0, `make` makes the same net."""
    found = []
    for index, layout in enumerate(layouts):
        window = run_window(accumulator.window(own(layout, index)), model, loss_fn)
        found.append(error(gradient(model), gradient_of(make(), everything(layout, index), loss_fn)))
        window.step()
    return found


def choices(uses: Sequence[Sequence[str]]) -> list[list[tuple[Batch, str]]]:
    """The micro-batches of all ranks, each with the layers of a `Choosing` that it uses."""
    layout = [[2] * len(of_rank) for of_rank in uses]
    return [list(zip(micro_batches_of(layout, 0, rank), used, strict=True)) for rank, used in enumerate(uses)]


def loss_of_choice(model: nn.Module, item: tuple[Batch, str]) -> Tensor:
    batch, used = item
    return model(batch["x"], used).square().mean()


def choices_off(model: nn.Module, accumulator: Any, uses: Sequence[Sequence[str]]) -> float:
    """The error of the gradient of a `Choosing` in a window; infinity where other parameters have none."""
    drawn, plain = choices(uses), Choosing()
    set_weights(plain, weights(model))
    window = run_window(accumulator.window(drawn[dist.get_rank()]), model, loss_of_choice)
    everyone = [item for of_rank in drawn for item in of_rank]
    sum(loss_of_choice(plain, item) / len(everyone) for item in everyone).backward()
    lacks = [[parameter.grad is None for parameter in net.parameters()] for net in (model, plain)]
    wrong = error(gradient(model), gradient(plain))
    window.step()
    return wrong if lacks[0] == lacks[1] else math.inf


class Off(NamedTuple):
    """The relative errors of a window."""

    step: float  # of the change of the weights
    norm: float  # before clipping; 0: none was taken
    loss: float


def step_off(
    model: nn.Module,
    window: Any,
    plain: nn.Module,
    whole: Any,
    loss_fn: Callable[..., Any] = loss_of,
    run: Callable[[Any], object] | None = None,
    clip: float = math.inf,
    read: Callable[[nn.Module], Tensor] = weights,
    lr: float = 1.0,
    between: Callable[[], object] = lambda: None,
) -> Off:
    """How far the window is off, with SGD of the rate `lr`.

    `plain` has the loss `loss_fn(plain, whole)`, or the sum of named ones, on the big batch; `run` runs a micro-batch
    with another. `read` reads all weights. `between` is called between the loop and step().
    """
    before = read(model).double()
    for batch in window:
        run(batch) if run is not None else backward(window, loss_fn(model, batch))
    between()
    update = window.step()
    set_weights(plain, before)
    plain.zero_grad()
    losses = loss_fn(plain, whole)
    loss = sum(losses.values()) if isinstance(losses, dict) else losses
    loss.backward()
    norm = float(gradient(plain).norm())
    exact = gradient(plain) * min(1.0, clip / (norm + 1e-6))
    of_norm = 0.0 if update.grad_norm is None and clip == math.inf else abs(update.grad_norm - norm) / norm
    moved = (before - read(model).double()) / lr
    return Off(error(moved, exact), of_norm, abs(update.loss - loss.item()) / abs(loss.item()))


def by_big_batches(
    model: nn.Module, batches: Iterable[Any], loss_fn: Callable[..., Tensor], optimizer: Any, schedule: Any, clip: float
) -> Iterator[tuple[Tensor, float, float, float]]:
    """Updates by one call each: the weights after it, its loss, norm and rate. A mean over nothing makes none."""
    for batch in batches:
        loss, norm, rate = loss_fn(model, batch), torch.zeros(()), schedule.get_last_lr()[0]
        if loss.isfinite():
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield weights(model), loss.item(), norm.item(), rate
