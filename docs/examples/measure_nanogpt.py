"""Measures nanoGPT's train.py, as published and moved, on a tiny model and random tokens, on the CPU.

    python docs/examples/measure_nanogpt.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of the same samples (all
micro-batches of all ranks), in float64. In the copies that run, three lines name the CPU instead of a GPU.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import measuring
import torch

CPU = [
    ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
    ("    torch.cuda.set_device(device)\n", ""),
    ("device_ids=[ddp_local_rank]", "device_ids=None"),
]
# Rows that end in padding, as in fine-tuning: the labels there are -1, which the model's loss ignores.
PADDED = [
    (
        "    return x, y\n",
        "    y[torch.arange(block_size) >= torch.randint(1, block_size, (batch_size, 1))] = -1\n    return x, y\n",
    )
]
COUNTED = [(", max_norm=grad_clip", ", count=lambda xy: (xy[1] != -1).sum(), max_norm=grad_clip")]
OPTIONS = {
    "device": "cpu", "dtype": "float32", "compile": False, "backend": "gloo", "dataset": "tiny", "eval_iters": 0,
    "eval_interval": 1000, "always_save_checkpoint": False, "gradient_accumulation_steps": 8, "batch_size": 3,
    "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "grad_clip": 0.0, "max_iters": 4, "warmup_iters": 2,
    "lr_decay_iters": 5, "learning_rate": 1e-2, "min_lr": 1e-3,
}  # fmt: skip


def child(spec: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, spec["folder"])
    import model as nano  # nanoGPT's model.py

    errors, losses, rates, buckets, samples = [], [], [], [], []
    forward, ddp = nano.GPT.forward, torch.nn.parallel.DistributedDataParallel

    def recorded(self: Any, idx: Any, targets: Any = None) -> Any:
        if self.training and torch.is_grad_enabled():
            samples.append((idx.clone(), targets.clone()))
            models[:] = [self]
        return forward(self, idx, targets)

    class Counting(ddp):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, lambda _, bucket: (buckets.append(1), allreduce_hook(None, bucket))[1])

    def look(optimizer: Any) -> None:
        of_all = [list(samples)]
        if dist.is_initialized():
            of_all = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, samples)
        one_batch = [torch.cat(part) for part in zip(*(sample for rank in of_all for sample in rank), strict=True)]
        reference = copy.deepcopy(models[0])
        reference.zero_grad()
        loss = forward(reference, *one_batch)[1]
        loss.backward()
        found, exact = ([p.grad for p in network.parameters()] for network in (models[0], reference))
        errors.append(measuring.relative(found, exact))
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        samples.clear()

    models: list[Any] = []
    nano.GPT.forward = recorded
    torch.nn.parallel.DistributedDataParallel = Counting
    measuring.before_steps(look)
    measuring.script(spec["folder"], "train.py", [f"--{key}={value}" for key, value in spec["options"].items()])
    weights = [p.detach().clone() for p in models[0].parameters()]
    result = {"errors": errors, "losses": losses, "rates": rates, "buckets": len(buckets), "weights": weights}
    torch.save(result, spec["result"])


def main(folder: Path) -> None:
    work = folder / "measured"
    measuring.remove(work)
    rows, runs = [], {}
    for case, replacements, ranks in (
        ("as published, one process", {"original": [], "moved": []}, 1),
        ("as published, two ranks", {"original": [], "moved": []}, 2),
        ("rows with padding, one process", {"original": PADDED, "moved": PADDED + COUNTED}, 1),
        ("rows with padding, two ranks", {"original": PADDED, "moved": PADDED + COUNTED}, 2),
    ):
        for kind in ("original", "moved"):
            place = measuring.copy(folder / kind, work / f"{kind}-{len(runs)}", {"train.py": CPU + replacements[kind]})
            data = place / "data" / "tiny"
            data.mkdir(parents=True)
            tokens = torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
            for name in ("train.bin", "val.bin"):
                tokens.numpy().tofile(data / name)
            results = measuring.run_well({"folder": str(place), "options": OPTIONS}, ranks)
            runs[case, kind] = results[0]
        both = [runs[case, kind] for kind in ("original", "moved")]
        logged = [
            max(
                abs(float(text) - loss) / loss
                for text, loss in zip(re.findall(r"iter \d+: loss ([\d.]+)", run["output"]), run["losses"], strict=True)
            )
            for run in both
        ]
        row: list[object] = [case]
        row += [measuring.number(max(run["errors"])) for run in both]
        row += [f"{100 * value:.2g}%" for value in logged]
        row += [f"{run['buckets'] / len(run['errors']):g}" if ranks > 1 else "" for run in both]
        row.append(measuring.number(measuring.relative(both[1]["weights"], both[0]["weights"])))
        assert both[0]["rates"] == both[1]["rates"], "the learning rates differ"
        rows.append(row)
    header = ["", "gradient: original", "moved", "logged loss: original", "moved"]
    measuring.table([*header, "reductions per update: original", "moved", "final weights apart"], rows)
    measuring.versions("nanogpt")


if __name__ == "__main__":
    measuring.start("nanogpt", __doc__, main, child)
