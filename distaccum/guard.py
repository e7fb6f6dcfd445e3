"""Guards: refuse what a loop may not do in a window, and find the origin of NaN and infinity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .batch import count_samples, entries_of, is_array
from .engines.base import OVERFLOW, Engine, total_norm
from .job import Job
from .law import DistaccumError
from .losses import Record
from .norms import local, names_of
from .options import OnNonfinite
from .text import Once, shorten, warn

TAMPERED = "gradients were cleared or changed in mid-window (by zero_grad, clipping, unscale_ or another backward)"


class Stage(Enum):
    """The stage of a window, in words."""

    PLANNED = "not begun"
    RUNNING = "in its loop"
    COMPLETE = "complete but not stepped"
    STEPPING = "being stepped"
    STEPPED = "stepped already"
    LEFT = "discarded (its loop was left, or another window was requested)"


OVER = Stage.STEPPED, Stage.LEFT
# The state of the backward of the current micro-batch, or of a part of it.
DONE, WAITING, FAILED = range(3)


def refuse_backward(window: Any) -> NoReturn:
    """Raises, because no micro-batch is waiting for a backward."""
    if window.stage is not Stage.RUNNING:
        raise DistaccumError(
            f"backward() on a window that is {window.describe()}; call it in the loop over its micro-batches"
        )
    if window.turn == FAILED:
        raise DistaccumError(
            f"backward() after one that failed {window.where()}: gradients are half added up; leave the loop, "
            "which discards the window, and go on with the next"
        )
    raise DistaccumError(
        f"a second backward() {window.where()}, which would count its samples twice; add the losses up, or go "
        "through window.parts(items), which gives each item a backward of its own"
    )


def refuse_freed_graph(window: Any, error: RuntimeError) -> None:
    """Raises if a backward failed because an earlier one had freed its graph."""
    if "backward through the graph a second time" in str(error):
        raise DistaccumError(
            f"two backwards {window.where()} went through the same graph, which the first one frees; use "
            "window.heads(outputs, items), whose trunk's backward runs once, or add the losses up"
        ) from error


def give_up(window: Any, what: str) -> NoReturn:
    """Discards the window, and says why."""
    window.discard()
    raise DistaccumError(
        f"{what}, so the window's gradient is lost and the window is discarded; leave gradients alone in the loop, "
        "and their clearing to window.step()"
    )


def refuse_unfinished(window: Any) -> None:
    """Raises if the current micro-batch lacks a backward, a part or a named loss."""
    if window.stage is Stage.LEFT:
        raise DistaccumError(f"this window is {window.describe()}")
    if window.has_more_parts:
        raise DistaccumError("parts() or heads() was left before its last item; go through all of them")
    refuse_missing_backward(window, "a micro-batch")
    if missing := window.losses.missing(window.counts_here):
        raise DistaccumError(
            f"micro-batch {window.micro_step} got no loss for {missing}, although its count is above 0; give each "
            "name its loss, or let count give 0 where there is none"
        )


def refuse_missing_backward(window: Any, what: str) -> None:
    """Raises if the current micro-batch or part, named `what`, had no backward."""
    if window.turn != DONE:
        is_first = window.micro_step == 0
        inner = "; windows() yields windows, so loop over each: for window in windows: for x, y in window" * is_first
        raise DistaccumError(
            f"{what} without window.backward(loss) ({window.where()}); call it for each one (to leave a micro-batch "
            f"out, let count give 0 for it){inner}"
        )


def clear_stale(engine: Engine, parameters: Sequence[nn.Parameter], once: Once) -> None:
    """Clears gradients left from before a window, with a warning."""
    # No warning about zeros: of zero_grad(set_to_none=False), or in bucket views that another Accumulator cleared.
    # An engine may hide gradients too.
    shown = [local(p.grad) for p in parameters if p.grad is not None]
    if engine.stale(()) or total_norm(shown) != 0:
        once("stale", "gradients that stood before the window were cleared: they are not part of it")
    engine.clear(parameters)


def tell_count(micro_batches: Sequence[Any], once: Once) -> None:
    """Warns if the first micro-batch of all looks like one sample, whose first dimension would be counted."""
    if not micro_batches:
        return
    once.keys.add("count")
    entries = entries_of(micro_batches[0])
    names = [name for name, value in entries.items() if is_array(value) and not len(value.shape)]
    if names:
        length = count_samples(micro_batches[0])
        warn(
            f"entry {names[0]!r} of a micro-batch has no dimension, and the others count as "
            f"{length} samples, the length of their first one; if each micro-batch is one "
            "sample, pass count=lambda batch: 1 to the Accumulator, and otherwise a count= that says how many it has"
        )


def refuse_untrained(window: Any, job: Job) -> None:
    """Raises if an optimizer has nothing to step, or if a parameter was replaced since the Accumulator was made."""
    engine = job.engine
    if "step" in engine.owns or engine.peers.stages:
        return
    known = window.parameters if job.optimizers or not (engine.peers.groups or engine.peers.beside) else job.groups[0]
    groups = job.groups if job.optimizers else [known]
    # Where a parameter is cut, this rank's part may be empty, and has no gradient.
    idle = [all(p.grad is None and p.numel() for p in group) for group in groups]
    ids = {*map(id, known)}
    names = names_of(engine.models)
    trained = [(names.get(id(p), "?"), p) for p in engine.parameters() if p.requires_grad]
    new = [name for name, p in trained if id(p) not in ids]
    # A loss that counts nothing in this window may be the only one of an optimizer.
    if not new and not (all(idle) or (any(idle) and all(window.counts.values()))):
        # With an idle optimizer the next window is looked at too.
        if not any(idle):
            job.unused = {id(p) for group in job.groups for p in group if p.grad is None}
        return
    which = idle.index(True) if any(idle) else 0
    owner = f"the {type(job.optimizers[which]).__name__}" if job.optimizers else "the model"
    others = new or [name for name, p in trained if p.grad is not None]
    cause = "no loss depends on them, or a hook clears them or steps in backward; leave that to window.step()"
    if others:
        cause = (
            f"the model trains others ({shorten(others)}); make the optimizer, and then the Accumulator, when the "
            "model is complete (after get_peft_model, load_state_dict(assign=True), a new layer, or freezing)"
        )
    elif not any(p.requires_grad for p in groups[which]):
        cause = "they are frozen; give the optimizer the parameters that are trained"
    what = f"no parameter of {owner} got a gradient" if any(idle) else f"some parameters of {owner} got no gradient"
    window.discard()
    raise DistaccumError(f"{what} in a window of {window.counts}, and nothing was stepped: {cause}")


class NonfiniteError(DistaccumError):
    """A non-finite gradient or loss: the window was given up, and nothing was stepped."""


def judge(window: Any, engine: Engine, what: str, on_nonfinite: OnNonfinite) -> str:
    """Finds why `what` is not finite, reading every gradient; raises on all ranks, or returns it as a skip's reason."""
    names = names_of(engine.models)
    named = [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(window.parameters)]
    own = (
        window.losses.first_nonfinite() or (-1, 0.0),
        [name for name, p in named if p.grad is not None and not _is_finite(p.grad)],
        [name for name, p in named if not _is_finite(p)],
    )
    places, *seen = zip(*engine.peers.gather_objects(own, everyone=True), strict=True)
    gradients, weights = (list(dict.fromkeys(itertools.chain(*of_ranks))) for of_ranks in seen)
    cure = "Look for it in the data or lower the learning rate"
    if weights:  # nothing has stepped since the first backward, so they were not finite before it
        message = (
            f"before its first backward there were weights that are not finite already, first in {shorten(weights)}"
        )
        cure = "Go back to a checkpoint, or look at how they were initialised or loaded"
    else:
        squares = "" if gradients else ", or as the squares of its elements were added up"
        message = _origin(engine, places, squares) + (f"; first in {shorten(gradients)}" if gradients else "")
    if on_nonfinite != "raise":
        return f"a {what} is not finite ({message})"
    raise NonfiniteError(
        f"the {what} of this window is not finite ({message}), on all ranks alike; nothing was stepped and the "
        f"window is discarded. {cure}; on_nonfinite='skip' skips such updates"
    )


def _origin(engine: Engine, first: Sequence[tuple[int, float]], squares: str) -> str:
    """Names its origin; `first`: each rank's first micro-batch with a non-finite loss (-1: none), and that loss."""
    # Ranks that share samples may hold different stages of a pipeline, and only one of them the losses.
    by_rank = enumerate(map(max, engine.peers.by_samples(first)))
    places = [f"the loss of micro-batch {n} on rank {rank} is {value}" for rank, (n, value) in by_rank if n >= 0]
    return "; ".join(places) or f"every loss is finite, so it came up in a backward or in the reduction{squares}"


def explain_skip(window: Any, engine: Engine, record: Record, reason: str, on_nonfinite: OnNonfinite) -> str:
    """Finds why a gradient was skipped; raises on all ranks, or returns the reason in full."""
    if reason is not OVERFLOW:
        return judge(window, engine, "gradient", on_nonfinite)
    # If a loss was not finite even before it was scaled, no smaller scale would avoid that overflow.
    if on_nonfinite == "raise" and not all(map(math.isfinite, record.losses())):
        judge(window, engine, "loss", "raise")
    return reason


def _is_finite(tensor: Tensor) -> bool:
    here = local(tensor.detach())
    return bool(torch.isfinite(here.coalesce().values() if here.is_sparse else here).all())
