"""Several backwards in one micro-batch: a part each, or a head each over one trunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..cutting import rebuilt
from ..law import DistaccumError
from .refusals import refuse_nesting, without_backward
from .status import DONE, WAITING, Status

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")


def each_part(status: Status, items: Iterable[Item]) -> Iterator[Item]:
    """Yields `items`, one drawn ahead: the last one is known before its backward."""
    refuse_nesting("parts()", status)
    sequence = iter(items)
    try:
        item = next(sequence)
    except StopIteration:
        raise ValueError("parts() got nothing, expected an item for each backward") from None
    status.has_more_parts = True
    while status.has_more_parts:
        try:
            following = next(sequence)
        except StopIteration:
            status.has_more_parts = False
        status.turn = WAITING
        yield item
        if status.turn is not DONE:
            raise DistaccumError(without_backward("a part", status))
        if status.has_more_parts:
            item = following


def each_head(
    status: Status,
    outputs: Outputs,
    items: Iterable[Item],
    run_trunk: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> Iterator[tuple[Item, Outputs]]:
    """Yields each item with `outputs` cut off from the trunk; then `run_trunk` gets these and their gradients."""
    refuse_nesting("heads()", status)
    cut: list[tuple[Tensor, Tensor]] = []  # what the trunk gave, and what heads are given
    given = _cut_off(outputs, cut)
    if not cut:
        raise ValueError(
            "heads() got outputs without a graph, expected a trunk's, outside torch.no_grad; where the trunk is "
            "frozen, go through window.parts(heads)"
        )
    status.has_more_parts = True
    for item in items:
        status.turn = WAITING
        yield item, given
        if status.turn is not DONE:
            raise DistaccumError(without_backward("a head", status))
    status.has_more_parts = False
    if status.turn is not DONE:
        raise ValueError("heads() got no items, expected one for each backward")
    reached = [(output, leaf.grad) for output, leaf in cut if leaf.grad is not None]
    run_trunk([output for output, _ in reached], [gradient for _, gradient in reached])


def _cut_off(outputs: Any, cut: list[tuple[Tensor, Tensor]]) -> Any:
    """The same without their graphs; what had one is noted in `cut`."""
    if isinstance(outputs, Tensor):
        if not outputs.requires_grad:
            return outputs
        cut.append((outputs, outputs.detach().requires_grad_()))
        return cut[-1][1]
    return rebuilt(outputs, lambda child, _: _cut_off(child, cut))
