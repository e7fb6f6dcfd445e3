"""Measures Lightning's fp8_distributed_transformer, as published and moved, on two gloo ranks, on the CPU.

    python docs/examples/measure_lightning.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of the samples of both ranks, in
float64. transformer_of_lightning.py lists the replacements in the copies that run. Needs lightning-fabric and
pytorch-lightning.
"""

from __future__ import annotations

from pathlib import Path

import measuring
from transformer_of_lightning import HEADER, SMALL, child, row

QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
HERE = [
    *SMALL,
    ("L.Trainer(strategy", f'L.Trainer(accelerator="cpu", devices=2, {QUIET}, strategy'),
    ('precision="bf16-true"', "precision=32"),
    ("max_steps=100", "max_epochs=1"),
]


def main(folder: Path) -> None:
    measuring.remove(folder / "measured")
    cases = (("as published", "original"), ("moved", "moved"))
    measuring.table(HEADER, [row(case, folder / kind, HERE, by_trainer=True) for case, kind in cases])
    measuring.versions("lightning")


if __name__ == "__main__":
    measuring.start("lightning", __doc__, main, child)
