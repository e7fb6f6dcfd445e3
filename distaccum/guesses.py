"""Guesses: what is called in another way than it is meant, and the sentence that answers; one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .law import DistaccumError
from .text import a, shown

LOOP = "write: for window in accumulator.windows(loader): for x in window: window.backward(loss); then window.step()"
PARTS = "name each part, as save(path, model=model, accumulator=accumulator)"
# Methods that are not there: the loop is meant.
METHODS = "backward", "step", "zero_grad", "accumulate", "no_sync", "clip_grad_norm_"
# By an argument that a call does not take, or by *, where it was given too many by position: the cure, or the name that
# was meant.
GUESSES = {
    **dict.fromkeys(("no_sync", "loader", "dataloader", "train_dataloader", "dataset"), LOOP),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"), "steps"),
    **dict.fromkeys(("clip", "max_grad_norm", "gradient_clip_val", "gradient_clipping", "grad_clip"), "max_norm"),
    **dict.fromkeys(("cost", "trim", "micro_batch_cost"), "say micro_batch_size=ByCost(4096, cost=..., trim=...)"),
    "grad_scaler": "scaler",
    "Accumulator *": "give the options by name, as steps=4",
    "split *": "give one batch, as split((x, y))",
    "window *": "give one list of micro-batches",
    "save *": PARTS,
    "load *": PARTS.replace("save", "load"),
}
Call = TypeVar("Call", bound=Callable[..., Any])
OPTIONS: list[str] = []  # of an Accumulator


def answering(call: Call) -> Call:
    """`call`, with an error that says what was meant if it is given an argument which it does not take."""
    name = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    own = [one.name for one in inspect.signature(call).parameters.values() if one.kind is not one.VAR_KEYWORD]
    own = [one for one in own if one != "self"]
    OPTIONS.extend(own if name == "Accumulator" else ())

    @wraps(call)
    def answers(*args: Any, **given: Any) -> Any:
        try:
            return call(*args, **given)
        except TypeError as error:
            unknown = next((key for key in given if key not in own), "*")
            is_own = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if is_own or (unknown == "*" and "given" not in str(error)):
                raise
            refuse_arguments(name, own, {unknown: given[unknown]} if unknown in given else {})

    return answers  # type: ignore[return-value]  # it takes what call takes


def refuse_arguments(name: str, own: Sequence[str], given: Mapping[str, object]) -> NoReturn:
    """Raises for an argument that the call `name` does not take, by name (`given`) or by position."""
    unknown = next(iter(given), "*")
    value = f"={shown(given[unknown])}" if given else ""
    seen = f"{unknown}{value}, which is no argument of it" if given else "more by position than it takes"
    cure = GUESSES.get(unknown if given else f"{name} *") or (unknown if unknown in OPTIONS else "")
    close = cure if cure in own else next(iter(get_close_matches(unknown, own, n=1)), "") if not cure else ""
    if close or cure in OPTIONS:
        cure = f"say {close}{value}" if close else f"give {cure}{value} to the Accumulator"
    takes = ", ".join(own) or "none"
    raise TypeError(f"{name}() got {seen}; {cure or 'it takes ' + takes}") from None


class Answering:
    """Answers a call of a method that is not there with the loop that is meant, and refuses copies."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # A copy would share gradients and flags, and a process group cannot be copied.
        raise DistaccumError(
            f"copying or pickling {a(type(self).__name__)}, which belongs to one model and its optimizer; copy these, "
            "make an Accumulator of the copies, and give it load_state_dict(accumulator.state_dict())"
        )

    if not TYPE_CHECKING:  # otherwise mypy would know any name

        def __getattr__(self, name: str) -> Any:
            cure = f"; {LOOP}" if name in METHODS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{cure}", name=name, obj=self)

        def __iter__(self) -> Any:
            raise TypeError(f"{type(self).__name__!r} object is no iterator; {LOOP}")

        def __enter__(self) -> Any:
            raise TypeError(f"{type(self).__name__!r} object is no context; {LOOP}")

        def __exit__(self, *_: object) -> None: ...
