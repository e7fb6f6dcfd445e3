"""Several backwards in one micro-batch: one for each part, or for each head over a common trunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from .batch import map_tensors
from .guard import WAITING, refuse_missing_backward
from .job import Job
from .law import DistaccumError

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")


def each_part(window: Any, items: Iterable[Item], call: str = "parts()", name: str = "a part") -> Iterator[Item]:
    """Yields `items`, drawing one ahead, so that the last one is known before its backward."""
    if window.has_more_parts:
        raise DistaccumError(
            f"{call} {window.where()} inside parts() or heads(), which give each backward a part of its own; go "
            "through one list of all parts"
        )
    if window.turn != WAITING:
        raise DistaccumError(f"{call} {window.where()}, expected it in a micro-batch that had no backward yet")
    sequence = iter(items)
    nothing = object()
    item: Any = next(sequence, nothing)
    if item is nothing:
        raise ValueError("parts() got nothing, expected an item for each backward")
    while item is not nothing:
        following: Any = next(sequence, nothing)
        window.has_more_parts = following is not nothing
        window.turn = WAITING
        yield item
        refuse_missing_backward(window, name)
        item = following


def each_head(
    window: Any, job: Job, start: Callable[[], bool], run: Callable[..., Any], outputs: Outputs, items: Iterable[Item]
) -> Iterator[tuple[Item, Outputs]]:
    """Yields each item with `outputs` detached from their trunk, whose backward comes last, by `start` and `run`."""
    engine = job.engine
    if not engine.owns.isdisjoint(("step", "parameters")):
        raise DistaccumError(f"heads() with {engine.name}, whose backward follows no other; use window.parts(heads)")
    # Pairs of the trunk's output and the copy that heads get.
    cut: list[tuple[Tensor, Tensor]] = []

    def cut_off(output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        cut.append((output, output.detach().requires_grad_()))
        return cut[-1][1]

    given = map_tensors(outputs, cut_off)
    heads = list(items)
    if not cut:
        raise ValueError(
            "heads() got outputs without a graph, expected a trunk's, outside torch.no_grad; where the trunk is "
            "frozen, go through window.parts(heads)"
        )
    if not heads:
        raise ValueError("heads() got no items, expected one for each backward")
    # The last part is the trunk's.
    parts: list[Any] = [*((head, given) for head in heads), None]
    for part in each_part(window, parts, "heads()", "a head"):
        if part is not None:
            yield part
            continue
        reached = [(output, leaf.grad) for output, leaf in cut if leaf.grad is not None]
        # Where a count is 0, its loss was left out.
        if not reached and all(window.counts_here):
            raise DistaccumError("no loss of heads() depends on the trunk's outputs; compute them from what it yields")
        losses = [output for output, _ in reached]
        seeds = [gradient for _, gradient in reached]
        may_reduce = start()
        # An adapter's backward scales them again.
        if job.scaler is not None and not job.scales_seeds:
            seeds = [seed / job.scaler.scale(seed.new_ones((), dtype=torch.float32)) for seed in seeds]
        if engine.will_reduce(may_reduce):
            losses, seeds = map(list, engine.with_earlier(losses, seeds))
        run(may_reduce, engine.backward, losses, seeds, may_reduce)
