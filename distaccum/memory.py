"""Out of memory: what it looks like, the window undone, and the size that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .engines import Engine
from .errors import DistaccumError, LostRanksError
from .state import random_devices, random_state, set_random_state, whole_number_in
from .stepping import NonfiniteError
from .update import Update
from .window import Stage, Window

# What allocators and libraries say that have no error of their own for it.
MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS
    "can't allocate memory",  # torch's allocator on the host
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN gives where its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may do.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), is_out_of_memory(KeyError())
    (True, False)
    """
    chain: dict[int, BaseException] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in chain:  # `raise error from error` is a circle
        chain[id(cause)] = cause
        cause = cause.__cause__
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (
            isinstance(one, RuntimeError)
            and not isinstance(one, DistaccumError)  # which may quote one
            and any(message in str(one) for message in MESSAGES)
        )
        for one in chain.values()
    )


def free() -> None:
    """What the failed attempt left: cycles that hold tensors, and blocks of other sizes in the device's cache."""
    gc.collect()
    for name in ("cuda", "xpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", bool)():
            module.empty_cache()


FIRST_WAIT, LONGEST_WAIT = 16, 4096  # updates until a larger size is tried
MOST_PROVEN = 32
PROOFS = 2  # windows: the optimizer makes its state after the first, which takes memory from the second


@dataclass
class Fit:
    """The largest micro-batch that fits, as far as is known: the same on all ranks, which all see the same.

    >>> fit = Fit(most=None)
    >>> fit.ran_out(64), fit.size
    (True, 32)
    >>> for _ in range(FIRST_WAIT):
    ...     fit.came_through(32, parts=4)
    >>> fit.size, fit.ran_out(48), fit.size  # what is in between is tried now and then, and given up again
    (48, True, 32)
    """

    most: int | None  # that was asked for; None: "auto"
    size: int | None = None  # in use; None: whatever comes
    good: int = 0  # the largest that came through
    # Samples, and numbers in a sample, that came through so often that backward may reduce at once.
    proven: list[tuple[int, int]] = field(default_factory=list)
    trials: list[tuple[int, int]] = field(default_factory=list)  # windows beyond that
    too_large: int | None = None  # the smallest that did not fit
    since: int = 0  # windows at this size
    wait: int = FIRST_WAIT

    def __post_init__(self) -> None:
        self.size = self.most if self.size is None else self.size

    def ran_out(self, largest: int) -> bool:
        """A micro-batch of `largest` samples did not fit; False where there is no smaller one."""
        if largest <= 1:
            return False
        self.wait = min(self.wait * 2, LONGEST_WAIT) if 0 < self.good < largest else FIRST_WAIT
        self.good, self.proven = min(self.good, largest - 1), [one for one in self.proven if one[0] < largest]
        self.size, self.too_large = max(self.good, -(-largest // 2)), largest
        self.trials, self.since = [], 0
        return True

    def is_proven(self, largest: int, width: int) -> bool:
        return any(largest <= samples and width <= numbers for samples, numbers in self.proven)

    def came_through(self, largest: int, parts: int, width: int = 0) -> None:
        """A window whose batch was cut into `parts` of at most `largest` samples, each of at most `width` numbers."""
        if parts == 0:
            return
        self.good = max(self.good, largest)
        if not self.is_proven(largest, width):
            self.trials.append((largest, width))
            if len(self.trials) == PROOFS:
                least = min(one for one, _ in self.trials), min(numbers for _, numbers in self.trials)
                self.proven, self.trials = [*self.proven[-MOST_PROVEN:], least], []
        if self.too_large is None or self.size is None or parts == 1:
            return  # nothing is known that does not fit, or the size is not what bounds this batch
        if largest >= self.too_large:
            self.too_large = 2 * largest
        self.since += 1
        if self.since >= self.wait and self.size != self.most:
            self._try_larger(largest * parts, parts)

    def _try_larger(self, length: int, parts: int) -> None:
        """Half way to what did not fit; where that is one sample away, that itself."""
        assert self.size is not None and self.too_large is not None
        larger = max(self.size + 1, (self.size + self.too_large) // 2)
        while larger < self.too_large and -(-length // larger) == parts:
            larger += 1  # it would cut the batch as before
        self.size, self.since = larger if self.most is None else min(larger, self.most), 0

    def state(self) -> dict[str, Any]:
        """What was learned. Not what was asked for, nor what is proven: that was by this process, on this device."""
        own = ("most", "proven", "trials")
        return {name: value for name, value in asdict(self).items() if name not in own}

    def load(self, state: Mapping[str, Any]) -> None:
        """What `learned_sizes` gave."""
        self.proven, self.trials = [], []
        self.good, self.too_large = state["good"], state["too_large"]
        self.since, self.wait = state["since"], state["wait"]
        if self.too_large is not None:  # else the size is what was asked for then
            self.size = state["size"]
        if self.most is not None:
            self.size = self.most if self.size is None else min(self.size, self.most)


def learned_sizes(state: Mapping[str, Any]) -> dict[str, int | None]:
    """What a fit's state holds, or an error that says what is wrong with it."""
    at_least = {"good": 0, "since": 0, "wait": 1}
    found: dict[str, int | None] = {name: whole_number_in(state, name, least) for name, least in at_least.items()}
    for name in ("size", "too_large"):
        found[name] = None if state.get(name, 0) is None else whole_number_in(state, name, 1)
    return found


OK, OUT_OF_MEMORY, FAILED = range(3)


class Guard:
    """Ranks agree that all came through, before any of them reduces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.verdicts: list[int] = []  # by rank, when they last agreed

    def __call__(self) -> None:
        self.tell(OK)
        if any(self.verdicts):
            raise _FailedElsewhere

    def hear(self, error: Exception) -> None:
        """Tells the others of an error on this rank, unless it is theirs."""
        if not isinstance(error, _FailedElsewhere):
            self.tell(OUT_OF_MEMORY if is_out_of_memory(error) else FAILED)

    def tell(self, verdict: int) -> None:
        self.verdicts = [int(row[0]) for row in self._engine.agree([float(verdict)])]

    def ranks(self, verdict: int) -> str:
        """Those of it, as a text."""
        return ", ".join(str(rank) for rank, found in enumerate(self.verdicts) if found == verdict)


class _FailedElsewhere(Exception):  # noqa: N818  # it never leaves this library
    """Another rank did not come through."""


class Before:
    """Buffers and random numbers as they were before the window; gradients are the window's own to clear."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._copies: list[Tensor] = []
        self.random: dict[str, Any] = {}

    def look(self) -> None:
        # All of them: what batch normalisation does to its statistics shows in no version counter.
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        found = [(m, name, b) for m in modules for name, b in m.named_buffers(recurse=False, remove_duplicate=False)]
        if [id(b) for *_, b in found] != [id(b) for *_, b in self._buffers]:
            with torch.inference_mode(False):  # else they could not be written to outside of it
                self._copies = [torch.empty_like(buffer) for *_, buffer in found]
        self._buffers = found
        _copy(self._copies, [buffer for *_, buffer in found])
        self.random = random_state(random_devices(self._models))

    def buffers_of(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """A module's own, as they are and as they were."""
        pairs = zip(self._buffers, self._copies, strict=True)
        return [(module._buffers.get(name, was), was) for (of, name, _), was in pairs if of is module]  # type: ignore[misc]

    def put_back(self) -> None:
        self.put_back_buffers()
        set_random_state(self.random)

    def put_back_buffers(self) -> None:
        pairs = zip(self._buffers, self._copies, strict=True)
        places = [_without_repeats(buffer, copy) for (*_, buffer), copy in pairs]
        _copy([buffer for buffer, _ in places], [copy for _, copy in places])
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer  # the loss may have put another in its place


def _without_repeats(buffer: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    """Both, where an expanded buffer has each element once: torch writes to no other."""
    if buffer.layout is torch.strided:
        for dim, (stride, size) in enumerate(zip(buffer.stride(), buffer.shape, strict=True)):
            if stride == 0 and size > 1:
                buffer, copy = buffer.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    return buffer, copy


@torch.no_grad()
def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for target, source in zip(to, of, strict=True):
        target.copy_(source)


class Transaction:
    """Runs a window and steps it; undoes it on all ranks where that fails, and runs it again where that may help."""

    def __init__(self, engine: Engine, fit: Fit, before: Before, index: int) -> None:
        self._engine, self._fit, self._before = engine, fit, before
        self._index = index  # of the update

    def __call__(self, plan: Callable[[Guard], Window], run: Callable[[Window], None]) -> Update:
        ran_again = False
        while True:
            self._before.look()
            guard = Guard(self._engine)
            window = plan(guard)
            all_came_through = False
            try:
                run(window)
                all_came_through = True
                update = window.step()
            except NonfiniteError as error:
                self._before.put_back()
                if error.is_placed or ran_again:
                    raise
                ran_again = True  # and look at each micro-batch: the error then names it
            except Exception as error:
                if all_came_through:  # in step(), where no rank waits to hear of it, and weights may have changed
                    window.discard()
                    raise
                self._undo(window, guard, error)
            except BaseException:
                window.discard()
                if window._stage is not Stage.STEPPED:  # else Ctrl-C came after the weights moved
                    self._before.put_back()
                raise
            else:
                self._fit.came_through(window._plan.largest, max(window._plan.kept), window._plan.widest)
                return update
            free()

    def _undo(self, window: Window, guard: Guard, error: Exception) -> None:
        """Puts all back, on all ranks; returns where a smaller micro-batch may fit."""
        is_reducing = window._reducing and self._engine.num_ranks > 1
        largest, rank = window._plan.largest, self._engine.rank
        window.discard()
        self._before.put_back()
        if isinstance(error, LostRanksError):
            raise error
        if isinstance(error, RuntimeError):
            self._engine.refuse_lost_ranks(error)
        try:
            if is_reducing and not is_out_of_memory(error):
                raise error  # the others are in the reduction, where nothing reaches them; or failed in the same way
            try:
                guard.hear(error)
            except DistaccumError as lost:
                raise DistaccumError(
                    f"rank {rank} failed where the other ranks cannot be told, since they wait for it in a collective "
                    f"of the model's wrapper ({in_short(error)}); start all ranks again, from a checkpoint"
                ) from lost
            if guard.verdicts[rank] == FAILED:
                raise error
            if failed := guard.ranks(FAILED):
                raise DistaccumError(
                    f"rank {failed} failed in update {self._index} (its own error says why); the window is undone on "
                    "all ranks, and nothing was stepped"
                )
            if not self._fit.ran_out(largest):
                seen = f": {in_short(error)}" if guard.verdicts[rank] == OUT_OF_MEMORY else ""
                raise DistaccumError(
                    f"a micro-batch of {largest} sample does not fit into the memory of rank "
                    f"{guard.ranks(OUT_OF_MEMORY)}{seen}; nothing was stepped. Use a smaller model or sample, "
                    "activation checkpointing, or a lower precision"
                )
        finally:
            del error  # or its traceback would keep the failed forward, and itself


def in_short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
