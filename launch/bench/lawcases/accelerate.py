"""Accelerate: `accumulate`, and the recipe for token means, both from its page *Performing gradient accumulation*.

Its prepared loader repeats samples (`even_batches`); otherwise ranks would wait for those that run out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from .task import WEIGHTS, Library, Outcome, Seen, Task

ACCELERATE = Library("Accelerate, `accumulate`", ("accelerate",), lacks=WEIGHTS)
RECIPE = Library("Accelerate, its token recipe", ("accelerate",))


def accelerator_of(task: Task, **options: Any) -> Any:
    """Makes an Accelerator as in a fresh process; its state otherwise lives as long as the process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=max(task.case.lengths[0]), **options)


def prepared(task: Task) -> tuple[Any, Any, Any, Any, Seen]:
    from accelerate.utils import DataLoaderConfiguration

    # By default no rank runs out; see the recipes.
    config = DataLoaderConfiguration(even_batches=task.case.key != "uneven")
    accelerator = accelerator_of(task, dataloader_config=config)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    model, wrapped, loader = accelerator.prepare(task.net, optimizer, task.loader())
    return accelerator, model, wrapped, loader, seen


def epoch(task: Task, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@ACCELERATE.cell("tail", "short", "tokens", "tokens2", "zero", "aux", "uneven", "empty")
def accumulate(task: Task) -> Outcome:
    *parts, seen = prepared(task)
    epoch(task, *parts)
    return Outcome(seen.weights)


@ACCELERATE.cell("ramp")
def ramp(task: Task) -> Outcome:
    accelerator, model, optimizer, loader, seen = prepared(task)
    updates = 0
    for batch in loader:
        accelerator.gradient_accumulation_steps = task.case.steps(updates)
        with accelerator.accumulate(model):
            accelerator.backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
    return Outcome(seen.weights)


@RECIPE.cell("tail", "short", "tokens", "tokens2", "zero", "uneven", "empty")
def token_recipe(task: Task) -> Outcome:
    from torch.nn.functional import cross_entropy

    accelerator, model, optimizer, loader, seen = prepared(task)
    batches = iter(loader)
    steps = accelerator.gradient_accumulation_steps
    remainder = len(loader) % steps or steps
    updates = -(-len(loader) // steps)
    for update in range(updates):
        window = [next(batches) for _ in range(remainder if update + 1 == updates else steps)]
        mine = sum(batch["labels"].ne(-100).sum() for batch in window)
        items = accelerator.gather(mine).sum().item()
        for i, batch in enumerate(window):
            apart = i + 1 < len(window) and accelerator.num_processes > 1
            with model.no_sync() if apart else nullcontext():
                logits, labels = model(batch["x"]).flatten(0, -2), batch["labels"].flatten()
                loss = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                accelerator.backward(loss * steps * accelerator.num_processes / items)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(seen.weights)


RECIPE.absent |= {"aux"}
ACCELERATE.absent |= {"scaler", "clip"}
