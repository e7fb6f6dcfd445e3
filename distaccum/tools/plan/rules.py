"""Arithmetic of a plan: how a batch is cut, the bytes of each policy, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from ...law import Reduction

Optimizer = Literal["sgd", "adam"]
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287"
SHARDS_KEPT = 10**9  # parameters; below it ZeRO 3 keeps what forward gathered until backward


def bytes_sent(parameters: int, size: int, ranks: int, nodes: int, steps: int | None) -> Iterator[dict[str, Any]]:
    """A row for each policy: bytes that a rank sends in ring collectives for a gradient of `size` bytes.

    Among W ranks a reduce-scatter or an all-gather sends (W - 1) / W of the bytes, an all-reduce twice that.
    """

    def sent(collectives: int, members: int = ranks, num_bytes: int = size) -> int:
        return -(-collectives * (members - 1) * num_bytes // members)

    zero3 = 1 if parameters <= SHARDS_KEPT else 2
    policies = [  # with what is sent in each micro-step, and once per window
        ("DDP, every", sent(2), 0),
        ("DDP, last", 0, sent(2)),
        ("ZeRO 0, last", 0, sent(2)),
        ("ZeRO 1 and 2, last", 0, sent(2) + sent(1)),
        ("ZeRO 2, every", sent(2), sent(1)),
        ("ZeRO 3, last", zero3 * sent(1), sent(1)),
        ("ZeRO 3, every", (zero3 + 1) * sent(1), 0),
        ("FSDP2, every", 3 * sent(1), 0),
        ("FSDP2, last", 2 * sent(1), sent(1)),
        ("FSDP2, gathered", 0, 2 * sent(1)),
    ]
    if 1 < nodes < ranks:  # shards within a node, and a replica on each
        shard, between = sent(1, ranks // nodes), sent(2, nodes, -(-size * nodes // ranks))
        policies += [("FSDP2 hybrid, last", 2 * shard, shard + between)]
        policies += [("FSDP2 hybrid, replicas", 3 * shard, between)]
    for name, each, once in policies:
        total = None if steps is None else steps * each + once
        yield {"policy": name, "bytes_per_micro_step": each, "bytes_once": once, "bytes_per_update": total}


def scaled_learning_rate(
    kappa: float, lr: float | None, optimizer: Optimizer | None, reduction: Reduction
) -> dict[str, Any]:
    """The values for a batch `kappa` times as large as the one that `lr` suits.

    >>> scaled_learning_rate(4, 0.1, "sgd", "mean")["lr"], scaled_learning_rate(4, 0.1, "sgd", "sum")["lr"]
    (0.4, 0.1)
    """
    is_sum, root = reduction == "sum", math.sqrt(kappa)
    eps = root if is_sum else 1 / root
    has_grown = f"the gradient of a sum has grown by {kappa:g} already ({GOYAL}, section 3), with a warm-up of 5 epochs"
    linear = f"linear in the batch ({GOYAL}; held up to 8,192 on ImageNet there), with a warm-up of 5 epochs"
    by_root = f"square root of the batch ({MALLADI}); eps x {eps:g}, 1 - beta x {kappa:g} while beta stays above 0"
    rules: dict[Optimizer, tuple[str, float, str]] = {
        "sgd": ("SGD", 1.0 if is_sum else kappa, has_grown if is_sum else linear),
        "adam": ("Adam", root, by_root),
    }
    advice = []
    for name, times, rule in rules.values() if optimizer is None else [rules[optimizer]]:
        advice.append(f"{name}: lr x {times:g}{'' if lr is None else f' = {lr * times:g}'}: {rule}")
    if is_sum and kappa != 1:
        advice.append(f"a sum: max_norm and SGD's weight decay x {kappa:g}, to keep their relative weight")
    if optimizer is None:
        return {"advice": advice}
    times = rules[optimizer][1]
    values = {"advice": advice, "lr_times": times, "lr": None if lr is None else lr * times}
    return values | {"eps_times": eps} if optimizer == "adam" else values
