"""Accumulator: options in, windows out. It only delegates: an update is in loader.py, planning.py, window.py, engines/.

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
from inspect import signature
from typing import Any, Literal, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .adapter import Prepared
from .agreement import heard_by_all
from .batch import Batch, Count, Names, count_samples
from .batches import Batches, cut_up
from .choosing import adapters_for, choose_engine
from .engines import Sync
from .extension import Extension, join_all
from .feeding.by_cost import ByCost
from .guesses import Answering, answering
from .job import Job
from .law import Reduction, Schedule
from .loader import Windows, all_of
from .meshes.pipeline import PipelineSchedule
from .options import BatchNorm, Config, OnNonfinite, by_name, function, refuse_as_loader
from .planning import Planner
from .runs.check.report import Report, check
from .runs.contrast import Encode, PairsLoss, contrast
from .runs.update import LossFn, update
from .state.checkpoint import load_state, state_dict_of
from .state.place import Place
from .state.randomness import RandomNumbers
from .text import plural
from .update import Update
from .window import Window


@final
class Accumulator(Answering):
    """Runs each update as a window of micro-batches whose gradient is that of one big batch.

    Args:
        model: A module, plain or holding wrappers of one kind (DDP, `fully_shard`, FSDP1), a DeepSpeed engine, any of
            these under `torch.compile` or from `fabric.setup`, a sequence of modules, or a pipeline's schedule.
        optimizer: One, a sequence (each steps once per update), or None: a DeepSpeed engine steps itself; otherwise
            step between the loop and `window.step()`, which then only records the update and clears the gradients.
        steps: Micro-batches per rank and update, at least 1: an int, or a callable that maps the update's index (from
            0) to one. Excludes the two sizes. If you give none of the three, only `window()` can be called.
        batch_size: Samples per update over all ranks, an int or a callable like `steps`; needs `micro_batch_size`. A
            window of `windows()` then has `ceil(batch_size / (ranks * micro_batch_size))` micro-batches per rank.
        micro_batch_size: The most samples that one forward on one rank can hold. `"auto"` is for `update()` and
            `contrast()`, which begin with the whole batch and halve what does not fit into memory; `windows()` needs a
            number. `ByCost(4096, cost=count_tokens("labels"))` is for rows of different lengths, without `batch_size`.
        reduction: How your criterion reduces, or a dict of that by loss name. `"mean"`: it averages over what `count`
            counts, and you get the gradient of the global mean. `"sum"`: it sums, and you get the gradient of the
            global sum. `"sum_to_mean"`: it sums, and you get the gradient of the global mean.
        count: The denominator of a micro-batch: a callable that takes a micro-batch from the loader and returns a
            finite number of at least 0, or a one-element tensor; or a dict of them by loss name, with the keys of
            `reduction`. A micro-batch whose counts are all 0 is left out. For token losses use `count_tokens`.
        max_norm: Clips the L2 norm of the whole gradient, over all ranks, once per update; `math.inf` only measures it.
        scheduler: One or several; each steps once per update that changed the weights.
        scaler: A `torch.amp.GradScaler`; do not call it yourself. None: Accelerate's, Fabric's or Lightning's, if any.
        accelerator: The Hugging Face `Accelerator` whose `prepare` made the model; its `backward` and scaler are used.
        sync: When gradients are reduced. Every policy gives the same gradients; an engine may lack some of them.

            - `"last"`: once per window, in its last micro-step.
            - `"every"`: in each micro-step, so that sharded engines keep only a shard of the gradient.
            - `"replicas"`: FSDP2 on a hybrid mesh: reduce-scatter in each micro-step, all-reduce in the last.
            - `"gathered"`: FSDP2: gathers the parameters once per window and reduces once.
        on_nonfinite: What happens if the gradient has a NaN or infinity, on all ranks alike. `"raise"`: an error, and
            the window is discarded. `"skip"`: no step; `Update.reason` says why. `"ignore"`: no check. With a scaler an
            overflow always skips, and `"raise"` applies to a loss that is not finite.
        batchnorm: What to do about batch normalisation in training mode, which changes the gradient from that of the
            big batch. `"warn"`: warn once and name the layers. `"ignore"`: no warning.
        mesh: The dimensions of a `DeviceMesh` that carry data, such as `mesh["data"]`, if the wrapper also reduces over
            ranks that have parts of the same samples (context parallelism).
        extensions: A list of `Extension` objects, which take part in every window: `NoiseScale()`,
            `WideSums(torch.float32)` and `Spans()` of `distaccum.extensions`, or your own.

    Raises:
        TypeError: An argument of the wrong kind, such as `steps=2.5`, `LBFGS` or `ReduceLROnPlateau`.
        ValueError: An unknown choice, arguments that exclude each other, an option that the engine lacks, a wrapper
            without an engine, a plain module in a job of several ranks, or an optimizer for another model.
        DistaccumError: Accelerate or DeepSpeed is configured to accumulate or clip by itself.
    """

    @answering
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
        with heard_by_all():
            config = Config(*sizes, *by_name(reduction, count), max_norm, sync, on_nonfinite, batchnorm, mesh)
            self._config = config
            given = Prepared(model, optimizer, scheduler, scaler, adapters_for(accelerator))
            job = Job(config, given, choose_engine(given, sync, mesh))
            join_all(extensions, job, RandomNumbers())
            self._planner = Planner(job, Place(job))

    def __repr__(self) -> str:
        job = self._planner.job
        names = "steps", "batch_size", "micro_batch_size", "sync"
        given = ", ".join(f"{one}={value!r}" for one in names if (value := getattr(self._config, one)) is not None)
        ranks = plural(job.engine.peers.num_ranks, "rank")
        return f"Accumulator({job.engine.name}, {ranks}, update {job.index}; {given})"

    @property
    def index(self) -> int:
        """The index of the next update: the number of windows stepped or skipped so far."""
        return self._planner.job.index

    @answering
    def windows(self, loader: Iterable[Batch], *, ahead: bool = True) -> Windows[Batch]:
        """Groups a loader into windows until no rank has a micro-batch left; call it once per epoch.

        Each micro-step of a window draws part of the next window, at the pace of a hand-written loop: a DataLoader's
        workers never idle, and at most two windows of micro-batches are alive.

        Args:
            loader: Yields micro-batches of any kind; they are never cut. The last window may be short, and ranks may
                run out at different times. If the loader fails, the error is raised when you ask for that window. If
                you leave the loop over an iterator, what was drawn ahead comes first in its next `windows()`.
            ahead: False draws a window only when you ask for it, and nothing while another runs: for loaders whose
                items are large, depend on the process's global random numbers, or are made by the model (rollouts, hard
                negatives), which else would have weights from before the current update.

        Returns:
            An iterator of `Window`. If the loader has a length, it has one too: of one pass on this rank. Call a
            window's `step()` before you ask for the next one. Leaving the loop discards the current window.

        Raises:
            ValueError: Neither `steps` nor `batch_size` with a numeric `micro_batch_size` was given, or a bad count.
            DistaccumError: The last window was not stepped, or ranks disagree on `steps`, index or kind of call.
        """
        self._config.refuse_to_group()
        refuse_as_loader(loader)
        return Windows(self._planner, loader, ahead=ahead)

    @answering
    def split(self, batch: Batch, length: int | None = None, whole: Names = ()) -> Window[Batch]:
        """Cuts `batch` into the micro-batches of one window: in order, as evenly as possible, the larger ones last.

        Args:
            batch: This rank's part of the update: tensors in any nesting of dicts, lists, tuples and dataclasses.
                Tensors whose first dimension is the batch's are cut, as views, and so are lists with one entry per
                sample; all else goes whole to each part. As few parts as fit `micro_batch_size`, or `steps` parts.
            length: Samples in it, where its tensors and lists of samples differ in length: those of this one are cut.
            whole: Keys, fields or positions of entries that are never cut, whatever their length.

        Raises:
            ValueError: The Accumulator was given no size, lengths differ, or `whole` names nothing in the batch.
            TypeError: Nothing in the batch has a length, or something in it cannot be cut.
            DistaccumError: As in `windows()`.
        """
        columns = self._config.columns("split", length, whole)
        return self._planner.plan(cut_up(batch, self._planner.job, columns))

    @answering
    def window(self, micro_batches: Iterable[Batch]) -> Window[Batch]:
        """Makes one window of micro-batches of your own.

        Args:
            micro_batches: All of this rank's; they are drawn at once. Ranks may have different numbers of them.

        Raises:
            ValueError: `count` returned something other than a number of at least 0.
            DistaccumError: As in `windows()`.
        """
        return self._planner.plan(lambda _: Batches(all_of(micro_batches)))

    @answering
    def update(self, batch: Batch, loss_fn: LossFn[Batch], *, length: int | None = None, whole: Names = ()) -> Update:
        """Cuts `batch`, runs every micro-batch through `loss_fn`, steps, and returns the record. Equivalent to::

            window = accumulator.split(batch)
            for micro_batch in window:
                window.backward(loss_fn(micro_batch))
            return window.step()

        but if a micro-batch does not fit into memory, all ranks undo the window, halve the micro-batch size and try
        again; the size that fits is remembered, and a larger one is tried now and then.

        Args:
            batch: This rank's part of the update, as in `split()`.
            loss_fn: Called with a micro-batch, perhaps more than once; returns the loss, or a dict of losses by name.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            Exception: Whatever `loss_fn` raised; the window is undone: gradients, buffers and random numbers.
            DistaccumError: That error, quoted on the other ranks; one sample does not fit; or a non-finite gradient.
            ValueError: No size was given to the Accumulator.
        """
        columns = self._config.columns("update", length, whole)
        function("update", "loss_fn", loss_fn)
        return update(self._planner, batch, loss_fn, columns)

    @answering
    def contrast(
        self, batch: Batch, encode: Encode[Batch], loss_fn: PairsLoss, *, length: int | None = None, whole: Names = ()
    ) -> Update:
        """Runs one update of a loss over all pairs, `loss_fn(*encode(batch))` over all ranks, in less memory.

        Each micro-batch is encoded without a graph, each rank computes the same loss once, and each micro-batch is
        encoded again, with the same random numbers, for its part of the backward. `reduction` and `count` are not used.

        Args:
            batch: This rank's part of the update, as in `split()`.
            encode: Takes a micro-batch; returns a representation or a tuple of them: tensors with one row per sample.
            loss_fn: Takes the representations of the whole batch, in the order of ranks and samples; returns a
                scalar tensor. Parameters that only it uses (a temperature) get their gradient too.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            DistaccumError: The second `encode` returns other values, ranks get different losses, or as in `update()`.
            ValueError: No size was given to the Accumulator, or `encode` or `loss_fn` returns another shape.
        """
        columns = self._config.columns("contrast", length, whole)
        function("contrast", "encode", encode)
        function("contrast", "loss_fn", loss_fn, most=99)
        return contrast(self._planner, batch, encode, loss_fn, columns)

    @answering
    def check(self, batch: Batch, loss_fn: LossFn[Batch], *, length: int | None = None, whole: Names = ()) -> Report:
        """Reports whether accumulation equals the big batch, by how much their gradients differ, and why.

        Runs both on the model itself, with the same random numbers, and in float64 too if the module is plain.
        Gradients, buffers, modes and random numbers are put back, and nothing is stepped.

        Args:
            batch: This rank's part, at least two samples. Each rank runs the big batch of all ranks: keep it small.
            loss_fn: As in `update()`; called with micro-batches and with the big batch.
            length: As in `split()`.
            whole: As in `split()`.

        Raises:
            DistaccumError: The engine hides gradients (DeepSpeed), the big batch does not fit, or gradients are all 0.
            ValueError: No size was given to the Accumulator.
        """
        function("check", "loss_fn", loss_fn)
        return check(self._planner, batch, loss_fn, self._config.columns("check", length, whole))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, to save: the index, the learned size, the scaler, the loader's position, each
        extension's state under its key, and the random number state of the host and of the model's devices.

        Call it anywhere. What was not stepped is done again: until a window's weights have moved, the state is the one
        at its start, even after an error or `break`. Then, as in an optimizer's post-step hook, it is that of the next
        window, and between two epochs that of a new pass. Save every rank's state: each has its own random numbers and
        its own position.

        Raises:
            DistaccumError: The loader's state cannot be saved, or, with `optimizer=None`, the call comes between a
                window's loop and its `step()`, when you may have stepped already.
        """
        return state_dict_of(self._planner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes with the window that was running when `state_dict()` was called, or with the next one.

        The random numbers are put back when the first window begins, after its data are drawn.

        Args:
            state: This rank's, from the same version. On another number of ranks, the random numbers and the loader's
                position are ignored. A loader without a state of its own must begin at that window's first micro-batch.

        Raises:
            TypeError, ValueError: Not such a state, or it has a scaler and the Accumulator has none (or the reverse).
            DistaccumError: A window is in its loop, or this rank's part, with a loader's position, is missing.
        """
        load_state(state, self._planner)


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__


# Otherwise help() shows the default of `count` by its address.
_GIVEN = signature(Accumulator.__init__)
_SHOWN = [p.replace(default=_Name("count_samples")) if p.name == "count" else p for p in _GIVEN.parameters.values()]
Accumulator.__init__.__signature__ = _GIVEN.replace(parameters=_SHOWN)  # type: ignore[attr-defined]
