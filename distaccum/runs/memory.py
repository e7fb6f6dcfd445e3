"""Memory: recognises that it is short, and learns the size of a micro-batch that fits."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..batch import each_entry, is_list, tensors_in
from ..batches import Batches
from ..job import Job
from ..law import DistaccumError, whole_number

# Devices, the host, the host on Windows, and libraries say this where they have no error class of their own for it.
# cuBLAS is not initialized, and cuDNN supports nothing, where their handle or workspace does not fit.
MESSAGES = (
    *("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_NOT_INITIALIZED"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED"),
)
# As many updates go by before a larger size is tried.
FIRST_WAIT, LONGEST_WAIT = 16, 4096
# The optimizer makes its state in the first step, so the second window has less memory.
PROOFS, MOST_PROOFS = 2, 64
# No number of a state is below these; the last two may be None.
LEAST = {"good": 0, "since": 0, "wait": 1, "size": 1, "too_large": 1}


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether a smaller micro-batch may fit.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), is_out_of_memory(KeyError())
    (True, False)
    """
    # An error of ours may quote such an error.
    tells = isinstance(error, RuntimeError) and not isinstance(error, DistaccumError)
    is_short = tells and any(message in str(error) for message in MESSAGES)
    if is_short or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # After `raise error from error` the cause is the error itself.
    cause = error.__cause__
    return cause is not None and cause is not error and is_out_of_memory(cause)


def free() -> None:
    """Frees reference cycles that hold tensors, and the cached blocks of the device that torch computes on."""
    gc.collect()
    device = torch.get_device_module()
    # The host has none.
    if hasattr(device, "empty_cache"):
        device.empty_cache()


@dataclass
class MicroBatchSize:
    """The largest micro-batch known to fit; the same on all ranks, since all learn from the same facts.

    >>> known = MicroBatchSize(most=None)
    >>> known.ran_out(64), known.size
    (True, 32)
    >>> for _ in range(FIRST_WAIT):
    ...     known.succeeded(32, 0, parts=4)
    >>> known.size, known.ran_out(48), known.size  # a size in between is tried now and then, and given up again
    (48, True, 32)

    Attributes:
        most: The requested size; None is "auto".
        size: The size in use; None is no limit.
        good: The largest that succeeded.
        too_large: The smallest that did not fit.
        since, wait: The windows at this size, and how many there shall be before a larger one is tried.
        proofs: The samples in a micro-batch and the numbers in a sample, of windows that succeeded. After PROOFS of
            them a window with no more of either may reduce in its backward at once.
    """

    most: int | None
    size: int | None = None
    good: int = 0
    too_large: int | None = None
    since: int = 0
    wait: int = FIRST_WAIT
    proofs: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.most if self.size is None else self.size

    def ran_out(self, largest: int) -> bool:
        """Learns that a micro-batch of `largest` samples did not fit; returns False if there is no smaller one."""
        if largest <= 1:
            return False
        self.wait = min(self.wait * 2, LONGEST_WAIT) if 0 < self.good < largest else FIRST_WAIT
        self.good = min(self.good, largest - 1)
        self.proofs = [proof for proof in self.proofs if proof[0] < largest]
        # Another rank may cut larger than this one.
        self.size = min(max(self.good, -(-largest // 2)), self.most or largest)
        self.too_large = largest
        self.since = 0
        return True

    def is_proven(self, largest: int, width: int) -> bool:
        return sum(largest <= samples and width <= numbers for samples, numbers in self.proofs) >= PROOFS

    def succeeded(self, largest: int, width: int, *, parts: int) -> None:
        """Learns that a window fitted, cut into `parts` of at most `largest` samples with at most `width` numbers."""
        if parts == 0:
            return
        self.good = max(self.good, largest)
        if not self.is_proven(largest, width):
            self.proofs = [*self.proofs[-MOST_PROOFS:], (largest, width)]
        # A batch of one part was not bounded by the size.
        if self.too_large is None or self.size is None or parts == 1:
            return
        if largest >= self.too_large:
            self.too_large = 2 * largest
        self.since += 1
        if self.since >= self.wait and self.size != self.most:
            # Half way to the size that did not fit, or that size itself.
            larger = max(self.size + 1, (self.size + self.too_large) // 2)
            self.size = min(larger, self.most or larger)
            self.since = 0

    def state(self) -> dict[str, Any]:
        """The learned sizes alone: requested and proven sizes are valid only for this process and device."""
        return {name: getattr(self, name) for name in LEAST}

    def loaded(self, state: Mapping[str, Any], cure: str) -> MicroBatchSize:
        """A copy that resumes from what `state()` returned; raises if a number is missing or wrong."""
        numbers: dict[str, Any] = {
            name: whole_number(name, state.get(name), cure, least)
            for name, least in LEAST.items()
            if name not in ("size", "too_large") or state.get(name, 0) is not None
        }
        sizes = [size for size in (numbers.pop("size", None), self.most) if size is not None]
        # A size that nothing limited was the one requested then.
        size = min(sizes, default=None) if "too_large" in numbers else None
        return MicroBatchSize(self.most, size, **numbers)


def fit_of(job: Job) -> MicroBatchSize:
    """Returns what is known about the size that fits; the job's micro-batches follow it."""
    known: MicroBatchSize = job.fit or MicroBatchSize(job.most)
    job.fit = known
    return known


def measure(job: Job, batches: Batches) -> tuple[bool, tuple[int, int]]:
    """Measures the most samples in a micro-batch, and numbers in a sample; no backward reduces until such are proven.

    If ranks run in lockstep, a failure on one cannot be undone either way, so a requested size is trusted.
    """
    engine = job.engine
    lengths = batches.lengths or []
    costs = batches.costs
    if costs is not None:
        # A micro-batch of one row could not be cut further.
        lengths = [cost for cost, rows in zip(costs, lengths, strict=True) if rows > 1] or [1]
    largest = max(lengths, default=0)
    width = largest_sample(batches.micro_batches)
    # Each forward or backward waits for all ranks.
    in_step = engine.lockstep and engine.sync != "gathered"
    is_believed = in_step and not (job.config.most == "auto" and "gathered" in engine.policies)
    return not is_believed and not fit_of(job).is_proven(largest, width), (largest, width)


def largest_sample(micro_batches: Iterable[Any]) -> int:
    """The most numbers that a sample has in any one tensor, which tells a long text from a short one."""
    sizes = [0]
    for _, item, _ in itertools.chain.from_iterable(map(each_entry, micro_batches)):
        # Each entry of a list may be a sample.
        if is_list(item):
            sizes += [tensor.numel() for _, tensor in tensors_in(item)]
        elif isinstance(item, Tensor) and item.ndim and len(item):
            sizes.append(-(-item.numel() // len(item)))
    return max(sizes)
