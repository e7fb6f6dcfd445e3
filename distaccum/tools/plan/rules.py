"""The arithmetic of a plan: the bytes that each policy holds and sends, and the learning rate."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from ...law import Reduction

Optimizer = Literal["sgd", "momentum", "adam"]
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers that an optimizer keeps per parameter
HELD = ("parameters", "gradients", "optimizer", "buffers")
SENT = ("bytes_per_micro_step", "bytes_once", "bytes_per_update")
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287"
SHARDS_KEPT = 10**9  # parameters; up to this many, ZeRO 3 keeps what forward gathered until backward
BUCKET = 5 * 10**8  # numbers in DeepSpeed's buckets, by default


class Sizes(NamedTuple):
    """The sizes of a whole model, in bytes except `numbers`."""

    numbers: int  # trained parameters
    parameters: int
    gradients: int
    layers: int  # how many equal ones, each gathered by itself
    activations: int | None = None  # of a micro-batch


def policies_of(
    sizes: Sizes, optimizer: Optimizer, ranks: int, nodes: int, steps: int | None, memory: int | None
) -> list[dict[str, Any]]:
    """Makes a row for each policy: the bytes that a rank holds at the peak of an update, and the bytes that it sends.

    Among W ranks a reduce-scatter or an all-gather sends (W - 1) / W of the bytes, an all-reduce twice that. Policies
    that fit in `memory` come first, sorted by what they send.
    """
    numbers, p, g, layer = sizes.numbers, sizes.parameters, sizes.gradients, sizes.parameters // sizes.layers
    state, copy = STATE[optimizer] * g, g * (optimizer == "adam")  # Adam's step on a GPU makes a copy
    bucket, w = min(numbers, BUCKET) * g // numbers, ranks // nodes
    zero3, masters = 1 + (numbers > SHARDS_KEPT), (1 + STATE[optimizer]) * 4 * numbers // ranks  # in float32

    def sent(collectives: int, members: int = ranks, num_bytes: int = g) -> int:
        return -(-collectives * (members - 1) * num_bytes // members)

    shard, between = sent(1, w), sent(2, nodes, -(-g * nodes // ranks))
    live, last = min(p, SHARDS_KEPT * p // numbers), 3 * layer + layer // ranks  # gathered by ZeRO 3 and FSDP2
    # Sent in each micro-step and once per window; then held: parameters, gradients, state and buffers.
    rows: list[Any] = [
        ("plain", 0, 0, p, g, state, max(layer, copy)),
        ("DDP, every", sent(2), 0, p, g, state, g + max(layer, copy)),
        ("DDP, last", 0, sent(2), p, g, state, g + max(layer, copy)),
        ("ZeRO 0, last", 0, sent(2), p, g, state, max(bucket, copy)),
        ("ZeRO 1 and 2, last", 0, sent(2) + sent(1), p, g, masters, bucket),
        ("ZeRO 2, every", sent(2), sent(1), p, g // ranks, masters, 2 * bucket),
        ("ZeRO 3, last", zero3 * sent(1), sent(1), p // ranks, g + g // ranks, masters, 2 * bucket + live),
        ("ZeRO 3, every", (zero3 + 1) * sent(1), 0, p // ranks, g // ranks, masters, 2 * bucket + live + layer),
        ("FSDP2, every", 3 * sent(1), 0, p // ranks, g // ranks, state // ranks, max(4 * layer, copy // ranks)),
        ("FSDP2, last", 2 * sent(1), sent(1), p // ranks, g, state // ranks, last),
        ("FSDP2, gathered", 0, 2 * sent(1), p // ranks, g, state // ranks, p + layer),
        ("FSDP2 hybrid, last", 2 * shard, shard + between, p // w, g, state // w, last),
        ("FSDP2 hybrid, replicas", 3 * shard, between, p // w, g // w, state // w, max(4 * layer, copy // w)),
    ]
    rows = rows[:1] if ranks == 1 else rows[1:] if 1 < nodes < ranks else rows[1:-2]
    found = [dict(zip(("policy", *SENT[:2], *HELD), row, strict=True)) for row in rows]
    for row in found:
        row["bytes_per_update"] = None if steps is None else steps * row[SENT[0]] + row[SENT[1]]
        row["bytes"] = sum(row[name] for name in HELD) + (sizes.activations or 0)
        row["fits"] = memory is None or row["bytes"] <= memory
    return sorted(found, key=lambda row: (not row["fits"], *(row[name] or 0 for name in (SENT[2], *SENT[:2], "bytes"))))


def scaled_learning_rate(
    kappa: float, lr: float | None, optimizer: Optimizer | None, reduction: Reduction
) -> dict[str, Any]:
    """The learning rate and its companions for a batch `kappa` times as large as the one that `lr` suits.

    >>> scaled_learning_rate(4, 0.1, "sgd", "mean")["lr"], scaled_learning_rate(4, 0.1, "sgd", "sum")["lr"]
    (0.4, 0.1)
    """
    is_sum, root = reduction == "sum", math.sqrt(kappa)
    eps = root if is_sum else 1 / root
    has_grown = f"the gradient of a sum has grown by {kappa:g} already ({GOYAL}, section 3), with a warm-up of 5 epochs"
    linear = f"linear in the batch ({GOYAL}; held up to 8,192 on ImageNet there), with a warm-up of 5 epochs"
    by_root = f"square root of the batch ({MALLADI}); eps x {eps:g}, 1 - beta x {kappa:g} while beta stays above 0"
    sgd = ("SGD", 1.0 if is_sum else kappa, has_grown if is_sum else linear)
    rules = {"sgd": sgd, "momentum": sgd, "adam": ("Adam", root, by_root)}
    advice = []
    for name, times, rule in [rules["sgd"], rules["adam"]] if optimizer is None else [rules[optimizer]]:
        advice.append(f"{name}: lr x {times:g}{'' if lr is None else f' = {lr * times:g}'}: {rule}")
    if is_sum and kappa != 1:
        advice.append(f"a sum: max_norm and SGD's weight decay x {kappa:g}, to keep their relative weight")
    if optimizer is None:
        return {"advice": advice}
    times = rules[optimizer][1]
    values = {"advice": advice, "lr_times": times, "lr": None if lr is None else lr * times}
    return values | {"eps_times": eps} if optimizer == "adam" else values
