"""What an accumulator holds between windows, early and late: Python objects and their memory, tensors and their bytes.

For overhead.py. Windows of one to three micro-batches of one to four samples, so that shares and counts differ from
one to the next.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit import in_ranks, table, wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from distaccum import Accumulator
from distaccum.extensions import NoiseScale

WARM = 200  # windows that come first: what is held once is there by then
Update = Callable[[], object]


def held() -> dict[str, int]:
    """Counted, not estimated: what the collector knows, and all blocks that Python has allocated."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    found = {"objects": len(objects), "tensors": len(tensors), "bytes": sum(storages.values())}
    del objects, tensors
    return {**found, "blocks": sys.getallocatedblocks()}


def update_of(kind: str) -> Update:
    """An update of one to three micro-batches of a tiny model, on one of the library's ways."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    accumulator = Accumulator(model, optimizer, **KINDS[kind](optimizer))

    def by_list() -> None:
        window = accumulator.window([torch.randn(random.randint(2, 5), 2) for _ in range(random.randint(1, 3))])
        for inputs in window:
            window.backward(loss_of(model(inputs)))
        window.step()

    def by_closure() -> None:
        rows = torch.randn(random.randint(2, 9), 2)
        if kind == "contrast":
            accumulator.contrast(rows, lambda inputs: (model(inputs),), loss_of)
        else:
            accumulator.update(rows, lambda inputs: loss_of(model(inputs)))

    return by_list if kind not in ("contrast", "update, micro_batch_size='auto'") else by_closure


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {  # the Accumulator's options
    "window(list)": lambda optimizer: {},
    "max_norm, scheduler, a scaler": lambda optimizer: {
        "max_norm": 1.0,
        "scheduler": LambdaLR(optimizer, lambda _: 1.0),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7),
    },
    "measure_noise": lambda optimizer: {"extensions": [NoiseScale()]},
    "update, micro_batch_size='auto'": lambda optimizer: {"micro_batch_size": "auto"},
    "contrast": lambda optimizer: {"micro_batch_size": 3},
}


def growth(kind: str, windows: int) -> tuple[dict[str, int], dict[str, int]]:
    """What is held after the first `WARM` windows, and after `windows` more."""
    random.seed(0)
    torch.set_num_threads(1)
    update = update_of(kind)
    for _ in range(WARM):
        update()
    held()  # which makes what it holds itself
    early = held()
    for _ in range(windows):
        update()
    return early, held()


def measure(windows: int) -> list[dict[str, Any]]:
    found = {kind: growth(kind, windows) for kind in KINDS}
    found["window(list), DDP on 2 ranks"] = in_ranks(2, growth, "window(list)", windows, seconds=60 + windows / 10)[0]
    return [{"kind": kind, "early": early, "late": late} for kind, (early, late) in found.items()]


def lines_of(found: list[dict[str, Any]], windows: int) -> list[str]:
    """A section of a page."""
    note = (
        f"Of a whole process with one accumulator, after its first {WARM} windows and after {windows:,} more, of "
        "different lengths. Objects are those that the collector knows, blocks all memory that Python has allocated."
    )
    cells = []
    for row in found:
        early, late = row["early"], row["late"]
        both = [f"{early[what]:,} to {late[what]:,}" for what in ("tensors", "bytes", "objects", "blocks")]
        cells.append([row["kind"], *both])
    heads = ["", "tensors", "bytes of tensors", "objects", "blocks of memory"]
    return ["## What is held between windows", "", *wrapped(note), *table(heads, cells)]
