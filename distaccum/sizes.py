"""The micro-batch size that fits into memory, as learned so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .law import whole_number_in

FIRST_WAIT, LONGEST_WAIT = 16, 4096  # updates until a larger size is tried
MOST_PROVEN = 32
PROOFS = 2  # windows: the optimizer makes its state after the first, which takes memory from the second


@dataclass
class MicroBatchSize:
    """The largest micro-batch that fits, as far as is known; the same on all ranks, since all learn from the same.

    >>> known = MicroBatchSize(most=None)
    >>> known.ran_out(64), known.size
    (True, 32)
    >>> for _ in range(FIRST_WAIT):
    ...     known.succeeded(32, parts=4)
    >>> known.size, known.ran_out(48), known.size  # a size in between is tried now and then, and given up again
    (48, True, 32)
    """

    most: int | None  # the size that was requested; None: "auto"
    size: int | None = None  # in use; None: no limit
    good: int = 0  # the largest that succeeded
    # Samples, and numbers in a sample, that succeeded PROOFS times, so that backward may reduce at once.
    proven: list[tuple[int, int]] = field(default_factory=list)
    trials: list[tuple[int, int]] = field(default_factory=list)  # of windows that are not proven yet
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

    def succeeded(self, largest: int, parts: int, width: int = 0) -> None:
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
        if self.since < self.wait or self.size == self.most:
            return
        larger = max(self.size + 1, (self.size + self.too_large) // 2)  # half way to what did not fit, or that itself
        while larger < self.too_large and -(-largest * parts // larger) == parts:
            larger += 1  # it would cut the batch as before
        self.size, self.since = larger if self.most is None else min(larger, self.most), 0

    def state(self) -> dict[str, Any]:
        """The learned sizes only: a requested or proven size holds only for this process and device."""
        own = ("most", "proven", "trials")
        return {name: value for name, value in asdict(self).items() if name not in own}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `learned_sizes` gave."""
        self.proven, self.trials = [], []
        self.good, self.too_large = state["good"], state["too_large"]
        self.since, self.wait = state["since"], state["wait"]
        if self.too_large is not None:  # else the size is the size that was requested then
            self.size = state["size"]
        if self.most is not None:
            self.size = self.most if self.size is None else min(self.size, self.most)


def learned_sizes(state: Mapping[str, Any]) -> dict[str, int | None]:
    """The numbers of a `MicroBatchSize`'s state; raises where one is missing or wrong."""
    at_least = {"good": 0, "since": 0, "wait": 1}
    found: dict[str, int | None] = {name: whole_number_in(state, name, least) for name, least in at_least.items()}
    for name in ("size", "too_large"):
        found[name] = None if state.get(name, 0) is None else whole_number_in(state, name, 1)
    return found
