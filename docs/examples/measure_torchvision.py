"""Measures train_one_epoch of torchvision's classification reference, with accumulation by hand and moved.

    python docs/examples/measure_torchvision.py [--from CHECKOUT]

Only that function is run, on the CPU, with a small network (GroupNorm), 44 random images and mixed labels, in float64.
The gradient at each `optimizer.step()` is compared with that of one batch of all images of the update, and the
averaged weights (EMA) with those of a loop with batches of 16.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measuring
import torch
from torch import nn

from distaccum import Accumulator

IMAGES, STEPS = 44, 4
# The usual addition, with a loader of batches of 4 instead of 16.
PLAIN = "            loss.backward()\n"
CLIP = """            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
"""
ZERO = "        optimizer.zero_grad()\n"
LAST = f"(i + 1) % {STEPS} == 0 or i + 1 == len(data_loader)"
DIVIDED = [
    (PLAIN, f"            (loss / {STEPS}).backward()\n"),
    (ZERO, f"        if i % {STEPS} == 0:\n            optimizer.zero_grad()\n"),
]
AT_END = [(CLIP, f"            if {LAST}:\n" + "".join("    " + line + "\n" for line in CLIP.splitlines()))]
EACH = [
    (CLIP, CLIP.replace("            optimizer.step()", f"            if {LAST}:\n                optimizer.step()"))
]
EMA = ("if model_ema and i %", f"if model_ema and ({LAST}) and i // {STEPS} %")
SMALL = [("micro_batch_size=32", "micro_batch_size=4")]


class Meters:
    """Stand-in for MetricLogger."""

    def __init__(self, **_: Any) -> None:
        self.meters = defaultdict(lambda: SimpleNamespace(update=lambda *args, **kwargs: None))

    def add_meter(self, *_: Any) -> None:
        pass

    def update(self, **_: Any) -> None:
        pass

    def log_every(self, loader: Any, *_: Any) -> Any:
        return loader


def train_one_epoch(source: str, pairs: list[tuple[str, str]]) -> Any:
    """Returns that function of a file, after replacements."""
    found = [
        one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == "train_one_epoch"
    ]
    text = "\n".join(source.split("\n")[found[0].lineno - 1 : found[0].end_lineno]) + "\n"
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in train_one_epoch")
        text = text.replace(old, new)
    utils = SimpleNamespace(
        MetricLogger=Meters, SmoothedValue=lambda **_: None, accuracy=lambda *_, **__: (torch.zeros(()),) * 2
    )
    import time

    names: dict[str, Any] = {"Accumulator": Accumulator, "nn": nn, "time": time, "torch": torch, "utils": utils}
    exec(compile(text, "train_one_epoch", "exec"), names)
    return names["train_one_epoch"]


def measure(function: Any, size: int, clip: float | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
    images, labels = torch.randn(IMAGES, 3, 8, 8), torch.randn(IMAGES, 5).mul(2).softmax(1)  # like labels from mixup
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)
    seen: dict[str, Any] = {"errors": [], "ema": 0}
    update_parameters = ema.update_parameters

    def counted(network: nn.Module) -> None:
        seen["ema"] += 1
        update_parameters(network)

    ema.update_parameters = counted  # type: ignore[method-assign]

    def look(*_: Any) -> None:
        first = 16 * len(seen["errors"])
        loss = criterion(model(images[first : first + 16]), labels[first : first + 16])
        exact = list(torch.autograd.grad(loss, list(model.parameters())))
        if clip is not None:
            norm = torch.nn.utils.get_total_norm(exact)
            exact = [one * min(1.0, clip / (norm + 1e-6)) for one in exact]
        seen["errors"].append(measuring.relative([p.grad for p in model.parameters()], exact))

    optimizer.register_step_pre_hook(look)
    loader = list(zip(images.split(size), labels.split(size), strict=True))
    args = SimpleNamespace(clip_grad_norm=clip, lr_warmup_epochs=0, model_ema_steps=1, print_freq=10)
    function(model, criterion, optimizer, loader, "cpu", 0, args, model_ema=ema)
    return {**seen, "average": [p.detach().clone() for p in ema.module.parameters()]}


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    source, moved = ((folder / kind / "train.py").read_text() for kind in ("original", "moved"))
    on_cpu = [("torch.cuda.amp.autocast(enabled=", "torch.autocast('cpu', enabled=")]
    rows = []
    # Clipping acts in each update, since the norms exceed it.
    for clip in (None, 0.1):
        exact = measure(train_one_epoch(source, on_cpu), 16, clip)
        for case, text, pairs, size in (
            ("as published, batches of 16", source, [], 16),
            ("by hand, EMA in each micro-step", source, DIVIDED + AT_END, 4),
            ("by hand, EMA in each update", source, [*DIVIDED, *AT_END, EMA], 4),
            ("by hand, clipped in each micro-step", source, [*DIVIDED, *EACH, EMA], 4),
            ("moved, micro-batches of 4", moved, SMALL, 16),
        ):
            if "clipped" in case and clip is None:
                continue
            seen = measure(train_one_epoch(text, on_cpu + pairs), size, clip)
            apart = measuring.relative(seen["average"], exact["average"])
            errors = ", ".join(map(measuring.number, seen["errors"]))
            rows.append([case, "none" if clip is None else clip, errors, seen["ema"], measuring.number(apart)])
    header = ["", "`--clip-grad-norm`", "error of each update's gradient", "EMA updates", "averaged weights off"]
    measuring.table(header, rows)
    measuring.versions("torchvision")


if __name__ == "__main__":
    made, _ = measuring.arguments("torchvision", __doc__)
    assert made is not None
    main(made)
