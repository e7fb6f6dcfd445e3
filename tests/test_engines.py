"""The law on every engine, in the same words: windows of every kind against one big batch."""

from __future__ import annotations

from typing import Any

import pytest
from engines import KINDS, law
from problems import CASES

# A window is a list of micro-batch sizes for each rank, as many ranks as there are (up to four).
LAYOUTS = [
    [[3, 3, 3]] * 4,
    [[4], [4], [4], [4]],  # short
    [[1, 6, 2], [5, 1, 3], [2, 2, 9], [1, 1, 1]],  # uneven sizes
    [[3, 2], [5], [1, 1, 1], [2]],  # uneven counts
    [[2, 3, 1], [], [1], [4, 4]],  # a dry rank
    [[], [2, 1, 4], [1], []],
]
GRID = [(name, sync) for name, kind in KINDS.items() for sync in kind.policies]


@pytest.mark.parametrize(("name", "sync"), GRID, ids=[f"{name}-{sync}" for name, sync in GRID])
def test_every_window_equals_one_big_batch(ranks, name, sync):
    kind = KINDS[name]
    layouts = LAYOUTS if kind.world > 1 else LAYOUTS[:4]
    for seen in ranks(kind.world).run(laws, name, sync, layouts, seconds=120):
        for case, windows in seen.items():
            for window in windows:
                assert window.gradient <= kind.bound, (case, window)
                assert window.loss <= kind.bound, (case, window)


def laws(name: str, sync: str, layouts: list[Any]) -> dict[str, Any]:
    return {case: law(name, case, layouts, sync=sync) for case in CASES}
