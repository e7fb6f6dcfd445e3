"""The cost of a window and a micro-step over the loop by hand: distaccum, Accelerate, Lightning Fabric, DeepSpeed 0.

    python launch/bench/overhead.py --out launch/results/overhead
    python launch/bench/overhead.py --rounds 5 --ranks 1  # a quick look at one process

A tiny model runs in one process and on two and four ranks (DDP, gloo), with the loops of contenders.py. Read the
ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from contenders import CONTENDERS, Contender, Loop, Task, as_torchrun, be_quiet, num_ranks, one_of, versions
from kit import CPU, Options, circumstances, header, in_ranks, in_turns, listed, quartiles, spelled, table, write
from torch import Tensor, nn
from torch.optim import SGD

SHAPE = "Linear(16, 16), the mean of its squares on micro-batches of 8 x 16, SGD, float32"
TURN = 16  # micro-steps, at least
Key = tuple[str, str, int]  # engine, name, micro-steps
Taken = Mapping[Key, Sequence[float]]
HAND, EVERY = "by hand", "DDP, every micro-step"

ABOUT = (
    f"Whole updates (forwards, backwards, reduction, step, clearing) of {SHAPE}, in turns: in each round each loop has "
    f"one, of as many windows as hold {TURN} micro-steps, at least one. Another window comes first and is not timed, "
    "so that a loop finds in its caches what it left there, and pays itself for what a window leaves the next to do. "
    "In one process by the processor's time; on ranks, where waiting counts, by the clock of rank 0."
)


def measure(keys: Sequence[Key], rounds: int) -> dict[Key, list[float]]:
    """Measures on this rank."""
    be_quiet()
    shared = num_ranks() > 1
    if shared:
        as_torchrun()
    windows = {key: partial(set_up(one_of(key[0], key[1]), key[2]).run, batches(key[2])) for key in keys}
    turns = {key: partial(repeat, window, num_windows(key)) for key, window in windows.items()}
    clock = time.perf_counter if shared else time.process_time
    taken = in_turns(turns, rounds, CPU, before=windows, clock=clock)
    return {key: [seconds / num_windows(key) for seconds in turns_of] for key, turns_of in taken.items()}


def set_up(contender: Contender, steps: int) -> Loop:
    torch.manual_seed(0)
    loop = contender.set_up(Task(nn.Linear(16, 16), loss_of, partial(SGD, lr=1e-4), steps))
    torch.set_num_threads(1)  # some libraries set it
    return loop


def repeat(window: Callable[[], object], times: int) -> None:
    for _ in range(times):
        window()


def num_windows(key: Key) -> int:
    """Windows per turn."""
    return max(1, TURN // key[2])


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(8, 16, generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def keys(ranks: int, steps: Sequence[int]) -> list[Key]:
    engine = "plain" if ranks == 1 else "DDP"
    chosen = [(one.engine, one.name) for one in CONTENDERS if one.engine == engine]
    if ranks > 1:
        chosen.append((EVERY, HAND))
    return [(engine, name, num) for engine, name in chosen for num in steps]


def rows(taken: Taken, steps: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each loop, compared with the first, which is the one by hand."""
    loops = list(dict.fromkeys((engine, name) for engine, name, _ in taken))
    reference = loops[0]
    few, many = min(steps), max(steps)

    def microseconds(loop: tuple[str, str], num: int) -> float:
        return 1e6 * statistics.median(taken[(*loop, num)]) / num

    def one_more(loop: tuple[str, str]) -> float:
        return (microseconds(loop, many) * many - microseconds(loop, few) * few) / max(many - few, 1)

    compared = []
    for engine, name in loops:
        loop = engine, name
        by_steps = {}
        for num in steps:
            pairs = zip(taken[(*loop, num)], taken[(*reference, num)], strict=True)
            ratio = quartiles([one / other for one, other in pairs])
            by_steps[num] = {"microseconds": microseconds(loop, num), "ratio": ratio}
        more = {"microseconds": one_more(loop), "ratio": one_more(loop) / one_more(reference)}
        spelled_out = f"{name}, {engine.removeprefix('DDP, ')}" if engine == EVERY else name
        compared.append({"loop": spelled_out, "steps": by_steps, "one_more": more if many > few else None})
    return compared


def lines_of(title: str, compared: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for row in compared:
        of_steps = [f"{cell['microseconds']:.0f} us, {spelled(cell['ratio'])}" for cell in row["steps"].values()]
        more = row["one_more"]
        one_more = "-" if more is None else f"{more['microseconds']:.0f} us, {more['ratio']:.2f}"
        cells.append([row["loop"], *of_steps, one_more])
    return [f"## {title}", "", *table(["micro-steps per window", *compared[0]["steps"], "one more"], cells)]


def main() -> None:
    parser = Options(__doc__)
    parser.counts("--steps", [1, 2, 4, 8, 32, 128], "per window")
    parser.counts("--ranks", [1, 2, 4], "1 is one process")
    parser.counts("--rounds", 50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, counts = sorted(set(options.steps)), sorted(set(options.ranks))

    about = circumstances(CPU) | versions()
    lines = header(
        "What a micro-step costs above the loop by hand",
        about,
        f"{ABOUT} {options.rounds} rounds. With {listed(versions())}.",
        "Microseconds per micro-step (median), and the ratio to the loop by hand in the same round: its median, and "
        "how far the middle half of the rounds reaches. *By hand, again* is the same loop twice: what it differs by is "
        "noise. *One more*: what a micro-step adds to a window, from the shortest and the longest. *Clipped* and "
        "*max_norm*: a norm is taken each update and nothing is reached by it.",
    )
    groups = {}
    for ranks in counts:
        given = keys(ranks, steps), options.rounds
        limit = 60 + 20 * options.rounds
        taken = measure(*given) if ranks == 1 else in_ranks(ranks, measure, *given, seconds=limit)[0]
        title = "One process" if ranks == 1 else f"{ranks} ranks, DDP on gloo"
        groups[title] = rows(taken, steps)
        lines += lines_of(title, groups[title])
    write(options.out, "\n".join(lines).rstrip(), {**about, "rounds": options.rounds, "groups": groups})


if __name__ == "__main__":
    main()
