"""What ranks that share samples send each other: tensor-parallel and context-parallel ranks, and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...law.shares import whole_number
from .cuts import number_of
from .network import REFRESH, Policy, policies_for

NOUNS = {"tp": "tensor-parallel rank", "cp": "context-parallel rank", "pp": "stage"}
SIZES = ("micro_batch_size", "tokens", "width", "layers")  # that activations are known from
CALLS = {
    "tp": "4 all-reduces of the activations per layer",
    "cp": "keys and values gathered per layer, their gradients reduced",
    "pp": "activations to the next stage, their gradients to the one before",
}


@dataclass(frozen=True)
class Sharing:
    """The ranks of a job, of which `tp * cp * pp` share each sample."""

    ranks: int
    tp: int
    cp: int
    pp: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sharing:
        """Raises ValueError where the ranks cannot be divided so."""
        numbers = {name: whole_number(name, given[name]) for name in NOUNS}
        found = cls(given["ranks"], **numbers)
        if found.ranks % found.size:
            words = " and ".join(f"{name}={number}" for name, number in numbers.items() if number > 1)
            raise ValueError(f"ranks={found.ranks} with {words}, expected a multiple of {found.size}")
        return found

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.size

    @property
    def reducing(self) -> int:
        """Ranks with gradients of the same weights."""
        return self.data_ranks * self.cp

    def part(self, whole: int) -> int:
        """Of the parameters, if all are cut alike."""
        return -(-whole // (self.tp * self.pp))

    def policies(self, parameters: int, nodes: int) -> list[Policy]:
        """Those that run beside such ranks, between gradients of the same weights."""
        if self.size == 1:
            return policies_for(parameters, self.ranks, nodes)
        wanted = [f"FSDP2, {sync}" for sync in ("every", "last", "gathered")]
        wanted += ["DDP, every", "DDP, last"] if self.tp == 1 else []  # which shows tensor-parallel parts as whole
        found = [one for one in policies_for(self.part(parameters), self.reducing, 1) if one.name in wanted]
        if self.pp == 1:
            return found
        *others, sharded = (one for one in found if one.name.endswith("last"))
        # A chunk's backward leaves a module gathered for the next chunk: one gather for each, and one for the first.
        once = (REFRESH, *sharded.once)
        return [*others, replace(sharded, each=sharded.each[:1] * self.pp, once=once)]

    def notes(self) -> Iterator[str]:
        if self.size == 1:
            return
        shared = [number_of(getattr(self, name), noun) for name, noun in NOUNS.items() if getattr(self, name) > 1]
        yield f"{number_of(self.data_ranks, 'data rank')} x {' x '.join(shared)}; batches go by data rank"
        if self.tp * self.pp > 1:
            whole = "; embeddings and norms may be whole" if self.tp > 1 else ""
            yield f"a rank has 1/{self.tp * self.pp} of the parameters if all are cut alike{whole}"
        if self.pp > 1:
            fewest = (self.pp - 1) / (2 * self.pp - 1)
            yield (
                f"a schedule (1F1B, GPipe) cuts a micro-step into C chunks, and stages stand idle {self.pp - 1} / (C + "
                f"{self.pp - 1}) of it: {fewest:.0%} with {self.pp}, the fewest, which are taken for what FSDP2 gathers"
            )
        yield "seconds are not predicted where ranks share samples"

    def sent(self, given: Mapping[str, Any], steps: int | None) -> Iterator[dict[str, Any]]:
        """Bytes that a rank sends along each dimension, None where the sizes of activations are not given."""
        for name in NOUNS:
            number = getattr(self, name)
            if number == 1:
                continue
            each = None if None in [given[size] for size in SIZES] else self._bytes(name, given)
            row = {"dimension": name, "ranks": number, "calls": CALLS[name], "bytes_per_micro_step": each}
            yield row | {"bytes_per_update": None if each is None or steps is None else steps * each}

    def _bytes(self, name: str, given: Mapping[str, Any]) -> int:
        """Of a micro-step, by rings; of a rank that sends most, a stage that is neither the first nor the last."""
        micro, tokens, width, layers = (int(given[size]) for size in SIZES)
        hidden = micro * -(-tokens // self.cp) * width * int(given["dtype_bytes"] or 4)
        layers = -(-layers // self.pp)
        if name == "tp":
            return -(-4 * layers * 2 * (self.tp - 1) * hidden // self.tp)
        if name == "cp":  # of the part of each rank, to all others; gloo's reduce-scatter all-reduces
            rounds = 1 + (2 if given["backend"] == "gloo" else 1)
            return rounds * layers * (self.cp - 1) * -(-2 * hidden // self.tp)
        return hidden if self.pp == 2 else 2 * hidden
