"""Measures DeepSpeed's cifar10 example, as published, with DeepSpeed's own accumulation, and moved, on the CPU.

    python docs/examples/measure_deepspeed.py --from CHECKOUT

The gradient of an update is the change of the weights by plain SGD, divided by the learning rate. It is compared with
that of one batch of all distinct images of the update, in float64; DeepSpeed computes in float32. In the copies that
run, the data are 42 random images, the optimizer is SGD without clipping, and the final test is left out.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
from pathlib import Path
from typing import Any

import measuring
import torch

IMAGES, RATE = 42, 0.1
SMALL = [
    ('root="./data", train=True, download=True, transform=transform', f"{IMAGES}, (3, 32, 32), 10, transform"),
    ('root="./data", train=False, download=True, transform=transform', "4, (3, 32, 32), 10, transform"),
    ('"type": "Adam"', '"type": "SGD"'),
    (
        '                "betas": [0.8, 0.999],\n                "eps": 1e-8,\n                "weight_decay": 3e-7,\n',
        "",
    ),
    ('"lr": 0.001', f'"lr": {RATE}'),
    ('"warmup_min_lr": 0,', f'"warmup_min_lr": {RATE},'),
    ('"warmup_max_lr": 0.001', f'"warmup_max_lr": {RATE}'),
    ('"gradient_clipping": 1.0,', '"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,'),
    ("    test(model_engine, testset, local_device, target_dtype)\n", ""),
]
UNCLIPPED = [(", max_norm=1.0", "")]
# DeepSpeed's own accumulation: micro-batches of 4 up to a batch of 16.
OWN = [('"train_batch_size": 16,', '"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,')]


def child(spec: dict[str, Any]) -> None:
    import torchvision

    if spec["ranks"] == 1:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    sys.path.append(str(Path(__file__).resolve().parents[2] / "launch"))
    from wrappers import deepspeed_variables, import_deepspeed

    os.environ |= deepspeed_variables()
    deepspeed = import_deepspeed()
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    seen: dict[str, Any] = {"errors": [], "sizes": []}
    samples: list[Any] = []
    before: list[Any] = []

    class Criterion(torch.nn.CrossEntropyLoss):
        def forward(self, output: Any, target: Any) -> Any:
            samples[-1].append(target.clone())
            return super().forward(output, target)

    step = deepspeed.DeepSpeedEngine.step

    def stepped(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(engine, *args, **kwargs)
        network = engine.module
        pairs = zip(before[0].parameters(), network.parameters(), strict=True)
        change = [(b - p.detach().double()) / RATE for b, p in pairs]
        if any(bool(one.any()) for one in change):
            of_all: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, samples)
            images, labels = (torch.cat(part) for part in zip(*(one for rank in of_all for one in rank), strict=True))
            keep = sorted({tuple(image.flatten()[:8].tolist()): i for i, image in enumerate(images)}.values())
            loss = torch.nn.functional.cross_entropy(before[0](images[keep].double()), labels[keep])
            seen["errors"].append(measuring.relative(change, torch.autograd.grad(loss, [*before[0].parameters()])))
            seen["sizes"].append(len(images))
            before[0] = copy.deepcopy(network).double()
            samples.clear()
        return result

    initialize = deepspeed.initialize

    def initialized(*args: Any, model: Any, **kwargs: Any) -> Any:
        before.append(copy.deepcopy(model).double())

        def look(module: Any, inputs: Any) -> None:
            if torch.is_grad_enabled():
                samples.append([inputs[0].clone()])

        model.register_forward_pre_hook(look)
        return initialize(*args, model=model, **kwargs)

    deepspeed.DeepSpeedEngine.step = stepped
    deepspeed.initialize = initialized
    torch.nn.CrossEntropyLoss = Criterion  # type: ignore[misc]
    torchvision.datasets.CIFAR10 = torchvision.datasets.FakeData
    words = ["--epochs", "2", "--dtype", "fp32", "--stage", str(spec["stage"])]
    measuring.script(spec["folder"], "cifar10_deepspeed.py", words)
    seen["left"] = sum(len(images) for images, _ in samples)
    torch.save(seen, spec["result"])


def main(folder: Path) -> None:
    work = folder / "measured"
    measuring.remove(work)
    rows = []
    for ranks, stage in ((1, 0), (2, 0), (2, 2)):
        for case, kind, more in (
            ("as published, no accumulation", "original", []),
            ("DeepSpeed's own accumulation", "original", OWN),
            ("moved", "moved", UNCLIPPED),
        ):
            place = measuring.copy(folder / kind, work / str(len(rows)), {"cifar10_deepspeed.py": SMALL + more})
            results = measuring.run_well({"folder": str(place), "stage": stage}, ranks, timeout=100)
            seen = results[0]
            rows.append(
                [
                    case,
                    ranks,
                    stage,
                    ", ".join(map(str, seen["sizes"])) + (f"; {seen['left']} left" if seen["left"] else ""),
                    ", ".join(map(measuring.number, seen["errors"])),
                ]
            )
    header = ["", "ranks", "ZeRO stage", "images in each update, 2 epochs"]
    measuring.table([*header, "error of each update's gradient"], rows)
    measuring.versions("deepspeed")


if __name__ == "__main__":
    measuring.start("deepspeed", __doc__, main, child)
