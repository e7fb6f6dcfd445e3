"""What a window refuses, in words."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..law import DistaccumError
from .status import DONE, FAILED, WAITING, Stage, Status


def refuse_backward(status: Status) -> NoReturn:
    """Nothing waits for one."""
    if status.stage is not Stage.RUNNING:
        raise DistaccumError(
            f"backward() on a window that is {status.describe()}; call it in the loop over its micro-batches"
        )
    if status.turn is FAILED:
        raise DistaccumError(
            f"backward() after one that failed {status.where()}: gradients are half added up; leave the loop, "
            "which discards the window, and go on with the next"
        )
    raise DistaccumError(
        f"a second backward() {status.where()}, which would count its samples twice; add the losses up, or go "
        "through window.parts(items), which gives each item a backward of its own"
    )


def end_micro_batch(status: Status) -> None:
    """Raises where the micro-batch at work lacks a backward, a part or a named loss."""
    if status.stage is Stage.LEFT:
        raise DistaccumError(f"this window is {status.describe()}")
    if status.has_more_parts:
        raise DistaccumError("parts() or heads() was left before its last item; go through all of them")
    if status.turn is not DONE:
        raise DistaccumError(without_backward("a micro-batch", status))
    if missing := status.ledger.missing(status.source.counts_here):
        raise DistaccumError(
            f"micro-batch {status.source.place} got no loss for {missing}, although its count is above 0; give each "
            "name its loss, or let count give 0 where there is none"
        )


def without_backward(what: str, status: Status) -> str:
    return (
        f"{what} without window.backward(loss) ({status.where()}); call it for each one (to leave a micro-batch "
        "out, let count give 0 for it)"
    )


def refuse_nesting(what: str, status: Status) -> None:
    """parts() or heads() inside one of them, or after a backward."""
    if status.has_more_parts:
        raise DistaccumError(
            f"{what} {status.where()} inside parts() or heads(), which give each backward a part of its own; "
            "go through one list of all parts"
        )
    if status.turn is not WAITING:
        raise DistaccumError(f"{what} {status.where()}, expected it in a micro-batch that had no backward yet")


def refuse_inference_mode() -> None:
    """What is made in it (a scale, DDP's buckets) could not be written to outside of it."""
    if torch.is_inference_mode_enabled():
        raise DistaccumError("a window inside torch.inference_mode(), where nothing is trained; leave that mode first")
