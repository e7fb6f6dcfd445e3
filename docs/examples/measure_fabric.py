"""Measures Fabric's fp8_distributed_transformer, as published and moved, on two gloo ranks, on the CPU.

    python docs/examples/measure_fabric.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of the samples of both ranks, in
float64. transformer_of_lightning.py lists the replacements in the copies that run. Needs lightning-fabric and
pytorch-lightning.
"""

from __future__ import annotations

from pathlib import Path

import measuring
from transformer_of_lightning import HEADER, SMALL, child, row

HERE = [
    *SMALL,
    ('precision="bf16-true", strategy=strategy', 'accelerator="cpu", devices=2, strategy=strategy'),
    ("max_norm=1.0", "max_norm=float('inf')"),
]


def main(folder: Path) -> None:
    measuring.remove(folder / "measured")
    cases = (("as published", "original"), ("moved", "moved"))
    measuring.table(HEADER, [row(case, folder / kind, HERE) for case, kind in cases])
    measuring.versions("fabric")


if __name__ == "__main__":
    measuring.start("fabric", __doc__, main, child)
