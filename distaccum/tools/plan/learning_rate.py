"""The learning rate for another batch size, by published rules of thumb."""

from __future__ import annotations

import math
from typing import Any, Literal

from ...law import Reduction

Optimizer = Literal["sgd", "adam"]
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287"
Rule = tuple[dict[str, Any], list[str]]  # values, and sentences


def scaled_learning_rate(
    batch_size: int,
    base_batch_size: int,
    lr: float | None,
    optimizer: Optimizer | None,
    betas: tuple[float, float],
    reduction: Reduction,
    updates_per_epoch: int | None = None,
) -> dict[str, Any]:
    """The values for `batch_size` by the rules, where `lr` and `betas` suit `base_batch_size`.

    >>> scaled_learning_rate(1024, 256, 0.1, "sgd", (0.9, 0.999), "mean")["lr"]
    0.4
    >>> found = scaled_learning_rate(1024, 256, 1e-3, "adam", (0.9, 0.999), "mean")
    >>> found["lr"], [round(beta, 6) for beta in found["betas"]], found["eps_times"]
    (0.002, [0.6, 0.996], 0.5)
    >>> scaled_learning_rate(1024, 256, 0.1, "sgd", (0.9, 0.999), "sum")["lr"]
    0.1
    """
    kappa, is_sum = batch_size / base_batch_size, reduction == "sum"
    rules = {
        "sgd": _sgd(kappa, lr, is_sum, updates_per_epoch),
        "adam": _adam(kappa, lr, is_sum, betas, base_batch_size),
    }
    chosen = [rule for name, rule in rules.items() if optimizer in (None, name)]
    advice = [sentence for _, sentences in chosen for sentence in sentences]
    if is_sum and kappa != 1:
        advice.append(
            f"a sum: max_norm x {kappa:g} if you clip, and SGD's weight decay x {kappa:g} to keep its relative weight"
        )
    values = {} if optimizer is None else chosen[0][0]
    return {"kappa": kappa, "reduction": reduction, "optimizer": optimizer, "advice": advice, **values}


def _sgd(kappa: float, lr: float | None, is_sum: bool, updates_per_epoch: int | None) -> Rule:
    times = 1.0 if is_sum else kappa
    rule = f"linear in the batch ({GOYAL}; held up to 8,192 on ImageNet there)"
    if is_sum:
        rule = (
            f"the gradient of a sum grows by {kappa:g} with the batch, which is the linear scaling; do not scale the "
            f"rate again ({GOYAL}, section 3 on normalising the loss)"
        )
    advice = [f"SGD: lr x {times:g}{_product(lr, times)}: {rule}"]
    if kappa > 1:
        epochs = "" if updates_per_epoch is None else f" ({5 * updates_per_epoch:,} updates)"
        start = f"the rate / {kappa:g}" if is_sum else "the base rate"
        advice.append(f"SGD: warm up from {start} over 5 epochs{epochs} (the same, section 2.2)")
    return {"lr_times": times, "lr": None if lr is None else lr * times}, advice


def _adam(kappa: float, lr: float | None, is_sum: bool, betas: tuple[float, float], base: int) -> Rule:
    root = math.sqrt(kappa)
    scaled = [round(1 - kappa * (1 - beta), 12) for beta in betas]
    shown, eps = ", ".join(f"{beta:g}" for beta in scaled), root if is_sum else 1 / root
    advice = [f"Adam: lr x {root:g}{_product(lr, root)}: square root of the batch ({MALLADI})"]
    if min(scaled) < 0:
        most = math.floor(base / (1 - min(betas)) + 1e-9)
        advice.append(
            f"Adam: betas would be {shown} by 1 - beta x {kappa:g}, and the rule does not hold below 0; keep the "
            f"batch at {most:,} or below (the same)"
        )
    else:
        advice.append(f"Adam: betas {shown}: 1 - beta x {kappa:g} (the same)")
    of_sum = "; the gradient of a sum is larger, and Adam divides by its size" if is_sum else ""
    advice.append(f"Adam: eps x {eps:g} (the same{of_sum})")
    values = {"lr_times": root, "lr": None if lr is None else lr * root, "eps_times": eps}
    return {**values, "betas": None if min(scaled) < 0 else scaled}, advice


def _product(lr: float | None, times: float) -> str:
    return "" if lr is None else f" = {lr * times:g}"
