"""Prove a run: train again in one process with each update's samples in one batch, by hand, and compare.

    python launch/prove.py runs/demo

The loop below is plain PyTorch and shares with the run its data, model, loss, optimizer and schedule. It needs the
memory of the whole batch. Exit status 1 says that the run is not that of the big batches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training.config import Config, a_line, stop
from training.data import Order
from training.tasks import Task, loss_of, make_task
from training.wrapping import make_optimizer

LOGGED = {"index", "loss", "grad_norm", "lr", "stepped"}
BOUNDS = {"float64": 1e-10, "float32": 1e-3}  # in float32 training amplifies rounding


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run that has ended")
    parser.add_argument(
        "--bound", type=float, help="the largest relative difference that is equal (1e-10 in float64, 1e-3 in float32)"
    )
    given = parser.parse_args(arguments)
    if given.bound is not None and not given.bound > 0:
        stop(f"--bound {given.bound}, expected a number above 0")
    try:
        config = Config(**json.loads((given.run / "config.json").read_text()))
        log = [json.loads(line) for line in (given.run / "log.jsonl").read_text().splitlines()]
        weights = torch.load(given.run / "weights.pt", weights_only=True)
    except FileNotFoundError as error:
        stop(f"{error.filename} is not there, expected the folder of a run that has ended")
    except Exception as error:
        stop(f"{given.run} has files that are not those of a run: {a_line(error)}")
    if not all(isinstance(update, dict) and update.keys() >= LOGGED for update in log) or not isinstance(weights, dict):
        stop(f"{given.run} has files that are not those of a run, or of one of an earlier version")
    if not log or [update["index"] for update in log] != list(range(len(log))):
        stop(
            f"{given.run}/log.jsonl does not hold every update from the first, so that the run cannot be trained again"
        )
    if config.precision not in BOUNDS:
        stop(f"the run was in {config.precision}, whose rounding hides what is shown; use float32 or float64")
    bound = given.bound or BOUNDS[config.precision]
    try:
        worst = compare(config, log, weights)
    except OSError as error:
        stop(str(error))
    good = worst["the weights"] <= bound  # weights hold every update; in float32 a ReLU may flip in one gradient
    print(f"{given.run}: {len(log)} updates, against one process with one batch per update:")
    for name, value in worst.items():
        print(f"  largest relative difference of {name:<18} {value:.1e}")
    print(f"  {'equal' if good else 'NOT EQUAL'} ({config.precision}, bound {bound:.0e})")
    task = make_task(config)
    if not good and any(isinstance(module, nn.BatchNorm2d) for module in task.model.modules()):
        print("  the model has BatchNorm, which normalises each micro-batch by itself; --norm group is exact")
    if not good and is_random(task):
        print("  the model draws random numbers, as dropout does: other ones for a batch than for its micro-batches")
    return 0 if good else 1


def compare(config: Config, log: list[dict[str, Any]], weights: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative differences between the run and the same training by hand, by what was compared."""
    task = make_task(config)
    model = task.model
    order = Order(len(task.train), config.batch_size, config.seed)
    optimizer, schedule = make_optimizer(model, config, config.updates or config.epochs * order.updates_per_epoch)
    shapes, expected = ({name: one.shape for name, one in of.items()} for of in (weights, model.state_dict()))
    if other := sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)):
        stop(f"the run's weights are those of another model than its config.json names, as in {other[0]}")
    worst = {"a loss": 0.0, "a learning rate": 0.0}
    for update, seen in enumerate(log):
        keys = order.of_update(update).tolist()
        batch = task.collate([task.train[key] for key in keys])
        loss = loss_of(model(batch["inputs"]), batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm or math.inf)
        if seen["grad_norm"] is not None:
            worst["a gradient's norm"] = max(worst.get("a gradient's norm", 0.0), apart(seen["grad_norm"], norm))
        worst["a loss"] = max(worst["a loss"], apart(seen["loss"], loss.detach()))
        for group in optimizer.param_groups:  # a resumed run may have had another schedule
            worst["a learning rate"] = max(worst["a learning rate"], abs(seen["lr"] - group["lr"]) / config.lr)
            group["lr"] = seen["lr"]
        if seen["stepped"]:
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    theirs, ours = (
        torch.cat([w.flatten().double() for _, w in sorted(s.items())]) for s in (weights, model.state_dict())
    )
    return {**worst, "the weights": float((theirs - ours).norm() / ours.norm())}


def is_random(task: Task) -> bool:
    """True if the loss of a batch depends on random numbers."""
    batch = task.collate([task.train[0]] * 2)
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.append(float(loss_of(task.model(batch["inputs"]), batch["labels"])))
    return losses[0] != losses[1]


def apart(value: float | None, exact: Tensor) -> float:
    if value is None:  # the log has null for a number that is not finite
        return math.inf if exact.isfinite() else 0.0
    return float((value - exact.double()).abs() / exact.double().abs())


if __name__ == "__main__":
    raise SystemExit(main())
