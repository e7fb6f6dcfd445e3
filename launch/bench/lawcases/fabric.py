"""Lightning Fabric: the loop on its page *Efficient Gradient Accumulation*.

The user divides the loss and determines where a window ends.
"""

from __future__ import annotations

from typing import Any

import torch

from .byhand import usual
from .cases import SCALE
from .task import WEIGHTS, Library, Outcome, Seen, Task

FABRIC = Library("Lightning Fabric", ("lightning_fabric",), lacks=WEIGHTS)


def fabric_of(task: Task, **options: Any) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    if task.world > 1:
        options |= {"strategy": "ddp", "plugins": [LightningEnvironment()]}
    fabric = Fabric(accelerator="cpu", devices=task.world, **options)
    fabric.launch()
    return fabric


def prepared(task: Task) -> tuple[Any, Any, Any, dict[str, Any], Seen]:
    fabric = fabric_of(task)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    model, wrapped = fabric.setup(task.net, optimizer)
    loader = fabric.setup_dataloaders(task.my_loader(), use_distributed_sampler=False)
    ways = {"backward": fabric.backward, "apart": lambda: fabric.no_backward_sync(model)}
    return model, wrapped, loader, {**ways, "optimizer": optimizer}, seen


@FABRIC.cell("tail", "short", "tokens", "tokens2", "uneven", "empty", "zero", "aux")
def loop(task: Task) -> Outcome:
    model, optimizer, loader, ways, seen = prepared(task)
    ways.pop("optimizer")
    usual(task, model, optimizer, loader, **ways)
    return Outcome(seen.weights)


@FABRIC.cell("scaler")
def scaled(task: Task) -> Outcome:
    from lightning_fabric.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    fabric = fabric_of(task, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    seen = Seen(task.net)
    optimizers = [task.sgd([task.net.first]), task.sgd([task.net.second])]
    model, *optimizers = fabric.setup(task.net, *optimizers)
    for i, batch in enumerate(task.mine):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            fabric.backward(task.loss(model, batch) / 2)
        if i % 2:
            for optimizer in optimizers:
                optimizer.step()
            seen.take()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return Outcome(seen.weights, scaler.get_scale())


FABRIC.absent |= {"clip", "ramp"}
