"""What accumulators put on models and optimizers goes with them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engines import KINDS
from problems import make_net_without_router, micro_batches_of, run_window
from torch import nn

from distaccum import Accumulator

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


def num_hooks(model: nn.Module, optimizer: Any) -> int:
    holders = [*model.modules(), *model.parameters(), getattr(optimizer, "optimizer", optimizer)]
    return sum(len(getattr(holder, name, None) or ()) for holder in holders for name in HOOKS)


def hooks_after(kind: str, accumulators: int, options: dict[str, Any]) -> list[int]:
    """How many hooks there are before the first accumulator, with them, and when all are gone."""
    model, optimizer = KINDS[kind].wrap(make_net_without_router().float(), 0.1)
    found = [num_hooks(model, optimizer)]
    gc.disable()  # they go at once: a collection might come while torch goes through its hooks
    for _ in range(accumulators):
        accumulator = Accumulator(model, optimizer, steps=2, **options)
        for window in accumulator.windows(micro_batches_of([[2, 1]], 0, 0, torch.float32)):
            run_window(window, model).step()
        found.append(num_hooks(model, optimizer))
        del accumulator, window
    gc.enable()
    return [found[0], max(found), num_hooks(model, optimizer)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        ("plain", {"accumulate_dtype": torch.float64}),
        ("DDP", {}),
        ("DDP", {"accumulate_dtype": torch.float64}),
        ("FSDP2", {}),
        ("ZeRO 1", {}),
    ],
)
def test_hundred_accumulators_leave_no_hook(ranks, kind, options):
    if kind not in KINDS:
        pytest.skip("FSDP2 does not run on CPU in torch 2.6")
    for before, most, after in ranks(KINDS[kind].world).run(hooks_after, kind, 100, options):
        assert most > before, "a test that sees no hook sees none that stays"
        assert after == before
