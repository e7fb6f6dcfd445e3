"""Measures PyTorch's FSDP2 example, as published and moved, on two gloo ranks, on the CPU.

    python docs/examples/measure_fsdp2.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of all samples of all ranks, in
float64. In the copies that run, the check for two GPUs is gone, the process group is gloo, clipping is off (it would
hide a wrong scale), the layers are also initialised, and float64 replaces float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import measuring
import torch

HERE = {
    "example.py": [
        ("has_gpu and gpu_count >= min_gpus", "True"),
        ("init_process_group(backend=backend, device_id=device)", "init_process_group(backend='gloo')"),
    ],
    "utils.py": [("torch.float32", "torch.float64")],
    "model.py": [
        ("self.output(h).float()", "self.output(h)"),
        (
            "        self.norm.reset_parameters()\n        self.output",
            "        for layer in self.layers:\n            layer.reset_parameters()\n"
            "        self.norm.reset_parameters()\n        self.output",
        ),
    ],
}
FREE = ("max_norm=1.0", "max_norm=float('inf')")
# Each rank draws its own samples after the model is initialised.
OWN = ("    for _ in range(10):\n", "    torch.manual_seed(1 + rank)\n    for _ in range(10):\n")
# The usual lines of accumulation by hand: 32 samples in micro-batches of 8, one reduction.
BY_HAND = (
    "        loss = model(x).sum()\n        loss.backward()\n",
    "        for i, part in enumerate(x.split(8)):\n"
    "            model.set_requires_gradient_sync(i == 3)\n"
    "            (model(part).sum() / 4).backward()\n",
)


def child(spec: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, spec["folder"])
    import model as example  # the example's model.py

    seen: dict[str, Any] = {"errors": [], "scales": [], "alike": [], "reductions": 0, "largest": 0}
    samples: list[torch.Tensor] = []
    models: list[Any] = []
    forward = example.Transformer.forward

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "from_local") for kind in kinds):
                return NotImplemented  # a DTensor's collectives show once it has decomposed the call
            if func.namespace == "c10d" and "reduce_scatter" in str(func):
                seen["reductions"] += 1
            return func(*args, **(kwargs or {}))

    def recorded(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not getattr(self, "is_reference", False):
            samples.append(tokens.clone())
            models[:] = [self]
            seen["largest"] = max(seen["largest"], len(tokens))
        return forward(self, tokens)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def look(optimizer: Any) -> None:
        mine = torch.cat(samples)
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, mine)
        reference = example.Transformer(models[0].model_args)
        reference.is_reference = True
        reference.load_state_dict({name: full(value) for name, value in models[0].state_dict().items()})
        reference(torch.cat(of_all)).sum().backward()
        found, exact = ([full(p.grad) for p in network.parameters()] for network in (models[0], reference))
        seen["errors"].append(measuring.relative(found, exact))
        scale = sum((a * b).sum() for a, b in zip(found, exact, strict=True)) / sum(b.square().sum() for b in exact)
        seen["scales"].append(float(scale))
        seen["scaled"] = max(seen.get("scaled", 0.0), measuring.relative([a / scale for a in found], exact))
        seen["alike"].append(all(torch.equal(mine, other) for other in of_all))
        samples.clear()

    example.Transformer.forward = recorded
    measuring.before_steps(look)
    with Counting():
        measuring.script(spec["folder"], "example.py", spec["words"])
    torch.save(seen, spec["result"])


def main(folder: Path) -> None:
    work = folder / "measured"
    measuring.remove(work)
    rows = []
    for case, kind, more, words in (
        ("as published", "original", [], []),
        ("moved", "moved", [], []),
        ("moved, `--explicit-prefetching`", "moved", [], ["--explicit-prefetching"]),
        ("as published, each rank its own samples", "original", [OWN], []),
        ("the same, accumulated by hand", "original", [OWN, BY_HAND], []),
        ("moved, each rank its own samples", "moved", [OWN], []),
    ):
        replacements = {**HERE, "example.py": [*HERE["example.py"], FREE, *more]}
        place = measuring.copy(folder / kind, work / str(len(rows)), replacements)
        results = measuring.run_well({"folder": str(place), "words": words}, ranks=2)
        seen = results[0]
        rows.append(
            [
                case,
                f"{seen['largest']}",
                "yes" if all(seen["alike"]) else "no",
                measuring.number(max(seen["errors"])),
                f"{sum(seen['scales']) / len(seen['scales']):.4g}",
                measuring.number(seen["scaled"]),
                f"{seen['reductions'] / len(seen['errors']):g}",
            ]
        )
    header = ["two ranks, 32 samples each", "samples in a forward", "ranks draw the same", "error of the gradient"]
    measuring.table([*header, "its scale", "error but for the scale", "reduce-scatters per update"], rows)
    measuring.versions("fsdp2")


if __name__ == "__main__":
    measuring.start("fsdp2", __doc__, main, child)
