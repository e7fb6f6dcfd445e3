"""Accumulator: options in, windows out. Each method hands on; an update is planner.py, window.py, commit.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .accumulating.commit import Committer
from .accumulating.config import BatchNorm, Config, OnNonfinite, by_name
from .accumulating.drawing import Batches, cut_up
from .accumulating.nonfinite import LookAtEnd
from .accumulating.planner import Planner
from .accumulating.progress import Progress
from .accumulating.setup import Setup
from .engines import Sync
from .law.batches import Count, count_samples
from .law.errors import DistaccumError
from .law.shares import Reduction, Schedule
from .law.update import Update
from .observers.noise import Noise
from .observers.statistics import Pool
from .observers.trace import Trace
from .runs.check.measure import check
from .runs.check.report import Report
from .runs.contrast import Encode, contrast
from .runs.update import LossFn, update
from .window.observer import Observer
from .window.window import Window


@final
class Accumulator:
    """Cuts updates into windows of micro-batches; each window's gradient is that of the one big batch.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    >>> loader = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(1, 4)]
    >>> for window in accumulator.windows(loader):
    ...     for inputs in window:
    ...         window.backward(model(inputs).square().mean())
    ...     update = window.step()
    ...     print(update.index, update.counts)
    0 {'samples': 6}
    1 {'samples': 1}

    `model` is a module, plain or with wrappers of one kind in it (DDP, fully_shard, FSDP1), or a sequence of them
    trained together, or a DeepSpeed engine; `optimizer` is one, several, or None where the caller or the engine
    steps; `accelerator` is the Accelerator that prepared them. Either `steps` micro-batches per rank and
    update, or `batch_size` samples over all ranks of which one forward holds `micro_batch_size`; `steps` and
    `batch_size` may be callables of the update's index. `max_norm=inf` measures the norm and clips nothing.
    `accumulate_dtype=torch.float32` adds gradients of bfloat16 and float16 parameters up in float32 and rounds them
    once, before DDP reduces them in their own dtype.
    `lookahead=False` draws a window of `windows(loader)` while it runs, one micro-batch ahead; its count is then known
    at its end, and the gradient is corrected there.
    `measure_noise=True` gives each update the gradient noise scale, smoothed, in the unit of its count.
    `trace` is a folder in which each rank writes when it did what; `distaccum timeline` draws it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        steps: Schedule | None = None,
        batch_size: Schedule | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
        count: Count | Mapping[str, Count] = count_samples,
        max_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        accelerator: Any = None,
        sync: Sync = "last",
        accumulate_dtype: torch.dtype | None = None,
        on_nonfinite: OnNonfinite = "raise",
        batchnorm: BatchNorm = "warn",
        lookahead: bool = True,
        measure_noise: bool = False,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        reductions, counts = by_name(reduction, count)
        config = Config(
            steps=steps,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            reductions=reductions,
            counts=counts,
            max_norm=max_norm,
            sync=sync,
            accumulate_dtype=accumulate_dtype,
            on_nonfinite=on_nonfinite,
            batchnorm=batchnorm,
            lookahead=lookahead,
            measure_noise=measure_noise,
            trace=trace,
        )
        self._config = config
        self._setup = setup = Setup(config, model, optimizer, scheduler, scaler, accelerator)
        self._noise: Noise | None = None
        if measure_noise:
            self._noise = Noise(
                setup.engine, reductions, counts, setup.stepped, setup.scaler, setup.once, steps=setup.steps
            )
        self._progress = Progress(config, setup)
        committer = Committer(config, setup, self._progress, self._noise)
        self._planner = Planner(config, setup, self._progress, committer, self._observers())
        setup.accelerated.refuse_to_save_one_part(self._own_parts)
        if too_long := setup.accelerated.longer_schedules():
            setup.once("schedule", too_long)

    def _observers(self) -> tuple[Observer, ...]:
        """In the order in which they hear of a window."""
        config, setup = self._config, self._setup
        found: list[Observer] = []
        if config.batchnorm == "pool":
            found.append(Pool(setup.models, setup.engine))
        if config.trace is not None:
            setup.trace = Trace(config.trace, setup.engine, setup.parameters().every[0].device)
            setup.engine.peers.waits = setup.trace
            found.append(setup.trace)
        if self._noise is not None:
            found.append(self._noise)
        if not setup.steps and setup.scaler is None and config.on_nonfinite == "raise":
            found.append(LookAtEnd(setup.engine))
        return tuple(found)

    def __getstate__(self) -> dict[str, Any]:
        self._planner.__getstate__()  # which a shallow copy would not ask
        return self.__dict__

    @property
    def index(self) -> int:
        """The index of the next update: the number of windows that were stepped or skipped."""
        return self._progress.index

    # Windows

    def windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        """One window after the other from a loader of micro-batches, until no rank has any left.

        What the loader yields is never cut. The last window may be short, and ranks may run out at
        different times.
        """
        self._config.refuse_to_group()
        return self._planner.windows(loader)

    def split(self, batch: Any, length: int | None = None) -> Window:
        """One window that cuts `batch`, this rank's part of the update, into micro-batches.

        The fewest that respect `micro_batch_size`, or `steps` of them; in order, as even as can be, the larger
        ones last. Every tensor whose first dimension is the batch's is cut (as views), and lists of one value
        per sample; all else goes whole to each. `length` says the batch's length where it cannot be seen.
        """
        self._config.refuse_to_cut("split")
        return self._planner.plan(cut_up(batch, self._config, self._progress.size, length))

    def window(self, micro_batches: Iterable[Any]) -> Window:
        """One window of the micro-batches that the caller made; ranks may have different numbers of them."""
        return self._planner.plan(lambda _: Batches(list(micro_batches)))

    # The window, and all that can go wrong in it

    def update(self, batch: Any, loss_fn: LossFn) -> Update:
        """Cuts `batch`, runs every micro-batch through `loss_fn`, and steps. Equivalent to

            window = accumulator.split(batch)
            for micro_batch in window:
                window.backward(loss_fn(micro_batch))
            return window.step()

        but where a micro-batch does not fit into memory all ranks undo the window, halve the micro-batch and do it
        again; the size is remembered, and a larger one is tried now and then. `loss_fn` may give a dict of named
        losses. An error in it, on any rank, undoes the window on all: gradients, buffers and random numbers.
        """
        self._config.refuse_to_cut("update")
        return update(self._planner, batch, loss_fn)

    def contrast(self, batch: Any, encode: Encode, loss_fn: Callable[..., Tensor]) -> Update:
        """For a loss over all pairs of the batch: `loss_fn(*encode(batch))` over all ranks, in a part of its memory.

        `encode(micro_batch)` gives a representation, or a tuple of them, a row for each sample. `loss_fn` is given
        those of the whole batch, in the order of ranks and samples, and gives a scalar. Each micro-batch is encoded
        without a graph, the loss is taken once, on each rank alike, and each micro-batch is encoded again, with the
        same random numbers, to carry its part back. Parameters that `loss_fn` alone uses get their gradient too.
        `reduction` and `count` are not used; the rest is as in `update`.
        """
        self._config.refuse_to_cut("contrast")
        return contrast(self._planner, batch, encode, loss_fn)

    def check(self, batch: Any, loss_fn: LossFn) -> Report:
        """Runs `batch` once as one big batch and once accumulated; reports by how much the gradients differ, and why.

        On the model itself, with the same random numbers; in float64 too where the module is plain. Gradients, buffers,
        modes and random numbers are put back, and nothing is stepped. In a job of several ranks the big batch is that
        of all ranks, on each of them: `batch` is this rank's part, and shall be small. `print(report)` shows all.
        """
        self._config.refuse_to_cut("check")
        return check(self._planner, batch, loss_fn)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state: the update's index, the learned size, the scaler, and the position of a stateful loader.

        The loader's place is that of the loop over `windows`, or of the last that was left by `break` or an error.

        Between two micro-batches of a window (after `window.backward`) also what this rank needs to resume there: all
        ranks take it after the same number of micro-batches, and `window.can_pause` says whether they can. Save every
        rank's; the entries `rank 0`, `rank 1`, ... belong to those ranks.
        """
        averages = None if self._noise is None else self._noise.averages
        return self._progress.state(self._setup, averages, self._own_parts())

    def _own_parts(self) -> tuple[Any, Any]:
        """This rank's part of the state: a window that is not over, and where its loader stands."""
        return self._planner.unfinished()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state_dict` was taken; from mid-window on the same number of ranks, on which the next window
        must be the same: give `windows` the loader from that window's first micro-batch on. Those done are drawn and
        not yielded.
        """
        if self._planner.has_open_window:
            assert self._planner.status is not None
            raise DistaccumError(
                f"load_state_dict() while a window is {self._planner.status.describe()}; finish it or discard() it"
            )
        self._progress.load(state, self._setup, None if self._noise is None else self._noise.averages)
        self._planner.forget()
