"""Facts of a run, each true by construction; the verdict is made of the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ..text import plural
from .parts import Criterion, Run, ends


def facts_of(run: Run) -> Iterator[str]:
    """The table of facts: of weights, by line; then of what happened to losses, gradients and schedules."""
    yield from map(_weights, run.criterions())
    yield from _losses(run)
    yield from _gradients(run.seen[0]["updates"])
    for known in run.seen[0]["schedules"].values():
        of = f" of {known['length']}" * bool(known["length"])
        yield f"{known['line']}: {known['name']} is at step {known['at']}{of} at the end"
    yield from _span(run)


def _weights(criterion: Criterion) -> str:
    what = "a loss of the script's own" if criterion.is_own else criterion.name
    text = f"{criterion.where}: {what}, {plural(criterion.common, 'micro-batch')} an update"
    if any(part.total is None for part in criterion.parts):
        return f"{text}: neither a mean nor a sum, so that its weights are not known"
    each = [(part.each() for part in parts if part.total) for parts in criterion.updates.values()]
    most = max([high / low for low, high in map(ends, each) if low], default=1.0)
    low, high = ends(criterion.totals.values())
    adds_up = f"{low:.4g}" if high - low <= 5e-3 * high else f"{low:.4g} to {high:.4g}"
    text += f": weigh 1 to {most:.3g}" if most > 1 + 1e-3 else ": weigh alike"
    if not criterion.totals:
        return f"{text} as backward gives them; what a step adds up to is not known"
    return f"{text} within an update, which adds up to {adds_up} of its mean"


def _losses(run: Run) -> Iterator[str]:
    unused = Counter[str]()
    cleared = Counter[str]()
    for ranks in run.whole.values():
        unused.update({site[0]: sum(nums) for site, nums in ranks[0]["unused"].items()})
        cleared.update(backward["cleared"][1] for backward in ranks[0]["backwards"] if backward["cleared"])
    yield from (f"{line}: {num} losses with no backward" for line, num in unused.items())
    yield from (f"{line}: clears {num} backwards that no step used" for line, num in cleared.items() if line)


def _gradients(updates: Iterable[dict[str, Any]]) -> Iterator[str]:
    touched = dict[str, list[int]]()
    events = Counter[tuple[str, str]]()
    for update in updates:
        events.update({(kind, line) for kind, line, *_ in update["events"] if line and kind in ("clip", "unscale")})
        for how in update["touched"]:
            touched.setdefault(how, []).append(update["index"])
    for how, indices in touched.items():
        yield f"gradients are {how} in {plural(len(indices), 'update')}, first in {indices[0]}"
    yield from (f"{line}: {kind} in {plural(num, 'update')}" for (kind, line), num in events.items())


def _span(run: Run) -> Iterator[str]:
    if looked := sorted({index for (_, index), ranks in run.updates.items() if "places" in ranks[0]}):
        last = run.seen[0]["made"] - 1
        first = next((i for i, index in enumerate(looked) if i != index), len(looked)) - 1
        later = f", then {', '.join(map(str, looked[first + 1 :][:8]))}" * (len(looked) > first + 1)
        yield f"receipts in updates 0 to {first}{later}, of 0 to {last}; what others do alone is not seen"
