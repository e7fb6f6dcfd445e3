"""A window run for the caller: undone on all ranks where it fails, and run again where that may help."""

from __future__ import annotations

from collections.abc import Callable

from ..accumulating.commit import NonfiniteError
from ..engines import Engine
from ..gradients.memory import free, in_short, is_out_of_memory
from ..gradients.snapshot import Before
from ..law.errors import DistaccumError, LostRanksError
from ..law.sizes import Fit
from ..law.update import Update
from ..window.window import Stage, Window

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
        self.verdicts = [int(row[0]) for row in self._engine.peers.agree([float(verdict)])]

    def ranks(self, verdict: int) -> str:
        """Those of it, as a text."""
        return ", ".join(str(rank) for rank, found in enumerate(self.verdicts) if found == verdict)


class _FailedElsewhere(Exception):  # noqa: N818  # it never leaves this library
    """Another rank did not come through."""


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
                self._fit.came_through(window._plan.largest, max(window._plan.num_counted), window._plan.largest_sample)
                return update
            free()

    def _undo(self, window: Window, guard: Guard, error: Exception) -> None:
        """Puts all back, on all ranks; returns where a smaller micro-batch may fit."""
        is_reducing = window._reducing and self._engine.peers.num_ranks > 1
        largest, rank = window._plan.largest, self._engine.peers.rank
        window.discard()
        self._before.put_back()
        if isinstance(error, LostRanksError):
            raise error
        if isinstance(error, RuntimeError):
            self._engine.peers.refuse_lost(error)
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
