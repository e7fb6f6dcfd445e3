"""What overhead.py and growth.py time: updates of contenders.py's loops on a model so small that the rest shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from contenders import Contender, Loop, Task, as_torchrun, be_quiet, num_ranks, one_of
from measure import in_ranks, in_turns
from torch import Tensor, nn
from torch.optim import SGD

SHAPE = "Linear(16, 16), the mean of its squares on micro-batches of 8 x 16, SGD, float32"
TURN = 16  # micro-steps, or more
Key = tuple[str, str, int]  # engine, name, micro-steps

ABOUT = (
    f"Whole updates (forwards, backwards, reduction, step, clearing) of {SHAPE}, in turns: in each round each loop has "
    f"one, of as many windows as hold {TURN} micro-steps, at least one. Another window comes first and is not timed, "
    "so that a loop finds in its caches what it left there, and pays itself for what a window leaves the next to do. "
    "In one process by the processor's time; on ranks, where waiting counts, by the clock of rank 0."
)


def seconds_per_update(ranks: int, keys: Sequence[Key], rounds: int, limit: float) -> dict[Key, list[float]]:
    """In each round. `limit`: seconds for all of it; on ranks what takes longer is an error."""
    if ranks == 1:
        return measure(keys, rounds)
    return in_ranks(ranks, measure, keys, rounds, seconds=limit)[0]


def measure(keys: Sequence[Key], rounds: int) -> dict[Key, list[float]]:
    """On this rank."""
    be_quiet()
    shared = num_ranks() > 1
    if shared:
        as_torchrun()
    windows = {key: partial(set_up(one_of(key[0], key[1]), key[2]).run, batches(key[2])) for key in keys}
    turns = {key: partial(repeat, window, num_windows(key)) for key, window in windows.items()}
    clock = time.perf_counter if shared else time.process_time
    taken = in_turns(turns, rounds, torch.device("cpu"), before=windows, clock=clock)
    return {key: [one / num_windows(key) for one in found] for key, found in taken.items()}


def set_up(contender: Contender, steps: int) -> Loop:
    torch.manual_seed(0)
    loop = contender.set_up(Task(nn.Linear(16, 16), loss_of, partial(SGD, lr=1e-4), steps))
    torch.set_num_threads(1)  # some set it
    return loop


def repeat(window: Callable[[], object], times: int) -> None:
    for _ in range(times):
        window()


def num_windows(key: Key) -> int:
    """In a turn."""
    return max(1, TURN // key[2])


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(8, 16, generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()
