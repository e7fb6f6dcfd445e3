"""The result of `plan`, and its text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...law.table import table, width, wrapped
from .cuts import Cut, Tail, number_of
from .network import LEVELS
from .plot import bytes_text, draw_plan, seconds_text


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The result of `plan`: None where an argument is missing, which `missing` names.

    `print(forecast)` is the text of `distaccum plan`, `to_json()` its `--json`, `plot(path)` its `--plot`.

    Attributes:
        given (dict[str, Any]): The arguments, with counts as numbers and what was measured or chosen.
        gradient_bytes (int | None): Bytes of a whole gradient.
        steps (int | None): Micro-batches per rank and update.
        windows (Cut | None): What an update holds by `windows(loader)`, in whole micro-batches: its `samples`, and in
            `ranks` groups of ranks that hold the same (`ranks`, `samples`, `micro_batches` as pairs of number and
            size).
        split (Cut | None): The same by `split(batch)` and `update(batch, loss_fn)`, which cut the batch exactly.
        windows_tail (Tail | None): The end of an epoch by `windows(loader)`: `updates` of the epoch, the `last` of them
            (a Cut), its `share` of a whole window's samples, `ranks_with_fewer_micro_batches` and `dry_ranks` in it.
        split_tail (Tail | None): The same by `split(batch)`.
        policies (tuple[dict[str, Any], ...]): A row for each engine and `sync`, with these keys: `policy`, its name;
            `bytes_per_micro_step`, `bytes_once` and `bytes_per_update` that a rank sends; `seconds_per_update` and
            their `timing`; `window_for`, the shortest windows that expose less than 10% and 5% communication;
            `next_doubling_wins`, the part of the time per sample that a window twice as long saves; and `line`, seconds
            per micro-step and per update.
        shared (tuple[dict[str, Any], ...]): A row for each way in which ranks share samples (`dimension`: tp, cp, pp):
            `ranks`, the `calls` of a micro-step, and `bytes_per_micro_step` and `bytes_per_update` that a rank sends.
        learning_rate (dict[str, Any] | None): `kappa`, the batch in base batches; `advice`, sentences; with `optimizer`
            also `lr_times`, `lr`, and for Adam `betas` and `eps_times`.
        notes (tuple[str, ...]): What was measured or chosen for you.
        missing (tuple[str, ...]): Which options to give for what is None.
    """

    given: dict[str, Any]
    gradient_bytes: int | None
    steps: int | None
    windows: Cut | None
    split: Cut | None
    windows_tail: Tail | None
    split_tail: Tail | None
    policies: tuple[dict[str, Any], ...]
    shared: tuple[dict[str, Any], ...]
    learning_rate: dict[str, Any] | None
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All attributes as plain dicts, tuples and numbers."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The same as a JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        given = self.given
        shape = f"{number_of(given['ranks'], 'rank')} on {number_of(given['nodes'], 'node')}"
        lines = [f"plan for {shape}", *(f"  {note}" for note in self.notes), *self._cuts(), *self._tails()]
        if self.policies:
            lines += ["", *self._sent()]
        if any(row["bytes_per_micro_step"] is not None for row in self.shared):
            lines += ["", *self._shared()]
        if any(row["line"] is not None for row in self.policies):
            lines += ["", *self._seconds()]
        if self.learning_rate is not None:
            batch, base = given["batch_size"], given["base_batch_size"]
            lines += ["", f"learning rate for a batch of {batch:,} from {base:,} (rules of thumb: try them)"]
            lines += [f"  {one}" for one in self.learning_rate["advice"]]
        if self.missing:
            lines += ["", "to know more, give", *(f"  {one}" for one in self.missing)]
        return "\n".join(wrapped(lines, width()))

    def plot(self, path: str | Path) -> None:
        """Draws seconds per micro-step against the window's length, and the parts of an update; needs matplotlib.

        Args:
            path: The file; its ending says png, svg or pdf.

        Raises:
            ValueError: There are no seconds to draw; `missing` says what to give.
        """
        draw_plan(self.as_dict(), Path(path))

    def _cuts(self) -> Iterator[str]:
        if self.steps is None or self.windows is None or self.split is None:
            return
        batch, micro, more = self.given["batch_size"], self.given["micro_batch_size"], self.windows.samples
        yield ""
        steps = f"{number_of(self.steps, 'micro-step')} per rank and update"
        yield f"steps: {steps}, for {batch:,} samples in micro-batches of {micro:,}"
        yield f"  windows(loader)  {self.windows}" + (f", {more - batch:,} more than asked" if more != batch else "")
        is_dry = any(not one.samples for one in self.split.ranks)
        of_dry = ", but an error under FSDP and ZeRO 3, where each rank needs a micro-batch" if is_dry else ""
        yield f"  split(batch)     {self.split}: exact{of_dry}"

    def _tails(self) -> Iterator[str]:
        if self.windows_tail is None or self.split_tail is None:
            return
        yield ""
        yield f"epoch of {self.given['samples']:,} samples, dealt out to the ranks one by one"
        for name, tail in (("windows(loader)", self.windows_tail), ("split(batch)", self.split_tail)):
            last = "the last is whole: " if tail.share == 1 else f"the last has {tail.share:.2%} of a window: "
            yield f"  {name:15}  {number_of(tail.updates, 'update')}; {last}{tail.last}"
            if not tail.ranks_with_fewer_micro_batches:
                continue
            fewer = f"{number_of(tail.ranks_with_fewer_micro_batches, 'rank')} with fewer micro-batches there"
            dry = f", {tail.dry_ranks:,} of them with none" if tail.dry_ranks else ""
            effect = "under FSDP and ZeRO 3 they run stand-ins"
            if tail.dry_ranks and tail.updates == 1:
                effect = "an error under FSDP and ZeRO 3, since no window before it gives a stand-in"
            yield f"  {'':15}  {fewer}{dry}; {effect}"

    def _sent(self) -> list[str]:
        parameters = f"{self.given['parameters']:,} parameters, {bytes_text(self.gradient_bytes)} of gradients"
        parts = self.given["tp"] * self.given["pp"]
        parameters += f", 1/{parts} on each rank" if parts > 1 else ""
        cells = [["", "each micro-step", "once", "per update"]]
        for row in self.policies:
            counts = (row[f"bytes_{name}"] for name in ("per_micro_step", "once", "per_update"))
            cells.append([row["policy"], *map(bytes_text, counts)])
        return [f"sent by each rank ({parameters}, on {self.given['backend']})", *table(cells, width())]

    def _shared(self) -> list[str]:
        cells = [["", "each micro-step", "per update"]]
        for row in self.shared:
            counts = (row[f"bytes_{name}"] for name in ("per_micro_step", "per_update"))
            cells.append([f"{row['dimension']} = {row['ranks']}: {row['calls']}", *map(bytes_text, counts)])
        given = self.given
        sizes = f"{given['micro_batch_size']:,} x {given['tokens']:,} tokens x {given['width']:,}"
        title = f"sent by each rank to those that share its samples ({sizes}, {number_of(given['layers'], 'layer')})"
        return [title, *table(cells, width())]

    def _seconds(self) -> list[str]:
        given, transport = self.given, self.given["link"]
        names = ("update", "compute", "exposed", "hidden", "latency")
        cells = [["", "s per update", *names[1:], *(f"< {level:.0%} from" for level in LEVELS), "2x wins"]]
        for row in self.policies:
            timing, windows, wins = row["timing"] or {}, row["window_for"], row["next_doubling_wins"]
            cell = [row["policy"], *(seconds_text(timing.get(name)) for name in names)]
            cell += ["-" if windows is None else _window(windows[f"{level:.0%}"]) for level in LEVELS]
            cells.append([*cell, "-" if wins is None else f"{wins:.1%}"])
        reached = f"{transport['reduce']:.0%} of the rate for reductions and {transport['gather']:.0%} for gathers"
        return [
            *("predicted", *table(cells, width())),
            f"  {given['micro_step_seconds']:.4g} s per micro-step{_rates_text(given)}",
            f"  {transport['latency'] * 1e6:g} us per hop, {reached}",
            f"  ({transport['source']})",
            "  exposed: communication that ranks wait for; hidden: during a forward or backward; latency: the part of "
            "both that does not depend on bytes; < 10% from: the shortest window that exposes less than 10% of its "
            "time, after which more accumulation hardly helps; 2x wins: time per sample saved by doubling the window",
        ]


def _rates_text(given: Mapping[str, Any]) -> str:
    between, within = given["link_gbit"], given["node_gbit"]
    if given["nodes"] == 1:
        return f", {within or between:g} Gbit/s between ranks"
    rate = "" if between is None else f", {between:g} Gbit/s between nodes"
    return rate + ("" if within is None else f", {within:g} within one")


def _window(length: int | None) -> str:
    return "never" if length is None else f"K = {length:,}"
