"""The result of `plan`, and its text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from ..table import table, width, wrapped
from .cuts import Cut, Tail, number_of


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The result of `plan`: None where an argument is missing, which `missing` names.

    `print(forecast)` is the text of `distaccum plan`, `to_json()` its `--json`.

    Attributes:
        given (dict[str, Any]): The arguments, with counts as numbers and what `model` gave.
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
            and `bytes_per_micro_step`, `bytes_once` and `bytes_per_update` that a rank sends.
        learning_rate (dict[str, Any] | None): `kappa`, the batch in base batches; `advice`, sentences; with `optimizer`
            also `lr_times`, `lr`, and for Adam `betas` and `eps_times`.
        notes (tuple[str, ...]): Remarks, as on the micro-batch that fits.
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
        if self.learning_rate is not None:
            batch, base = given["batch_size"], given["base_batch_size"]
            lines += ["", f"learning rate for a batch of {batch:,} from {base:,} (rules of thumb: try them)"]
            lines += [f"  {one}" for one in self.learning_rate["advice"]]
        if self.missing:
            lines += ["", "to know more, give", *(f"  {one}" for one in self.missing)]
        return "\n".join(wrapped(lines, width()))

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
        cells = [["", "each micro-step", "once", "per update"]]
        for row in self.policies:
            counts = (row[f"bytes_{name}"] for name in ("per_micro_step", "once", "per_update"))
            cells.append([row["policy"], *map(bytes_text, counts)])
        return [f"sent by each rank ({parameters})", *table(cells, width())]


def bytes_text(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"
