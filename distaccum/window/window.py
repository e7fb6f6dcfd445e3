"""Window: the micro-batches of one update, as a transaction. The only place that scales a loss."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..engines import Engine
from ..gradients.norms import HALF, total_norm
from ..gradients.scaling import is_scaled_by
from ..gradients.snapshot import random_state, set_random_state
from ..law.batches import rebuilt
from ..law.errors import DistaccumError
from ..law.plan import Plan
from ..law.shares import Reduction, share_of
from ..law.update import Update
from ..observers.noise import Noise, Small
from ..observers.statistics import Pool
from ..observers.trace import span
from .resume import Losses, Unfinished

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")
Counts = Sequence[float]  # of one micro-batch, by name
Shares = Sequence[float | None]  # likewise; None: the term is left out


@dataclass(slots=True)
class _Weight:
    """A share as tensors on the losses' device: a fill each, which nobody waits for."""

    share: Tensor
    seed: Tensor  # times the scaler's scale: the same for all losses of a window
    dtype: torch.dtype
    device: int
    losses: list[Tensor] = field(default_factory=list)  # that went backward with it
    places: list[int] = field(default_factory=list)  # the micro-batches that they came from


@dataclass(slots=True)
class _Mark:
    """What a gradient looked like after the last backward."""

    holder: Any  # the parameter, or what its wrapper has in its place
    gradient: Tensor | None = None
    version: int = -1


@dataclass(frozen=True)
class Spare:
    """A micro-batch that a rank with none left stands in with."""

    micro_batch: Any
    counts: Counts


Term = tuple[Tensor, _Weight]
MOST_ROUNDING = 2**-8  # of a share in half precision: bfloat16 stays below it, and float16 where it is not subnormal
DONE, WAITING, TORN = range(3)  # the backward of the micro-batch at hand (or of a part of it): TORN did not end


class Stage(Enum):
    PLANNED = auto()
    RUNNING = auto()
    COMPLETE = auto()  # after the loop: gradients are final
    STEPPED = auto()
    LEFT = auto()  # discarded


class Stream(Protocol):
    """Draws a window while it runs."""

    steps_alone: bool  # ranks need not know of each other's micro-batches before the window's edge
    drawn: int  # so far, those that count nothing too

    def __call__(self) -> tuple[Any, tuple[float, ...]] | None:
        """The next micro-batch with anything that counts, and its counts."""


class Owner(Protocol):
    """The accumulator, as its windows see it."""

    _forgotten: int | None  # of a window that was dropped unstepped, its index

    def _begin(self, window: Window) -> None: ...
    def _complete(self, window: Window) -> None: ...
    def _commit(self, window: Window) -> Update: ...
    def _warn(self, key: str, message: str) -> None: ...
    def _untouched_statistics(self) -> AbstractContextManager[None]: ...


class Window:
    """This rank's micro-batches of one update.

    Equivalent to, for the mean over all samples on all ranks,

        for micro_batch in window:
            loss = criterion(model(micro_batch))
            (loss * ranks * count(micro_batch) / window.counts["samples"]).backward()  # the last one reduces
        optimizer.step()
        optimizer.zero_grad()

    without a multiplication in the graph: the factor goes in as backward's seed.
    """

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        plan: Plan,
        micro_batches: list[Any],
        counts: Sequence[tuple[float, ...]],
        reductions: Mapping[str, Reduction],
        *,
        index: int,
        spare: Spare | None,
        parameters: Sequence[nn.Parameter],
        watched: Sequence[Sequence[nn.Parameter]],
        scaler: GradScaler | None,
        scales: bool,
        stream: Stream | None = None,
        guard: Callable[[], None] | None = None,
        unfinished: Unfinished | None = None,
        looks: bool = False,
        numbers: Sequence[int],
        pool: Pool | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.index = index
        self.counts = {} if stream is not None else dict(plan.counts)
        self._plan = plan
        self._started = time.perf_counter()
        self._owner = owner
        self._engine = engine
        self._trace = engine.trace
        self._micro_batches = deque(micro_batches)
        self._num = len(micro_batches)
        self._turns = 0 if plan.is_empty else engine.num_micro_steps(plan)
        self._kept = plan.num_counted  # streaming, those known of
        self._num_early = engine.num_early_reductions(plan)  # so many first micro-steps reduce too
        self._divisor = engine.divisor
        self._names = tuple(reductions)
        self._several = len(self._names) > 1
        self._reductions = reductions
        shares = {ns: self._shares_of(ns, plan, reductions) for ns in set(counts)}
        self._shares: list[Shares] = [shares[ns] for ns in counts]
        self._spare = spare
        if self._turns > self._num:
            assert spare is not None
            self._micro_batches += [spare.micro_batch] * (self._turns - self._num)
            self._shares += [_of_a_stand_in(spare)] * (self._turns - self._num)
        self._counts = list(counts)
        self._numbers = list(numbers)  # of these micro-batches among those that were drawn
        self._stream = stream
        self._total = [sum(numbers) for numbers in zip(*counts, strict=True)] or [0.0] * len(self._names)
        self._factor = 1.0  # that the gradient is multiplied by at the edge: streaming, the shares were guesses
        self._guard = guard
        self._pool = pool  # of running statistics
        self._noise = noise
        is_alone = (
            len(plan.num_counted) == 1 and self._num == 1 and stream is None
        )  # its first micro-batch is all of it
        # To the end of the first micro-batch.
        self._early = noise.early() if noise is not None and self._num and not is_alone else None
        self._small: Small | None = None  # what came of it
        self._part_of_square: Tensor | None = None  # of the window's gradient, where the caller steps
        self._unfinished = unfinished
        self._done_before = 0 if unfinished is None else unfinished.done
        self._looks: list[Tensor] | None = [] if looks else None  # the largest gradient after each micro-batch
        self._reducing = False  # in a backward that other ranks take part in
        self._ahead: Any = None  # what windows() has after this one
        self._prelude: Callable[[], None] | None = None  # before the first micro-batch
        self._loss: Tensor | None = None  # of all ranks' samples, where what goes backward is not the loss
        self._in_loss = False  # of all ranks' samples, which is the first rank's to count
        self._is_trial = False  # of a check, which wants its gradient whatever it is
        self._encoded: list[list[Tensor]] = []  # by micro-batch, how large its representations are
        self._parameters = parameters
        self._watched = watched
        self._scaler = scaler
        self._scales = scaler is not None and scales  # else what runs backward does

        self._stage = Stage.PLANNED
        self._position = -1
        self._turn = DONE
        self._more_parts = False
        self._is_first = True  # no backward came yet
        self._given: set[str] = set()  # names that this micro-batch's backwards were given
        self._weights: dict[str, dict[float, _Weight]] = {name: {} for name in self._names}  # by share
        self._marks: list[_Mark] = []
        self._may_go = False  # without an error, when another window is asked for
        self._was_asked_to_step = False
        self._device = parameters[0].device
        self._wide = torch.float32 if self._device.type == "mps" else torch.float64  # which Apple's GPUs lack

    def __len__(self) -> int:
        """This rank's micro-batches (streaming, those known of); stand-ins are not among them."""
        return self._num

    def __bool__(self) -> bool:
        """True, also where this rank has nothing to do: it still steps with the others."""
        return True

    @property
    def num_done(self) -> int:
        """Micro-batches of this rank that went backward, stand-ins included."""
        return self._position + (self._turn == DONE and not self._more_parts)

    @property
    def can_pause(self) -> bool:
        """Whether every rank, when it has done as many micro-batches, has another: all can then take a `state_dict()`.

        False in a window's last micro-batch, on engines that cannot (DeepSpeed, FSDP1), and streaming on ranks that
        step alone (DDP).
        """
        return (
            self._stage is Stage.RUNNING
            and self._engine.shows_partial
            and self._turn == DONE
            and not self._more_parts
            and self._position + 1 < min(self._kept)
        )

    @property
    def stand_in(self) -> bool:
        """True while the micro-batch at hand only keeps this rank in step with the others: it was there before, its
        share is 0, and it is counted nowhere. A plain module and DDP never need one.
        """
        return self._stage is Stage.RUNNING and self._position >= self._num

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's micro-batches in order; only the last one's backward reduces.

        Left early, by `break` or an exception, the window is discarded.
        """
        if self._stage is not Stage.PLANNED:
            raise DistaccumError(f"this window is {self._describe()}; a window is iterated once")
        self._stage = Stage.RUNNING
        watched = ExitStack()
        try:
            if self._pool is not None:
                watched.enter_context(self._pool.watching(self._counts_statistics))
            if not self._plan.is_empty:
                self._owner._begin(self)
                if self._prelude is not None:
                    with span(self._trace, "forward", on="the loss over all micro-batches"):
                        self._prelude()
            if self._unfinished is not None:
                self._take_up(self._unfinished)
            while self._advance():
                if self._trace is not None:
                    self._trace.next_micro_batch(self)
                if self._position < self._num:
                    yield self._micro_batches.popleft()  # not kept: what is done with can be freed
                else:
                    self._engine.stand_in()
                    with self._owner._untouched_statistics():
                        yield self._micro_batches.popleft()
                if self._turn or self._more_parts or self._several or self._stage is Stage.LEFT:
                    self._end_of_micro_batch()
            self._check_gradients()
            if self._unfinished is not None:  # taken after the last micro-batch
                set_random_state(self._unfinished.random)
            if self._pool is not None:
                self._pool.refuse_unseen()
            if not self._plan.is_empty:
                self._owner._complete(self)
                self._engine.release()
                if self._engine.sums is not None:  # which are in .grad by now
                    self._mark(reduced=True)
                # An engine may have set to None what no rank used.
                self._marks = [mark for mark in self._marks if mark.holder.grad is not None]
            self._stage = Stage.COMPLETE
        finally:
            watched.close()
            if self._stage is not Stage.COMPLETE:
                self.discard()

    def _counts_statistics(self) -> bool:
        """Whether a forward is of this window's samples: not recomputed in backward, nor after it, nor a stand-in."""
        return self._in_loss or (self._turn == WAITING and not self.stand_in)

    def _advance(self) -> bool:
        """To the next micro-batch, if there is one."""
        while self._micro_batches:
            self._position += 1
            if self._stream is not None and not self._stream.steps_alone and self._position < self._num:
                self._spare = Spare(self._micro_batches[0], (1.0,))
            if self._position >= self._done_before:
                if self._unfinished is not None:
                    set_random_state(self._unfinished.random)  # what was drawn since then has drawn numbers too
                    self._unfinished = None
                self._turn = WAITING
                return True
            self._micro_batches.popleft()  # done before the state was taken
            if self._stream is not None:
                self._draw_ahead(self._stream)
        return False

    def _draw_ahead(self, stream: Stream) -> None:
        """Streaming: the micro-batch after the one at hand, to know whether this one reduces.

        In its backward, when the caller has let go of the one before.
        """
        if self._trace is not None:
            self._trace.end_forward()
        with span(self._trace, "plan", ahead=True):
            self._draw_one(stream)

    def _draw_one(self, stream: Stream) -> None:
        drawn, error = None, None
        try:
            drawn = stream() if self._num == len(self._shares) else None
        except Exception as caught:  # others may wait in the gathering below
            error = caught
        if drawn is not None:
            micro_batch, counts = drawn
            self._micro_batches.append(micro_batch)
            self._shares.append(self._shares_of(counts, self._plan, self._reductions))
            self._counts.append(counts)
            self._numbers.append(stream.drawn - 1)
            self._total = [total + count for total, count in zip(self._total, counts, strict=True)]
            self._num += 1
        if stream.steps_alone:
            self._turns = max(self._num, self._turns)
            self._kept = (self._num,) if len(self._kept) == 1 else (0,) * len(self._kept)  # not known of others
        rows = [] if stream.steps_alone else self._engine.peers.gather([float(self._num), float(error is not None)])
        if error is not None:
            try:
                raise error
            finally:
                del error
        if stream.steps_alone:
            return
        failed = [str(rank) for rank, row in enumerate(rows) if row[1]]
        if failed:
            raise DistaccumError(f"rank {', '.join(failed)} could not draw a micro-batch (its own error says why)")
        self._kept = tuple(int(row[0]) for row in rows)
        plan = replace(self._plan, num_counted=self._kept)
        self._engine.check(plan)
        self._turns, self._num_early = self._engine.num_micro_steps(plan), self._engine.num_early_reductions(plan)
        if self._turns > len(self._shares):
            assert self._spare is not None
            self._micro_batches.append(self._spare.micro_batch)
            self._shares.append(_of_a_stand_in(self._spare))

    def _take_up(self, unfinished: Unfinished) -> None:
        """Goes on where the state of this window was taken."""
        self._engine.put_partial(self._parameters, {**unfinished.partial, "done": unfinished.done})
        for place, name, share, loss in unfinished.losses:
            weight = self._weight(name, loss.to(self._device), share)
            weight.losses.append(loss.to(self._device))
            weight.places.append(place)
        if self._pool is not None:
            self._pool.load(unfinished.statistics)
        if self._noise is not None and unfinished.noise is not None:
            self._small = Small(*unfinished.noise)
        self._early, self._is_first = None, False

    def _state(self, devices: Sequence[torch.device]) -> Unfinished:
        """What `_take_up` needs, in a window that has done some of its micro-batches."""
        if self._turn != DONE or self._more_parts:
            raise DistaccumError(
                f"state_dict() {self._where()} before its backward, expected it after window.backward(loss), between "
                "two micro-batches"
            )
        if len(self._kept) > 1 and self._engine.shows_partial and not self.can_pause:
            known = "streaming, what they have is not known" if not any(self._kept) else f"they have {list(self._kept)}"
            raise DistaccumError(
                f"state_dict() {self._where()}, where another of the ranks may be past its last ({known}) and all "
                "cannot go on together; take it where window.can_pause, or after window.step()"
            )
        losses: Losses = [
            (place, name, share, loss.to("cpu"))
            for name, weights in self._weights.items()
            for share, weight in weights.items()
            for place, loss in zip(weight.places, weight.losses, strict=True)
        ]
        return Unfinished(
            done=self.num_done,
            index=self.index,
            counts=self._counts,
            losses=losses,
            partial=self._engine.partial(self._parameters),
            random=random_state(devices),
            statistics=[] if self._pool is None else self._pool.state(),
            noise=None if self._small is None else [self._small.square.to("cpu"), self._small.per_sample],
        )

    def parts(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields `items`; each gets a backward of its own, so that one graph lives at a time.

        The gradients add up. Where this is the last micro-batch, only the last item's backward reduces. Items are
        drawn one ahead, so let them be names of tasks or slices, and compute the losses in the loop.
        """
        self._refuse_nesting("parts()")
        if self._turn != WAITING:
            raise DistaccumError(f"parts() {self._where()}, expected it in a micro-batch that had no backward yet")
        sequence = iter(items)
        try:
            item = next(sequence)
        except StopIteration:
            raise ValueError("parts() got nothing, expected an item for each backward") from None
        self._more_parts = True
        while self._more_parts:
            try:
                following = next(sequence)
            except StopIteration:
                self._more_parts = False
            self._turn = WAITING
            yield item
            if self._turn:
                raise DistaccumError(self._without_backward("a part"))
            if self._more_parts:
                item = following

    def heads(self, outputs: Outputs, items: Iterable[Item]) -> Iterator[tuple[Item, Outputs]]:
        """Yields each item with `outputs`, a trunk's, cut off from it; then the trunk goes backward, once.

        One head's graph is alive at a time, and the trunk runs once. Equivalent to `parts` with `outputs` as they are
        and their graph retained, which would go through the trunk once per head:

            for head, features in window.heads(trunk(inputs), heads):
                window.backward(criterion(head(features), labels))

        `outputs` are a tensor, or tuples, lists and dicts of them.
        """
        self._refuse_nesting("heads()")
        if self._turn != WAITING:
            raise DistaccumError(f"heads() {self._where()}, expected it in a micro-batch that had no backward yet")
        if self._engine.owns_step:
            raise DistaccumError(f"heads() with {self._engine.name}, whose backward takes losses alone; add them up")
        cut: list[tuple[Tensor, Tensor]] = []  # what the trunk gave, and what heads are given
        given = _cut_off(outputs, cut)
        if not cut:
            raise ValueError(
                "heads() got outputs without a graph, expected a trunk's, outside torch.no_grad; where the trunk is "
                "frozen, go through window.parts(heads)"
            )
        self._more_parts = True
        for item in items:
            self._turn = WAITING
            yield item, given
            if self._turn:
                raise DistaccumError(self._without_backward("a head"))
        self._more_parts = False
        if self._turn:
            raise ValueError("heads() got no items, expected one for each backward")
        reached = [(output, leaf.grad) for output, leaf in cut if leaf.grad is not None]
        if not reached and None not in self._shares[self._position]:  # else what depends on them was left out
            raise DistaccumError("no loss of heads() depends on the trunk's outputs; compute them from what it yields")
        if self._stream is not None:
            self._draw_ahead(self._stream)
        losses, seeds = [output for output, _ in reached], [gradient for _, gradient in reached]
        if self._scaler is not None and not self._scales:
            # What runs backward will scale it, and these gradients are scaled.
            seeds = [seed / self._scaler.scale(seed.new_ones((), dtype=torch.float32)) for seed in seeds]
        reduce = self._is_reducing()
        if self._engine.will_reduce(reduce):
            losses, seeds = map(list, self._engine.with_earlier(losses, seeds))
        self._run(losses, seeds, reduce)
        self._settle(reduce)

    def backward(self, loss: Tensor | None = None, **named: Tensor | None) -> None:
        """Runs backward for this micro-batch, weighted so that the window adds up to the big batch.

        With several named denominators, one loss for each: `window.backward(tokens=a, samples=b)`. A term
        whose denominator is 0 in this micro-batch is left out.
        """
        # Every micro-step comes through here, and shall cost less than the division that the seed saves.
        if self._turn != WAITING:
            self._refuse_backward()
        if self._is_first and self._engine.stale(self._parameters, in_window=True):
            self._lose("gradients came into the window that its backward() did not make")
        for mark in self._marks:
            if mark.holder.grad is not mark.gradient or mark.version != _version(mark.gradient):
                self._check_gradients()
        if self._stream is not None and not self._more_parts:
            self._draw_ahead(self._stream)
        reduce = self._is_reducing()
        # The record's own numbers: what the caller does to the loss in place, also in a hook, is no part of it.
        if named or self._several:
            terms = self._by_name(loss, named)
            numbers = [one.detach().clone() for one, _ in terms]
            self._run([one for one, _ in terms], [weight.seed for _, weight in terms], reduce)
        else:
            terms = [self._weighted(self._names[0], loss, self._shares[self._position][0] or 0.0)]
            one, weight = terms[0]
            numbers = [one.detach().clone()]
            self._run((one,), (weight.seed,), reduce)
        if self._position < self._num:
            for number, (_, weight) in zip(numbers, terms, strict=True):
                weight.losses.append(number)
                weight.places.append(self._position)
        self._settle(reduce)

    def _refuse_nesting(self, what: str) -> None:
        if self._more_parts:
            raise DistaccumError(
                f"{what} {self._where()} inside parts() or heads(), which give each backward a part of its own; "
                "go through one list of all parts"
            )

    def _is_reducing(self) -> bool:
        """Whether the backward at hand is one that reduces."""
        return (self._position == self._turns - 1 or self._position < self._num_early) and not self._more_parts

    def _run(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self._guard is not None and self._engine.will_reduce(reduce):
            if self._trace is not None:
                self._trace.end_forward()
            self._guard()
            self._reducing = True
        if self._early is not None:
            self._early.before_backward(self._engine.will_reduce(reduce))
        if self._trace is not None:
            self._trace.begin_backward(self, reduce, of_trunk=self._turn != WAITING)
        self._turn = TORN
        try:
            if losses:
                self._engine.backward(losses, seeds, reduce)
            else:
                self._engine.skip()
        except RuntimeError as error:
            self._engine.peers.refuse_lost(error)
            raise
        finally:
            if self._early is not None:
                self._early.after_backward()
        if self._trace is not None:
            self._trace.end_backward(self)
        self._reducing = False
        self._turn, self._is_first = DONE, False

    def _settle(self, reduced: bool) -> None:
        """Remembers what gradients look like now."""
        if self._looks is not None and not self._more_parts:
            self._look()
        if self._early is not None and not self._more_parts:
            self._measure_first()
        self._mark(reduced)

    def _mark(self, reduced: bool) -> None:
        if reduced:
            self._marks = []  # gradients may have moved
        for mark in self._marks or self._mark_gradients(reduced):
            mark.gradient = gradient = mark.holder.grad
            mark.version = _version(gradient)

    def _look(self) -> None:
        """Whether what has added up here is finite; where ranks reduce, it is looked at before."""
        assert self._looks is not None
        holders = self._engine.holders(self._parameters)
        self._looks.append(total_norm([one.grad for one in holders if one.grad is not None], float("inf")))

    @property
    def _compares(self) -> bool:
        """Whether any rank may have two gradients to compare, for the noise scale; the same on all ranks."""
        return self._noise is not None and (len(self._kept) > 1 or self._small is not None)

    def _measure_first(self) -> None:
        """How large this rank's own gradient is after its first micro-batch."""
        early, self._early = self._early, None
        (count, *_), (share, *_) = self._counts[0], self._shares[0]
        assert self._noise is not None and early is not None and share is not None
        if early.is_lost:
            self._owner._warn(
                "noise",
                "measure_noise sees nothing of a first micro-batch whose parts are reduced one by one, so "
                "noise_scale stays as it was; add the parts' losses up, or use sync='last'",
            )
        else:
            self._small = self._noise.small(early, share, count)

    def _weighted(self, name: str, loss: Tensor | None, share: float) -> Term:
        """The loss, ready for backward, and what weighs it."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0):
            refuse_loss(loss)
        if type(loss) is not Tensor and hasattr(loss, "full_tensor"):
            loss = self._engine.whole_loss(loss)
        weight = self._weights[name].get(share)
        if weight is None or weight.dtype is not loss.dtype or weight.device != loss.get_device():
            if loss.is_complex():
                refuse_loss(loss)
            if self._scaler is not None and is_scaled_by(self._scaler, loss):
                raise ValueError(
                    "backward() got a loss that scaler.scale() has multiplied, and the window scales it too; give it "
                    "the loss itself: window.backward(loss)"
                )
            if loss.dtype in HALF:
                rounded = torch.tensor(share, dtype=loss.dtype).item()
                if self._scaler is None and abs(rounded - share) > MOST_ROUNDING * share:
                    raise ValueError(
                        f"backward() got a loss in {loss.dtype}, which rounds its share, {share:.6g}, to "
                        f"{rounded:.6g}, and the gradient with it; compute it in float32: "
                        "criterion(outputs.float(), ...)"
                    )
                if rounded != share:
                    self._owner._warn(
                        "half",
                        f"a loss in {loss.dtype} rounds its share, {share:.6g}, to that dtype on the way back (up to "
                        "0.2% in bfloat16); compute it in float32: criterion(outputs.float(), ...)",
                    )
                return self._weighted(name, loss.float(), share)
            weight = self._weight(name, loss, share)
        return loss, weight

    def _weight(self, name: str, loss: Tensor, share: float) -> _Weight:
        """A share for losses like this one."""
        found = self._weights[name].get(share)
        tensor = torch.full((), share, dtype=loss.dtype, device=loss.device)
        seed = self._scaler.scale(tensor) if self._scaler is not None and self._scales else tensor
        weight = _Weight(tensor, seed, loss.dtype, loss.get_device())
        if found is not None:
            weight.losses, weight.places = found.losses, found.places
        self._weights[name][share] = weight
        return weight

    def _by_name(self, loss: Tensor | None, named: dict[str, Tensor | None]) -> Sequence[Term]:
        if loss is not None:  # positional, or a name that happens to be "loss"
            if "loss" not in self._names and (self._several or named):
                raise ValueError(
                    f"backward() got a loss without a name, expected one for each of {list(self._names)}: "
                    f"window.backward({', '.join(f'{name}=...' for name in self._names)})"
                )
            named = {"loss" if "loss" in self._names else self._names[0]: loss, **named}
        given = {name: value for name, value in named.items() if value is not None}
        unknown = sorted(given.keys() - set(self._names))
        if unknown or not given:
            raise ValueError(f"backward() got {unknown or 'no loss'}, expected losses by name, of {list(self._names)}")
        # What has no count is left out, not multiplied by 0: the mean over nothing is NaN, and 0 times NaN is too.
        shares = zip(self._names, self._shares[self._position], strict=True)
        terms = [
            self._weighted(name, given[name], share) for name, share in shares if name in given and share is not None
        ]
        self._given.update(given)
        return terms

    def step(self) -> Update:
        """Clips, steps, updates the scaler, steps the schedule, clears the gradients, and says what it did."""
        if self._stage is not Stage.COMPLETE:
            raise DistaccumError(
                f"step() on a window that is {self._describe()}; step once, after the loop over its micro-batches"
            )
        self._was_asked_to_step = True
        return self._owner._commit(self)

    def discard(self) -> None:
        """Gives the window up: its gradients are cleared and the model is put back. Weights do not change."""
        if self._stage in (Stage.STEPPED, Stage.LEFT):
            return
        touched = self._stage is not Stage.PLANNED
        self._stage, self._turn = Stage.LEFT, DONE
        if touched:
            self._engine.release()
            self._engine.clear(self._parameters)
            if self._scaler is not None and any(self._weights.values()):
                # The caller may have unscaled; without this the scaler would not do it in the next window.
                self._scaler.update(self._scaler.get_scale())
            if self._trace is not None:
                self._trace.end("undone")
        self._forget()

    def __del__(self) -> None:
        """Dropped between its loop and its step(): nobody else would know."""
        if getattr(self, "_stage", None) is Stage.COMPLETE and not (
            self._may_go or self._was_asked_to_step or self._plan.is_empty
        ):
            self._owner._forgotten = self.index

    @property
    def _is_open(self) -> bool:
        return self._stage in (Stage.RUNNING, Stage.COMPLETE)

    @property
    def _is_over(self) -> bool:
        return self._stage in (Stage.STEPPED, Stage.LEFT)

    def _let_go(self) -> None:
        """Nobody will ask whether this window was stepped: it still can be, and goes when another comes."""
        self._may_go = True

    def _close(self) -> None:
        """The window has been stepped."""
        self._stage = Stage.STEPPED
        self._engine.clear(self._parameters)
        self._forget()

    def _make_way(self) -> None:
        """Another window is wanted: an error, once, while this one holds gradients. Asked again, it goes."""
        if self._is_open and not self._may_go:
            self._may_go = True
            raise DistaccumError(
                f"another window was asked for while one is {self._describe()}; finish its loop and call its "
                "step(), or discard() it (asking once more discards it)"
            )
        self.discard()

    def _terms(self) -> Tensor:
        """The losses by name, weighted, on the device: what the ranks add up for the record."""
        if self._loss is not None:
            part = self._divisor / len(self._kept)
            return self._loss.to(self._device, self._wide).reshape(1) * part
        by_name = [self._weighted_sum(weights.values()) for weights in self._weights.values()]
        terms = torch.stack(by_name) if self._several else by_name[0].reshape(1)
        return terms if self._factor == 1.0 else terms * self._factor

    def _weighted_sum(self, weights: Iterable[_Weight]) -> Tensor:
        used = [weight for weight in weights if weight.losses]
        if not used:
            return torch.zeros((), dtype=self._wide, device=self._device)
        losses = torch.stack([loss for weight in used for loss in weight.losses])
        if len(used) == 1:
            return (losses.sum(dtype=self._wide) * used[0].share).to(self._device)
        losses = losses.to(self._device, self._wide)
        shares = torch.stack([weight.share for weight in used for _ in weight.losses])
        return torch.dot(losses, shares.to(self._device, self._wide))

    def _first_nonfinite_loss(self) -> tuple[int, float] | None:
        """The micro-batch, and the loss; or, of a loss over pairs, its largest representation."""
        every = [
            (place, loss)
            for weights in self._weights.values()
            for weight in weights.values()
            for place, loss in zip(weight.places, weight.losses, strict=True)
        ]
        if self._loss is not None:
            every = [(place, largest) for place, several in enumerate(self._encoded) for largest in several]
        every.sort(key=lambda one: one[0])
        for (place, _), value in zip(every, self._read([loss for _, loss in every]), strict=True):
            if not math.isfinite(value):
                return self._numbers[place], value
        return None

    def _first_nonfinite_look(self) -> int:
        """The micro-batch after which what had added up was not finite any more; -1: none, or nobody looked."""
        for i, value in enumerate(self._read(self._looks or []), start=self._done_before):
            if not math.isfinite(value) and i < self._num:
                return self._numbers[i]
        return -1

    def _read(self, values: Sequence[Tensor]) -> list[float]:
        """Together, in one wait for the device."""
        if not values:
            return []
        wide = [value.detach().to(self._device, self._wide) for value in values]
        read: list[float] = torch.stack(wide).tolist()
        return read

    def _shares_of(self, counts: Counts, plan: Plan, reductions: Mapping[str, Reduction]) -> Shares:
        return [
            share_of(reductions[name], n, plan.counts[name], self._divisor) if n else None
            for name, n in zip(self._names, counts, strict=True)
        ]

    def _end_of_micro_batch(self) -> None:
        if self._stage is Stage.LEFT:
            raise DistaccumError(f"this window is {self._describe()}")
        if self._more_parts:
            raise DistaccumError("parts() or heads() was left before its last item; go through all of them")
        if self._turn:
            raise DistaccumError(self._without_backward("a micro-batch"))
        shares = zip(self._names, self._shares[self._position], strict=True)
        forgotten = [name for name, share in shares if share is not None and name not in self._given]
        if forgotten:
            raise DistaccumError(
                f"micro-batch {self._position} got no loss for {forgotten}, although its count is above 0; give each "
                "name its loss, or let count give 0 where there is none"
            )
        self._given.clear()

    def _without_backward(self, what: str) -> str:
        return (
            f"{what} without window.backward(loss) ({self._where()}); call it for each one (to leave a micro-batch "
            "out, let count give 0 for it)"
        )

    def _mark_gradients(self, reduced: bool) -> list[_Mark]:
        """Of each optimizer one parameter that has a gradient: tampering in mid-window shows there."""
        if reduced:
            holders: Iterable[Sequence[Any]] = self._watched if self._engine.gradients_stay else ()
        else:
            holders = (self._engine.holders(group) for group in self._watched)
        first = (next((one for one in group if one.grad is not None), None) for group in holders)
        self._marks = [_Mark(one) for one in first if one is not None]
        return self._marks

    def _check_gradients(self) -> None:
        for mark in self._marks:
            gradient = mark.holder.grad
            # Another tensor is all right: DDP moves gradients when it rebuilds its buckets.
            if gradient is None or (gradient is mark.gradient and _version(gradient) != mark.version):
                self._lose(
                    "gradients were cleared or changed in mid-window (by zero_grad, or clipping per micro-batch)"
                )

    def _refuse_cleared_gradients(self) -> None:
        """After the loop the caller may change gradients, but not throw them away."""
        if any(mark.holder.grad is None for mark in self._marks):
            self._lose("gradients were cleared between the window's loop and its step()")

    def _lose(self, what: str) -> NoReturn:
        self.discard()
        raise DistaccumError(
            f"{what}, so what had added up is lost and the window is discarded; leave gradients alone in the loop, and "
            "their clearing to window.step()"
        )

    def _refuse_backward(self) -> NoReturn:
        if self._stage is not Stage.RUNNING:
            raise DistaccumError(
                f"backward() on a window that is {self._describe()}; call it in the loop over its micro-batches"
            )
        if self._turn == TORN:
            raise DistaccumError(
                f"backward() after one that failed {self._where()}: gradients are half added up; leave the loop, "
                "which discards the window, and go on with the next"
            )
        raise DistaccumError(
            f"a second backward() {self._where()}, which would count its samples twice; add the losses up, or go "
            "through window.parts(items), which gives each item a backward of its own"
        )

    def _where(self) -> str:
        return f"in micro-batch {self._position} of {self._num}" if self._position >= 0 else "outside the loop"

    def _describe(self) -> str:
        return {
            Stage.PLANNED: "not begun",
            Stage.RUNNING: f"in its loop ({self._where()})",
            Stage.COMPLETE: "complete but not stepped",
            Stage.STEPPED: "stepped already",
            Stage.LEFT: "discarded (its loop was left, or another window was asked for)",
        }[self._stage]

    def _forget(self) -> None:
        self._micro_batches.clear()
        self._weights, self._marks, self._spare, self._stream, self._unfinished = {}, [], None, None, None


def _of_a_stand_in(spare: Spare) -> Shares:
    return [0.0 if n else None for n in spare.counts]


def _cut_off(outputs: Any, cut: list[tuple[Tensor, Tensor]]) -> Any:
    """The same without their graphs; what had one is noted in `cut`."""
    if isinstance(outputs, Tensor):
        if not outputs.requires_grad:
            return outputs
        cut.append((outputs, outputs.detach().requires_grad_()))
        return cut[-1][1]
    return rebuilt(outputs, lambda child, _: _cut_off(child, cut))


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def refuse_loss(loss: object, who: str = "backward() got") -> NoReturn:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{who} {loss!r}, a {type(loss).__name__}, expected the loss as a tensor (without .item() or float())"
        )
    if loss.ndim:
        say = " and say which to the Accumulator: reduction=" if who.startswith("backward") else ""
        raise ValueError(
            f"{who} a loss of shape {list(loss.shape)}, expected a scalar; reduce it with mean() or sum(){say}"
        )
    if loss.is_complex():
        raise TypeError(f"{who} a loss in {loss.dtype}, expected a real number; take .real or .abs()")
    raise ValueError(
        f"{who} a loss without a graph, which depends on no trainable parameter; compute it from the "
        "model's outputs (not from its inputs), outside torch.no_grad and without detach()"
    )
