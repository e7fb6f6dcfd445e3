"""Shared parts of measure_fabric.py and measure_lightning.py: the same model in two trainers' scripts, small, on CPUs.

Stand-ins replace missing parts: random tokens for WikiText2, nothing for torchao, and pytorch_lightning
and lightning_fabric for the package `lightning`, which holds both. The copies that run have two gloo ranks for four
GPUs, two layers for sixteen, float64, no dropout, no `torch.compile`, and no clipping, which would hide a wrong scale.
"""

from __future__ import annotations

import logging
import sys
import warnings
from types import ModuleType
from typing import Any

import measuring
import torch
from torch import Tensor, nn

SMALL = [
    ("nlayers=16", "nlayers=2"),
    ("nhid=4096", "nhid=16"),
    ("ninp=1024", "ninp=8"),
    ("nhead=32", "nhead=2, dropout=0.0"),
    ('with torch.device("meta"):', "if True:"),
    ("num_workers=8", "num_workers=0"),
    ("data_parallel_size=4", "data_parallel_size=2"),
    ("torch.compile(model)", "model"),
    ("torch.cuda.memory_summary()", "''"),
]
MICRO_BATCHES = 26  # of one sample, per rank: windows of 8, 8, 8 and 2


class Tokens(torch.utils.data.Dataset):
    vocab_size = 32

    def __len__(self) -> int:
        return 2 * MICRO_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, 32, (13,), generator=torch.Generator().manual_seed(index))
        return drawn[:-1], drawn[1:]


def stand_in() -> Any:
    """Installs the stand-ins; returns the demos' module."""
    import lightning_fabric
    import pytorch_lightning
    from lightning_fabric import strategies as of_fabric
    from pytorch_lightning import demos, strategies

    whole, torchao, float8 = ModuleType("lightning"), ModuleType("torchao"), ModuleType("torchao.float8")
    whole.Fabric, whole.seed_everything = lightning_fabric.Fabric, lightning_fabric.seed_everything
    whole.Trainer, whole.LightningModule = pytorch_lightning.Trainer, pytorch_lightning.LightningModule
    float8.Float8LinearConfig = dict
    float8.convert_to_float8_training = lambda *_, **__: None
    sys.modules |= {"lightning": whole, "torchao": torchao, "torchao.float8": float8}
    sys.modules |= {"lightning.fabric": lightning_fabric, "lightning.fabric.strategies": of_fabric}
    sys.modules |= {"lightning.pytorch": pytorch_lightning, "lightning.pytorch.strategies": strategies}
    sys.modules["lightning.pytorch.demos"] = demos
    demos.WikiText2 = Tokens
    return demos


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def child(spec: dict[str, Any]) -> None:
    """Runs a script, and compares the gradient before each step with one big batch of both ranks' samples."""
    import torch.distributed as dist

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    demos = stand_in()
    transformer: Any = demos.Transformer
    mask, forward = transformer.generate_square_subsequent_mask, transformer.forward
    seen: dict[str, Any] = {"errors": [], "scales": [], "lengths": [], "left": 0}
    samples: list[tuple[Tensor, Tensor]] = []
    models: list[Any] = []

    def recorded(self: Any, inputs: Tensor, target: Tensor) -> Tensor:
        if not getattr(self, "is_reference", False):
            samples.append((inputs, target))
            models[:] = [self]
        return forward(self, inputs, target)

    def look(_: Any) -> None:
        mine: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(mine, samples)
        inputs, targets = (torch.cat(both) for both in zip(*(pair for one in mine for pair in one), strict=True))
        reference = transformer(vocab_size=32, nlayers=2, nhid=16, ninp=8, nhead=2, dropout=0.0)
        reference.is_reference = True
        reference.load_state_dict({name: full(value) for name, value in models[0].state_dict().items()})
        nn.functional.nll_loss(reference(inputs, targets), targets.view(-1)).backward()
        found, exact = ([full(p.grad) for p in network.parameters()] for network in (models[0], reference))
        scale = sum((a * b).sum() for a, b in zip(found, exact, strict=True)) / sum(b.square().sum() for b in exact)
        seen["errors"].append(measuring.relative(found, exact))
        seen["scales"].append(float(scale))
        seen["lengths"].append(len(samples))
        samples.clear()

    transformer.generate_square_subsequent_mask = lambda self, size: mask(self, size).double()
    transformer.forward = recorded
    if spec["by_trainer"]:  # its backward runs in a closure of optimizer.step()
        sys.modules["lightning"].LightningModule.on_before_optimizer_step = lambda self, optimizer: look(optimizer)
    else:
        measuring.before_steps(look)
    measuring.script(spec["folder"], "train.py")
    torch.save({**seen, "left": len(samples)}, spec["result"])


def row(case: str, folder: Any, replacements: Any, *, by_trainer: bool = False) -> list[str]:
    """A row of the table: the results of two ranks in a copy with these replacements."""
    place = measuring.copy(folder, folder.parent / "measured" / case.replace(" ", "_"), {"train.py": replacements})
    seen = measuring.run_well({"folder": str(place), "by_trainer": by_trainer}, ranks=2)[0]
    return [
        case,
        ", ".join(map(str, seen["lengths"])),
        str(seen["left"]),
        ", ".join(f"{one:.3g}" for one in seen["scales"]),
        measuring.number(max(seen["errors"])),
    ]


HEADER = [
    "two ranks, 26 micro-batches each",
    "micro-batches of each update",
    "never stepped",
    "scale of the gradient",
    "largest error",
]
