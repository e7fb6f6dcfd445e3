"""Heard: the criterions that were called since the last step, and the seeds that backward gives them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from .criterions import count_of, is_over_pairs, reduction_of
from .ledger import quietly
from .lines import where
from .trained import KEPT, Backward

PRINTED = 1 << 12  # about so many numbers of a target make its print
_numbers = itertools.count()


@final
class Heard:
    """Calls of criterions, each a term to which backward adds the seed that flows into it.

    Attributes:
        key (str): Of a term in its node's metadata, where `note_divisors` finds it.
        batch (tuple[int, int]): The loader that was drawn from last, and the number of its batch.
        drawn (Counter[int]): How many batches each loader gave.
        calls (deque): Terms since the last step.
        current (Backward | None): The backward that runs now.
    """

    def __init__(self) -> None:
        self.key = f"distaccum {next(_numbers)}"
        self.calls: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.current: Backward | None = None
        self.batch = (0, 0)
        self.drawn = Counter[int]()

    @quietly
    def see(self, name: str, given: dict[str, Any], loss: Tensor) -> None:
        count, rows = count_of(name, given)
        (line, inner) = where()
        term = dict.fromkeys(("divisors", "seed", "low"))
        term |= {"site": (line, name, inner), "went": False, "eps": torch.finfo(loss.dtype).eps}
        term |= {"reduction": reduction_of(given), "count": count, "rows": rows, "batch": self.batch}
        term |= {"pairs": is_over_pairs(name, given), "print": print_of(given.get("target", given.get("targets")))}
        self.calls.append(term)
        node: Any = loss.grad_fn
        node.metadata[self.key] = term
        loss.register_hook(functools.partial(self._take, term))  # type: ignore[no-untyped-call]  # torch's

    @quietly
    @torch.no_grad()
    def _take(self, term: dict[str, Any], seed: Tensor) -> None:
        term["went"] = True
        if self.current is None:
            return
        term["seed"] = seed
        if seed.ndim:
            sizes = seed.abs()
            kept = term["count"]
            counts = sizes > 0
            if isinstance(kept, Tensor) and kept.shape == sizes.shape:  # ignored targets give nothing
                counts = counts & kept
                sizes = sizes * kept
            term |= {"reduction": "none", "count": counts.sum(), "all": counts.numel(), "seed": sizes.max()}
            term["low"] = sizes.where(counts, torch.inf).min()
        self.current.terms.append(term)

    def unused(self, backwards: Iterable[Mapping[str, Any]]) -> dict[Any, tuple[int, int]]:
        """By line, how many losses no backward followed: of a trained loader's batches that have none, and others."""
        trained = {backward["batch"] for backward in backwards}
        loaders = {loader for loader, _ in trained if loader}
        idle = [(term["site"], *term["batch"]) for term in self.calls if not term["went"]]
        self.calls.clear()
        unknown = Counter(site for site, loader, _ in idle if not loader)
        # Other loaders are for validation.
        skipped = Counter(site for site, *batch in idle if batch[0] in loaders and tuple(batch) not in trained)
        return {site: (skipped[site], unknown[site]) for site in unknown | skipped}


@torch.no_grad()
def print_of(target: Any) -> Tensor | None:
    """A number that differs between targets; 0 if all of its elements are equal."""
    if not isinstance(target, Tensor) or not target.ndim:
        return None
    some = 1.0 * target.flatten()[:: 1 + target.numel() // PRINTED]
    # Cosines, since whole numbers as weights give few classes equal sums.
    return ((some - some[:1]) * torch.arange(len(some), device=target.device, dtype=torch.float32).cos()).sum()
