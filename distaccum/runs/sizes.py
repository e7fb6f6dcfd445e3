"""The micro-batch size that fits into memory: how update() learns it, and from what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..cutting import each_entry, is_list, tensors_in
from ..feed import Batches
from ..job import Job
from ..law import whole_number

FIRST_WAIT, LONGEST_WAIT = 16, 4096  # updates until a larger size is tried
PROOFS = 2  # windows: the optimizer makes its state in the first step, so the second window has less memory
MOST_PROOFS = 64
LEAST = {"good": 0, "since": 0, "wait": 1, "size": 1, "too_large": 1}  # of a state's numbers; the last two may be None


@dataclass
class MicroBatchSize:
    """The largest micro-batch known to fit; the same on all ranks, since all learn from the same facts.

    >>> known = MicroBatchSize(most=None)
    >>> known.ran_out(64), known.size
    (True, 32)
    >>> for _ in range(FIRST_WAIT):
    ...     known.succeeded(32, parts=4)
    >>> known.size, known.ran_out(48), known.size  # a size in between is tried now and then, and given up again
    (48, True, 32)
    """

    most: int | None  # the requested size; None: "auto"
    size: int | None = None  # in use; None: no limit
    good: int = 0  # the largest that succeeded
    too_large: int | None = None  # the smallest that did not fit
    since: int = 0  # windows at this size
    wait: int = FIRST_WAIT
    # The samples in a micro-batch and the numbers in a sample, of windows that succeeded. After PROOFS of them a window
    # with no more of either may reduce in its backward at once.
    proofs: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.most if self.size is None else self.size

    def ran_out(self, largest: int) -> bool:
        """Learns that a micro-batch of `largest` samples did not fit; returns False if there is no smaller one."""
        if largest <= 1:
            return False
        self.wait = min(self.wait * 2, LONGEST_WAIT) if 0 < self.good < largest else FIRST_WAIT
        self.good, self.proofs = min(self.good, largest - 1), [one for one in self.proofs if one[0] < largest]
        self.size, self.too_large, self.since = max(self.good, -(-largest // 2)), largest, 0
        return True

    def is_proven(self, largest: int, width: int) -> bool:
        return sum(largest <= samples and width <= numbers for samples, numbers in self.proofs) >= PROOFS

    def succeeded(self, largest: int, parts: int, width: int = 0) -> None:
        """Learns that a window fitted, cut into `parts` of at most `largest` samples with at most `width` numbers."""
        if parts == 0:
            return
        self.good = max(self.good, largest)
        if not self.is_proven(largest, width):
            self.proofs = [*self.proofs[-MOST_PROOFS:], (largest, width)]
        if self.too_large is None or self.size is None or parts == 1:
            return  # no size is known not to fit, or this batch was not bounded by the size
        if largest >= self.too_large:
            self.too_large = 2 * largest
        self.since += 1
        if self.since >= self.wait and self.size != self.most:
            # Half way to the size that did not fit, or that size itself.
            larger = max(self.size + 1, (self.size + self.too_large) // 2)
            self.size, self.since = larger if self.most is None else min(larger, self.most), 0

    def state(self) -> dict[str, Any]:
        """The learned sizes alone: requested and proven sizes are valid only for this process and device."""
        return {name: value for name, value in asdict(self).items() if name in LEAST}

    def loaded(self, state: Mapping[str, Any], cure: str) -> MicroBatchSize:
        """A copy that resumes from what `state()` returned; raises if a number is missing or wrong."""
        found: dict[str, Any] = {
            name: whole_number(name, state.get(name), cure, least)
            for name, least in LEAST.items()
            if name not in ("size", "too_large") or state.get(name, 0) is not None
        }
        if "too_large" not in found:
            found.pop("size", None)  # it was the size requested then
        if self.most is not None and "size" in found:
            found["size"] = min(found["size"], self.most)
        return MicroBatchSize(self.most, **found)


def fit_of(job: Job) -> MicroBatchSize:
    """Returns what is known about the size that fits; the job's micro-batches follow it."""
    if job.fit is None:
        job.fit = MicroBatchSize(job.most)
    found: MicroBatchSize = job.fit
    return found


def measure(job: Job, batches: Batches) -> tuple[bool, int, int]:
    """Returns `Manner.measure`'s values: no backward may reduce until micro-batches like these are known to fit.

    If ranks run in lockstep, a failure on one cannot be undone either way, so a requested size is trusted.
    """
    engine, largest, width = job.engine, largest_of(batches), largest_sample(batches.micro_batches)
    in_step = engine.lockstep and engine.sync != "gathered"  # each forward or backward waits for all ranks
    is_believed = in_step and not (job.config.most == "auto" and "gathered" in engine.policies)
    return not is_believed and not fit_of(job).is_proven(largest, width), largest, width


def largest_of(batches: Batches) -> int:
    """The size of the largest micro-batch that could be cut further, in samples or in cost."""
    if batches.costs is None:
        return max(batches.lengths or [0])
    return max((cost for cost, rows in zip(batches.costs, batches.lengths or [], strict=True) if rows > 1), default=1)


def largest_sample(micro_batches: Iterable[Any]) -> int:
    """The most numbers that a sample has in any one tensor, which tells a long text from a short one."""
    found = [0]
    for _, item, _ in itertools.chain.from_iterable(map(each_entry, micro_batches)):
        if is_list(item):  # each entry may be a sample
            found += [tensor.numel() for _, tensor in tensors_in(item)]
        elif isinstance(item, Tensor) and item.ndim and len(item):
            found.append(-(-item.numel() // len(item)))
    return max(found)
