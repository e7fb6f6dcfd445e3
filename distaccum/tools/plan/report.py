"""The result of `plan`, and how it is printed."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...law import plural
from ..terminal import fitted
from .rules import HELD, SENT


@dataclasses.dataclass(frozen=True)
class Alike:
    """Ranks with the same micro-batches, given as pairs (number of micro-batches, samples in each)."""

    ranks: int
    samples: int
    micro_batches: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = " + ".join(f"{times:,} x {size:,}" for times, size in self.micro_batches)
        return f"{plural(self.ranks, 'rank')}: {self.samples:,}{f' = {parts}' if parts else ', dry'}"


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cut of one update: its samples, by groups of ranks."""

    samples: int
    ranks: tuple[Alike, ...]

    def __str__(self) -> str:
        return f"{plural(self.samples, 'sample')} ({'; '.join(map(str, self.ranks))})"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The result of `plan`. Values whose arguments are missing are None, and `missing` names the arguments.

    `print(forecast)` prints the text of `distaccum plan`.

    Attributes:
        given (dict[str, Any]): The arguments, with counts as numbers, and the bytes of the model if known.
        steps (int | None): Micro-batches per rank and update.
        windows (Cut | None): An update of `windows(loader)`, in whole micro-batches: its `samples`, and `ranks`, groups
            of ranks with equal parts (`ranks`, `samples`, and `micro_batches` as pairs of number and size).
        split (Cut | None): An update of `split(batch)` and `update(batch, loss_fn)`, which cut the batch exactly.
        policies (tuple[dict[str, Any], ...]): A row for each engine and `sync`: `policy`, its name; what a rank holds,
            `parameters`, `gradients`, `optimizer`, `buffers`, and all of it with activations, `bytes`; whether it
            `fits`; and what a rank sends, `bytes_per_micro_step`, `bytes_once` and `bytes_per_update`.
        learning_rate (dict[str, Any] | None): `advice`, sentences; with `optimizer` also `lr_times`, `lr`, and for
            Adam `eps_times`.
        missing (tuple[str, ...]): Which options to give for the values that are None.
    """

    given: dict[str, Any]
    steps: int | None
    windows: Cut | None
    split: Cut | None
    policies: tuple[dict[str, Any], ...]
    learning_rate: dict[str, Any] | None
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All attributes as plain dicts, tuples and numbers."""
        return dataclasses.asdict(self)

    @property
    def answer(self) -> str:
        """Says in a sentence what fits in `memory`."""
        rows, memory = self.policies, bytes_text(self.given["memory"])
        plain = next(row for row in rows if row["policy"] in ("plain", "DDP, last"))
        least, more = min(rows, key=lambda row: row["bytes"]), "" if self.given["activations"] else " and activations"
        sizes = [f"{bytes_text(row['bytes'])}{more}" for row in (plain, rows[0], least)]
        engines = [row["policy"].replace(", ", " with sync=") for row in (plain, rows[0], least)]
        usual = "A plain module" if engines[0] == "plain" else "DDP"
        if not least["fits"]:
            return (
                f"Nothing fits in {memory}: the least is {engines[2]}, {sizes[2]} on each rank; take more ranks, a "
                "smaller dtype or offloading."
            )
        if plain["fits"]:
            return f"{usual} fits in {memory}: it takes {sizes[0]} on each rank."
        text = f"{usual} does not fit in {memory}: it takes {sizes[0]} on each rank. {engines[1]} fits with {sizes[1]}"
        if rows[0] is least:
            return f"{text}, and holds and sends the least."
        return f"{text} and sends the least; {engines[2]} holds the least, {sizes[2]}."

    def __str__(self) -> str:
        given = self.given
        shape = f"{plural(given['ranks'], 'rank')} on {plural(given['nodes'], 'node')}"
        lines = [self.answer] if self.policies and given["memory"] is not None else []
        lines += [f"plan for {shape}", *([f"  {given['measured']}"] if given["measured"] else [])]
        if self.steps is not None and self.windows is not None and self.split is not None:
            batch, micro, more = given["batch_size"], given["micro_batch_size"], self.windows.samples
            steps = f"{plural(self.steps, 'micro-step')} per rank and update"
            beyond = f", {more - batch:,} more than asked" if more != batch else ""
            is_dry = any(not one.samples for one in self.split.ranks)
            of_dry = ", but an error under FSDP and ZeRO 3, where each rank needs a micro-batch" if is_dry else ""
            lines += ["", f"steps: {steps}, for {plural(batch, 'sample')} in micro-batches of {micro:,}"]
            lines += [f"  windows(loader)  {self.windows}{beyond}", f"  split(batch)     {self.split}: exact{of_dry}"]
        about = f"{plural(given['parameters'], 'parameter')}, {given['optimizer'] or 'adam'}" if self.policies else ""
        tables = {f"held by each rank at its peak ({about})": dict(zip((*HELD, "all"), (*HELD, "bytes"), strict=True))}
        tables["sent by each rank"] = dict(zip(("micro-step", "once", "update"), SENT, strict=True))
        for title, columns in list(tables.items())[: 0 if not self.policies else min(2, given["ranks"])]:
            lines += ["", title, " " * 24 + "".join(f"{heading:>11}" for heading in columns)]
            for row in self.policies:
                cells = "".join(f"{bytes_text(row[name]):>11}" for name in columns.values())
                lines += [f"  {row['policy']:22}{cells}{'' if row['fits'] else '  too much'}"]
        if self.learning_rate is not None:
            batch, base = given["batch_size"], given["base_batch_size"]
            lines += ["", f"learning rate for a batch of {batch:,} from {base:,} (rules of thumb: try them)"]
            lines += [f"  {one}" for one in self.learning_rate["advice"]]
        if self.missing:
            lines += ["", "to know more, give", *(f"  {one}" for one in self.missing)]
        return fitted(lines)


def bytes_text(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"
