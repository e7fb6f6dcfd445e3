"""Backwards: what surrounds each backward of a window: what refuses it, who hears of it, and what it is run by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import Tensor, nn

from ..engines import Engine
from ..law import DistaccumError
from ..meshes.pipeline import nothing_of
from .hooks import Hooks
from .ledger import Entry
from .refusals import refuse_backward
from .status import DONE, FAILED, WAITING, Status
from .tamper import Tamper

TAMPERED = "gradients were cleared or changed in mid-window (by zero_grad, clipping, unscale_ or another backward)"
Lose = Callable[[str], NoReturn]  # discards the window, and says why
Outputs = TypeVar("Outputs")


@final
class Backwards:
    """Those of one window, one after the other."""

    def __init__(
        self,
        window: weakref.ref[Any],
        status: Status,
        engine: Engine,
        parameters: Sequence[nn.Parameter],
        hooks: Hooks,
        tamper: Tamper,
    ) -> None:
        """`window` is what extensions hear of; it holds these."""
        self._status, self._source, self._ledger = status, status.source, status.ledger
        self._engine, self._parameters = engine, parameters
        self._window, self._before, self._after = window, hooks.before_backward, hooks.after_backward
        self._tamper = tamper
        self.is_first = True  # none ended yet

    def begin(self, lose: Lose) -> bool:
        """Raises where no backward may come now; whether the one that comes reduces."""
        status, source = self._status, self._source
        if status.turn is not WAITING:
            refuse_backward(status)
        if self.is_first and self._engine.stale(self._parameters, in_window=True):
            lose("gradients came into the window that its backward() did not make")
        if self._tamper.differs():
            lose(TAMPERED)
        if status.has_more_parts:
            return False
        return source.reduces

    def run(self, reduce: bool, call: Callable[..., Outputs], *given: Any) -> Outputs:
        """Calls what runs backward, which reduces if `reduce`."""
        status = self._status
        if self._before:
            sends = self._engine.will_reduce(reduce)
            for hear in self._before:
                hear(self._window(), sends)
        status.turn = FAILED
        try:
            outputs = call(*given)
        except RuntimeError as error:
            if self._engine.lockstep or self._engine.will_reduce(reduce):
                self._engine.peers.refuse_lost(error)
            raise
        for heard in self._after:
            heard(self._window())
        status.turn, self.is_first = DONE, False
        return outputs

    def run_trunk(self, lose: Lose, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The backward of what `heads` cut off."""
        source, engine = self._source, self._engine
        if not outputs and all(source.counts_here):  # else the term was left out
            raise DistaccumError("no loss of heads() depends on the trunk's outputs; compute them from what it yields")
        if self._tamper.differs():
            lose(TAMPERED)
        losses, seeds = list(outputs), self._ledger.seeds.unscaled(gradients)
        reduce = source.reduces
        if engine.will_reduce(reduce):
            losses, seeds = map(list, engine.with_earlier(losses, seeds))
        self.run(reduce, engine.backward, losses, seeds, reduce)
        self._tamper.look()

    def run_pieces(self, inputs: Sequence[Any], options: dict[str, Any], lose: Lose) -> Any:
        """A micro-batch in pieces: each loss is multiplied by its share, since no backward of ours takes a seed."""
        source, ledger, reduce = self._source, self._ledger, self.begin(lose)
        entries: dict[int, Entry] = {}

        def weigh(piece: int, outputs: Any, take_loss: Callable[[], Any]) -> Tensor:
            counts = () if source.is_stand_in else source.pieces[source.place][piece]
            if not any(counts):
                return nothing_of(outputs)
            loss = take_loss()
            named = loss if isinstance(loss, Mapping) else {}
            losses, seeds, entries[piece] = ledger.weigh(counts, False, None if named else loss, named)
            return torch.stack([one * seed for one, seed in zip(losses, seeds, strict=True)]).sum()

        outputs = self.run(reduce, self._engine.run, inputs, options, weigh)
        for entry in entries.values():
            ledger.note(entry, source.numbers[source.place])
        if not entries:
            ledger.expect_none()
        self._tamper.look()
        return outputs
