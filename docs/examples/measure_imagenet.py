"""Measures PyTorch's imagenet/main.py, as published and moved, with small random images, on the CPU.

    python docs/examples/measure_imagenet.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of the same images, in float64. In
the copies that run, --dummy gives a few random images of 32 x 32 in 10 classes, ResNet-18 has 10 outputs, and on two
ranks DDP also wraps the model on the CPU. All runs start from the same weights.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import measuring
import torch

SMALL = [
    ("datasets.FakeData(1281167, (3, 224, 224), 1000,", "datasets.FakeData(NUM, (3, SIZE, SIZE), 10,"),
    ("datasets.FakeData(50000, (3, 224, 224), 1000,", "datasets.FakeData(8, (3, SIZE, SIZE), 10,"),
    ("        model = models.__dict__[args.arch]()\n", "        model = MODEL()\n"),
]
WRAPPED = [("print('using CPU, this will be slow')", "model = torch.nn.parallel.DistributedDataParallel(model)")]
# The usual addition to this loop: mini-batches of 4, a step after every fourth.
STEP = "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
BY_HAND = [
    (
        STEP,
        "        (loss / 4).backward()\n        if (i + 1) % 4 == 0:\n            optimizer.step()\n"
        "            optimizer.zero_grad()\n",
    )
]
TAIL = [(BY_HAND[0][0], BY_HAND[0][1].replace("% 4 == 0", "% 4 == 0 or i + 1 == len(train_loader)"))]


def child(spec: dict[str, Any]) -> None:
    import torch.distributed as dist
    import torchvision

    from distaccum.batchnorm import to_groupnorm

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    if not spec["batchnorm"]:
        to_groupnorm(model)
    seen: dict[str, Any] = {"errors": [], "statistics": [], "sizes": [], "largest": 0, "twice": 0}
    samples: list[Any] = []
    before: list[Any] = [copy.deepcopy(model)]

    def make() -> Any:
        def hook(module: Any, inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                samples.append([inputs[0].clone()])
                seen["largest"] = max(seen["largest"], len(inputs[0]))

        model.register_forward_pre_hook(hook)
        return model

    class Criterion(torch.nn.CrossEntropyLoss):
        def forward(self, output: Any, target: Any) -> Any:
            if torch.is_grad_enabled():
                samples[-1].append(target.clone())
            return super().forward(output, target)

    def look(optimizer: Any) -> None:
        of_all = [list(samples)]
        if dist.is_initialized():
            of_all = [None] * dist.get_world_size()  # type: ignore[list-item]
            dist.all_gather_object(of_all, samples)
        images, labels = (torch.cat(part) for part in zip(*(one for rank in of_all for one in rank), strict=True))
        unique = {tuple(image.flatten()[:8].tolist()): i for i, image in enumerate(images)}
        seen["twice"] += len(images) - len(unique)
        keep = sorted(unique.values())
        reference = before[0]
        reference.load_state_dict({**model.state_dict(), **dict(before[0].named_buffers())})
        reference.zero_grad()
        torch.nn.functional.cross_entropy(reference(images[keep]), labels[keep]).backward()
        found, exact = ([p.grad for p in network.parameters()] for network in (model, reference))
        seen["errors"].append(measuring.relative(found, exact))
        seen["sizes"].append(len(keep))
        samples.clear()

    torch.nn.CrossEntropyLoss = Criterion  # type: ignore[misc]
    measuring.before_steps(look)
    import builtins

    builtins.MODEL, builtins.NUM, builtins.SIZE = make, spec["images"], spec["size"]  # type: ignore[attr-defined]
    words = ["--dummy", "--no-accel", "--epochs", "1", "-j", "0", "-p", "100", "--seed", "0", *spec["words"]]
    if spec["ranks"] > 1:
        words += ["--dist-backend", "gloo", "--dist-url", "env://"]
    measuring.script(spec["folder"], "main.py", words)
    seen["left"] = sum(len(images) for images, _ in samples)
    buffers = [(name, value) for name, value in model.named_buffers() if "running" in name]
    exact = dict(before[0].named_buffers())
    if buffers:
        seen["statistics"] = measuring.relative([v for _, v in buffers], [exact[n] for n, _ in buffers])
    seen["first"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save(seen, spec["result"])


def main(folder: Path) -> None:
    work = folder / "measured"
    measuring.remove(work)
    rows = []
    hand, sixteen, four = ["-b", "4"], ["-b", "16"], ["-b", "16", "--micro-batch-size", "4"]
    published = ("as published, `-b 16`", "original", [], sixteen)
    for (case, kind, more, words), ranks, images, batchnorm in (
        (published, 1, 42, False),
        (("by hand, `-b 4`, the tail left", "original", BY_HAND, hand), 1, 42, False),
        (("by hand, `-b 4`, the tail stepped", "original", TAIL, hand), 1, 42, False),
        (("moved, `-b 16 --micro-batch-size 4`", "moved", [], four), 1, 42, False),
        (published, 1, 42, True),
        (("moved, micro-batches of 4", "moved", [], four), 1, 42, True),
        (published, 2, 42, False),
        (("moved, micro-batches of 4", "moved", [], four), 2, 42, False),
    ):
        pairs = SMALL + more + (WRAPPED if ranks > 1 else [])
        place = measuring.copy(folder / kind, work / str(len(rows)), {"main.py": pairs})
        results = measuring.run_well(
            {
                "folder": str(place),
                "words": words,
                "images": images,
                "size": 32,
                "batchnorm": batchnorm,
            },
            ranks,
        )
        seen = results[0]
        rows.append(
            [
                case,
                ranks,
                images,
                "BatchNorm" if batchnorm else "GroupNorm",
                seen["largest"],
                ", ".join(str(size) for size in seen["sizes"]) + (f"; {seen['left']} left" if seen["left"] else ""),
                ", ".join(measuring.number(error) for error in seen["errors"]),
                measuring.number(seen["statistics"]) if batchnorm else "",
            ]
        )
    header = ["", "ranks", "images", "norm", "images in a forward", "different images in each update"]
    measuring.table([*header, "error of each update's gradient", "error of running statistics"], rows)
    place = measuring.copy(folder / "original", work / "cpu-original", {"main.py": SMALL})
    alone = measuring.run({"folder": str(place), "words": sixteen, "images": 42, "size": 32, "batchnorm": False}, 2)
    apart = measuring.relative([alone[0]["first"]], [alone[1]["first"]])
    place = measuring.copy(folder / "moved", work / "cpu-moved", {"main.py": SMALL})
    refused = measuring.run({"folder": str(place), "words": four, "images": 42, "size": 32, "batchnorm": False}, 2)
    print(
        f"\nTwo ranks on a CPU, as published: the ranks' weights are {measuring.number(apart)} apart after one epoch."
    )
    print(f"Moved: {refused[0]['error']}")
    measuring.versions("imagenet")


if __name__ == "__main__":
    measuring.start("imagenet", __doc__, main, child)
