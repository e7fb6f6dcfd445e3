"""Accumulator: options in, windows out. Each method hands on; an update is planner.py, feed.py, window.py, engines/.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .cutting import Batch, Count, Names, count_samples
from .engines import Sync
from .extension import Extension, join_all
from .feed import Batches, all_of, cut_up
from .job import Job
from .law import Reduction, Schedule, plural
from .options import BatchNorm, Config, OnNonfinite, by_name
from .planner import Planner, Windows
from .update import Update
from .window import Window

if TYPE_CHECKING:  # of the rooms that are not the core; their doors are opened by the methods below
    from .feeding.by_cost import ByCost
    from .meshes.pipeline import PipelineSchedule
    from .runs.check.report import Report
    from .runs.contrast import Encode, PairsLoss
    from .runs.update import LossFn


@final
class Accumulator:
    """Cuts updates into windows of micro-batches; each window's gradient is that of the one big batch.

    Args:
        model: A module, plain or with wrappers of one kind in it (DDP, `fully_shard`, FSDP1), a DeepSpeed engine, any
            of these under `torch.compile` or from `fabric.setup`, a sequence of modules, or a pipeline's schedule.
        optimizer: One, a sequence (each steps once per update), or None: a DeepSpeed engine steps itself; else you step
            after the loop and before `window.step()`, which then records and clears.
        steps: Micro-batches per rank and update, at least 1: an int, or a callable that gets the update's index (from
            0) and returns one. Not together with the two sizes. Without any of the three only `window()` can be called.
        batch_size: Samples per update over all ranks, an int or a callable as `steps`; needs `micro_batch_size`. It
            sets the window of `windows()`: `ceil(batch_size / (ranks * micro_batch_size))` micro-batches per rank.
        micro_batch_size: The most samples of one forward on one rank. `"auto"` is for `update()` and `contrast()`,
            which begin with the whole batch and halve what does not fit into memory; `windows()` needs a number.
            `ByCost(4096, cost=count_tokens("labels"))` where rows differ in length; not together with `batch_size`.
        reduction: What your criterion did, or a dict of it by the loss's name. `"mean"`: it averages over what `count`
            counts, and the gradient is that of the global mean. `"sum"`: it sums, and the gradient is that of the
            global sum. `"sum_to_mean"`: it sums, and the gradient is that of the global mean.
        count: The denominator of a micro-batch: a callable that gets one as the loader yields it and returns a finite
            number of at least 0, or a tensor of one; or a dict of these by the loss's name, with the keys of
            `reduction`. A micro-batch whose every count is 0 is left out. `count_tokens` makes one for token losses.
        max_norm: Clips the L2 norm of the whole gradient, over all ranks, once per update; `math.inf` only measures it.
        scheduler: One or several; each steps once per update that changed the weights.
        scaler: A `torch.amp.GradScaler`, which you do not call; None: that of Accelerate, Fabric or Lightning, if any.
        accelerator: The Hugging Face `Accelerator` whose `prepare` made the model; its `backward` and scaler are used.
        sync: When gradients are reduced; they are the same under each policy, and an engine may lack some.

            - `"last"`: once per window, in its last micro-step.
            - `"every"`: in each micro-step, so that sharded engines keep only a shard of the gradient.
            - `"replicas"`: FSDP2 on a hybrid mesh: reduce-scatter in each micro-step, all-reduce in the last.
            - `"gathered"`: FSDP2: gathers the parameters once per window and reduces once.
        on_nonfinite: What a gradient with NaN or infinity does, the same on all ranks. `"raise"`: an error, and the
            window is discarded. `"skip"`: no step; `Update.reason` says why. `"ignore"`: no check. With a scaler an
            overflow always skips, and `"raise"` is for a loss that is not finite.
        batchnorm: What is done about batch normalisation in training mode, whose gradient is not that of the big batch.
            `"warn"`: warns once and names the layers. `"ignore"`: no warning.
        mesh: The dimensions of a `DeviceMesh` that carry data, as `mesh["data"]`, if the wrapper reduces over more
            ranks, which have parts of the same samples (context parallelism).
        extensions: A list of `Extension`: what takes part in windows without being one, as `NoiseScale()`,
            `WideSums(torch.float32)` and `Spans()` of `distaccum.extensions`, or your own.

    Raises:
        TypeError: An argument of the wrong kind, such as `steps=2.5`, `LBFGS` or `ReduceLROnPlateau`.
        ValueError: An unknown choice, arguments that exclude each other, an option that the engine lacks, a wrapper
            without an engine, a plain module in a job of several ranks, or an optimizer of another model.
        DistaccumError: Accelerate or DeepSpeed is set to accumulate or clip by itself.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | PipelineSchedule,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        steps: Schedule | None = None,
        batch_size: Schedule | None = None,
        micro_batch_size: int | Literal["auto"] | ByCost | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
        count: Count | Mapping[str, Count] = count_samples,
        max_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        accelerator: Any = None,
        sync: Sync = "last",
        on_nonfinite: OnNonfinite = "raise",
        batchnorm: BatchNorm = "warn",
        mesh: Any = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        sizes = steps, batch_size, micro_batch_size
        config = Config(*sizes, *by_name(reduction, count), max_norm, sync, on_nonfinite, batchnorm, mesh)
        self._config = config
        job = Job(config, model, optimizer, scheduler, scaler, accelerator)
        join_all(extensions, job)
        self._planner = Planner(job)

    def __getstate__(self) -> dict[str, Any]:
        self._planner.__getstate__()  # which a shallow copy would not ask
        return self.__dict__

    def __repr__(self) -> str:
        job, names = self._planner.job, ("steps", "batch_size", "micro_batch_size", "sync")
        given = {name: getattr(self._config, name) for name in names}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        ranks = plural(job.engine.peers.num_ranks, "rank")
        return f"Accumulator({job.engine.name}, {ranks}, update {job.index}; {options})"

    @property
    def index(self) -> int:
        """The index of the next update, which is the number of windows that were stepped or skipped."""
        return self._planner.job.index

    def windows(self, loader: Iterable[Batch], *, ahead: bool = True) -> Windows[Batch]:
        """One window after the other from a loader, until no rank has any micro-batch left; call it once per epoch.

        Each micro-step of a window draws a part of the next one, at the pace of a loop by hand: a DataLoader's workers
        never stand still, and at most two windows of micro-batches are alive.

        Args:
            loader: Yields micro-batches of any kind, which are never cut. The last window may be short, and ranks may
                run out at different times. An error of it is raised where its window is asked for. What was drawn ahead
                of an iterator that you leave begins its next `windows()`.
            ahead: False draws a window when it is asked for, and nothing while one runs: for loaders whose items depend
                on the process's global random numbers, or are large.

        Returns:
            An iterator of `Window`, as long as one pass on this rank if the loader has a length. Call a window's
            `step()` before the next one is asked for. Leaving the loop discards the one at work.

        Raises:
            ValueError: No `steps`, and no `batch_size` with a `micro_batch_size` in numbers; or no count.
            DistaccumError: The last window is not stepped, or ranks disagree on `steps`, the index or the kind of call.
        """
        self._config.refuse_to_group()
        if isinstance(loader, Mapping | str) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise TypeError(f"windows() got a {type(loader).__name__}, expected a loader: an iterable of micro-batches")
        return Windows(self._planner, loader, ahead=ahead)

    def split(self, batch: Batch, length: int | None = None, whole: Names = ()) -> Window[Batch]:
        """One window of the micro-batches that `batch` is cut into, in order, as even as can be, the larger ones last.

        Args:
            batch: This rank's part of the update: tensors in any nesting of dicts, lists, tuples and dataclasses.
                Tensors whose first dimension is the batch's are cut, as views, and lists of one entry per sample; all
                else goes whole to each part. The parts are the fewest within `micro_batch_size`, or `steps` of them.
            length: Samples in it; by default the length that most of its tensors and lists of samples share.
            whole: Keys, fields or positions of entries that are never cut, however long they are.

        Raises:
            ValueError: No size was given to the Accumulator, the length is a tie, or nothing is named so.
            TypeError: Nothing in the batch has a length, or something in it cannot be cut.
            DistaccumError: As in `windows()`.
        """
        columns = self._config.columns("split", length, whole)
        return self._planner.plan(cut_up(batch, self._planner.job, columns))

    def window(self, micro_batches: Iterable[Batch]) -> Window[Batch]:
        """One window of micro-batches that you made.

        Args:
            micro_batches: This rank's, drawn at once, as many as there are; ranks may have different numbers of them.

        Raises:
            ValueError: A count that is no count.
            DistaccumError: As in `windows()`.
        """
        return self._planner.plan(lambda _: Batches(all_of(micro_batches)))

    def update(self, batch: Batch, loss_fn: LossFn[Batch], *, length: int | None = None, whole: Names = ()) -> Update:
        """The record of one update: cuts `batch`, runs every micro-batch through `loss_fn`, and steps. Equivalent to::

            window = accumulator.split(batch)
            for micro_batch in window:
                window.backward(loss_fn(micro_batch))
            return window.step()

        but where a micro-batch does not fit into memory all ranks undo the window, halve the micro-batch and do it
        again; the size is remembered, and a larger one is tried now and then.

        Args:
            batch: This rank's part of the update, as in `split()`.
            loss_fn: Called with a micro-batch, perhaps more than once; returns the loss, or a dict of losses by name.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            Exception: What `loss_fn` raised; the window is undone: gradients, buffers and random numbers.
            DistaccumError: It, quoted on the other ranks; one sample does not fit; or the gradient is not finite.
            ValueError: No size was given to the Accumulator.
        """
        from .runs.update import update

        columns = self._config.columns("update", length, whole)
        return update(self._planner, batch, loss_fn, columns)

    def contrast(
        self, batch: Batch, encode: Encode[Batch], loss_fn: PairsLoss, *, length: int | None = None, whole: Names = ()
    ) -> Update:
        """The record of one update for a loss over all pairs: `loss_fn(*encode(batch))` over all ranks, in less memory.

        Each micro-batch is encoded without a graph, the loss is taken once, on each rank alike, and each micro-batch is
        encoded again, with the same random numbers, to carry its part back. `reduction` and `count` are not used.

        Args:
            batch: This rank's part of the update, as in `split()`.
            encode: Called with a micro-batch; returns a representation or a tuple of them, tensors of a row per sample.
            loss_fn: Called with the representations of the whole batch, in the order of ranks and samples; returns a
                scalar tensor. Parameters that it alone uses (a temperature) get their gradient too.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            DistaccumError: A second `encode` gives other values, ranks get different losses, or as in `update()`.
            ValueError: No size was given to the Accumulator, or `encode` or `loss_fn` returns another shape.
        """
        from .runs.contrast import contrast

        columns = self._config.columns("contrast", length, whole)
        return contrast(self._planner, batch, encode, loss_fn, columns)

    def check(self, batch: Batch, loss_fn: LossFn[Batch], *, length: int | None = None, whole: Names = ()) -> Report:
        """A report on whether accumulation equals the big batch, by how much their gradients differ, and why.

        Runs both on the model itself, with the same random numbers, in float64 too where the module is plain.
        Gradients, buffers, modes and random numbers are put back, and nothing is stepped.

        Args:
            batch: This rank's part, at least two samples. Each rank runs the big batch of all of them: keep it small.
            loss_fn: As in `update()`; called with micro-batches and with the big batch.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            DistaccumError: The engine shows no gradients (DeepSpeed), the big batch does not fit, or they are all 0.
            ValueError: No size was given to the Accumulator.
        """
        from .runs.check.report import check

        return check(self._planner, batch, loss_fn, self._config.columns("check", length, whole))

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, to save: the index, the learned size, the scaler, the loader's place, each
        extension's under its key, and the random numbers of the host and of the model's devices.

        Call it anywhere. While a window is open, the state is that of its start, so that a job which resumes does it
        again. The loader's place is that of the loop over `windows()`, or of the last that was left by `break` or an
        error. Save every rank's: each has its own random numbers, and its own place.

        Raises:
            DistaccumError: The loader's state cannot be saved, or, with `optimizer=None`, the call is between a
                window's loop and its `step()`, where you may have stepped.
        """
        from .runs.state import state_dict_of

        return state_dict_of(self._planner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes with the window that was at work when `state_dict()` was taken, or with the next.

        The random numbers are put back when the first window begins, and its data are drawn.

        Args:
            state: Of this rank, of the same version. On another number of ranks its random numbers and the loader's
                place are left out. A loader without a state of its own must begin at that window's first micro-batch.

        Raises:
            TypeError, ValueError: No such state, or one with a scaler for an Accumulator without (or the reverse).
            DistaccumError: A window is open, or this rank's part is missing and holds the place of a loader.
        """
        from .runs.state import load_state

        load_state(state, self._planner)
