"""update(): runs a window for the caller; if it fails, undoes it on all ranks, and runs it again if that may help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..batch import Batch, Columns, count_samples
from ..batches import DrawFn, cut_up
from ..engines import Engine
from ..extension import Extension, hooks_of
from ..guard import NonfiniteError, Stage
from ..law import DistaccumError, LostRanksError, all_or_none
from ..planning import Planner
from ..state.randomness import random_devices, random_state, set_random_state
from ..text import in_short, ranks_where
from ..update import Update
from ..window import LOOP, RunMode, Window
from .memory import fit_of, free, is_out_of_memory, measure

# Without the accumulator's reductions and counts.
SUM_OF_SAMPLES = RunMode(counts={"samples": count_samples}, reductions={"samples": "sum"})
LossFn = Callable[[Batch], Tensor | Mapping[str, Tensor]]


class Snapshot:
    """The models' current buffers and random numbers, to be restored."""

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module]) -> None:
        # All buffers, since batch normalisation updates its statistics without a change of their version.
        modules = {id(module): module for model in models for module in model.modules()}.values()
        own = [(module, module.named_buffers(recurse=False, remove_duplicate=False)) for module in modules]
        # Copies that are made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            self._buffers = [(module, name, b, b.clone()) for module, buffers in own for name, b in buffers]
        self.random = random_state(random_devices(models))

    def restore(self) -> None:
        self.restore_buffers()
        set_random_state(self.random)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for module, name, buffer, copy in self._buffers:
            is_strided = buffer.layout is torch.strided
            steps = zip(buffer.stride(), buffer.shape, strict=True) if is_strided else ()
            # Torch refuses to write to a buffer that was expanded.
            if not any(step == 0 and num > 1 for step, num in steps):
                buffer.copy_(copy)
            # The model may have replaced or deleted it.
            if getattr(module, name, None) is not buffer:
                (setattr if hasattr(module, name) else nn.Module.register_buffer)(module, name, buffer)


class FailedElsewhere(Exception):  # noqa: N818
    """Another rank failed, as a vote said; it never leaves this library."""


def is_out_of_reach(engine: Engine, window: Window) -> bool:
    """True if other ranks wait for this one in each forward or backward of a window, where no vote can reach them."""
    gathers = engine.sync == "gathered" or (window.plan.reduce_afterwards and "gathered" in engine.policies)
    return (engine.peers.num_ranks > 1 and engine.lockstep and not gathers) or bool(engine.peers.beside)


@final
class Agreement(Extension):
    """Makes ranks agree that none has failed before any of them reduces, where they can hear of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # True in a backward that other ranks take part in.
        self.is_reducing = False

    def before_backward(self, window: Window, reduces: bool) -> None:
        if reduces and not is_out_of_reach(self._engine, window):
            self.agree()
            self.is_reducing = True

    def after_backward(self, window: Window) -> None:
        self.is_reducing = False

    def finishing(self, window: Window) -> None:
        self.before_backward(window, not self._engine.will_reduce(True))

    def agree(self, failed: bool = False) -> None:
        """Waits for the votes of all ranks; raises if another one than this has failed."""
        if any(self._engine.peers.largest([failed], everyone=True)) and not failed:
            raise FailedElsewhere


def run_all(window: Window, loss_fn: LossFn) -> None:
    for micro_batch in window:
        loss = loss_fn(micro_batch)
        if isinstance(loss, Mapping):
            window.backward(**loss)
        else:
            window.backward(loss)


def refuse_closure(engine: Engine, call: str) -> None:
    """Raises if `call`, which takes a function of the caller, cannot run it."""
    if engine.peers.stages:
        raise DistaccumError(
            f"{call}() takes a function that returns a loss, and a pipeline's schedule runs forward and backward "
            "itself; write the loop: for inputs, labels in window: window.run(inputs, target=labels)"
        )
    # Only update() can do without whole samples.
    if call != "update" and engine.peers.has_parts:
        raise DistaccumError(
            f"{call}() with a mesh whose ranks have parts of the same samples, which no rank has whole; call it "
            "on a model whose ranks have samples of their own"
        )


def update(planner: Planner, batch: Any, loss_fn: LossFn, columns: Columns) -> Update:
    job = planner.job
    refuse_closure(job.engine, "update")
    return retry(planner, job.extensions, cut_up(batch, job, columns), LOOP, lambda window, _: run_all(window, loss_fn))


def retry(
    planner: Planner,
    extensions: Sequence[Extension],
    draw: DrawFn,
    mode: RunMode,
    run: Callable[[Window, Agreement], None],
) -> Update:
    """Runs a window and steps it; if it runs out of memory, tries again with smaller micro-batches."""
    planner.close_previous()
    job = planner.job
    # They are put back now, so that a second attempt has the same numbers.
    job.random.put_back()
    snapshot = Snapshot(job.models)
    while True:
        agreement = Agreement(job.engine)
        hooks = hooks_of([agreement, job.random, *extensions])
        window = planner.plan(draw, replace(mode, hooks=hooks, agrees=True, measure=partial(measure, job)))
        has_run = False
        try:
            run(window, agreement)
            has_run = True
            update = window.step()
        except BaseException as error:
            window.discard()
            # After a step the weights have moved.
            if window.stage is not Stage.STEPPED:
                snapshot.restore()
            # A step raises on all ranks alike, or where no other rank waits for this one.
            if has_run or not isinstance(error, Exception) or isinstance(error, NonfiniteError | LostRanksError):
                raise
            _settle(planner, window, agreement, error)
        else:
            fit_of(job).succeeded(*window.plan.measured, parts=window.plan.most)
            return update
        free()


def _settle(planner: Planner, window: Window, agreement: Agreement, error: Exception) -> None:
    """Exchanges failures between the ranks; returns if a smaller micro-batch may fit, and raises otherwise."""
    peers = planner.job.engine.peers
    largest, _ = window.plan.measured
    is_own = not isinstance(error, FailedElsewhere)
    is_fault = is_own and not is_out_of_memory(error)
    told = in_short(error) if is_own else ""
    try:
        if is_fault:
            # The others are out of reach in the reduction, or have failed in the same way.
            if agreement.is_reducing and peers.num_ranks > 1:
                raise error
            peers.tell(error)
        if is_out_of_reach(planner.job.engine, window):
            raise DistaccumError(
                f"rank {peers.rank} failed where the other ranks cannot hear of it before the group's timeout, since "
                f"they wait for it in a collective of the model's wrapper ({told}); start all ranks again, from a "
                "checkpoint"
            ) from error
        if is_own:
            agreement.agree(failed=True)
        texts, faults = zip(*peers.gather_objects((told, is_fault), everyone=True), strict=True)
        # Where one has a fault, ranks short of memory are told of too: they may have kept the others waiting.
        all_or_none(
            texts if any(faults) else (),
            error if is_fault else None,
            f"rank {{ranks}} failed in update {window.index} ({{why}}); the window is undone on all ranks, and nothing "
            "was stepped",
        )
        if not fit_of(planner.job).ran_out(largest):
            seen = f": {told}" if told else ""
            raise DistaccumError(
                f"a micro-batch of {largest} sample does not fit into the memory of rank {ranks_where(texts)}{seen}; "
                "nothing was stepped. Use a smaller model or sample, activation checkpointing, or a lower precision"
            )
    finally:
        # The error's traceback would keep this frame and the failed forward alive.
        del error
