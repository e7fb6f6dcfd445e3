"""The time and memory of `accumulator.contrast()` against one big batch: CLIP's loss on an image and a text tower.

    python launch/bench/pairs.py --out launch/results/pairs

- Time: a whole update (forward, backward, step of AdamW, clearing), in one process and by turns; read the ratios.
- Memory: each way in a fresh process, at its peak beyond what model, optimizer state and data take.
- Gradient: of smaller towers in float64, against the big batch's, of the same samples in the same micro-batches.

Naive: what a loop by hand accumulates, the mean of the micro-batches' own losses, each over its own pairs alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kit import (
    CPU,
    RETURNS,
    Options,
    circumstances,
    header,
    in_fresh_process,
    in_turns,
    peak_of,
    ratios,
    relative_difference,
    spelled,
    table,
    write,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator

Batch = tuple[Tensor, Tensor]
Update = Callable[[Batch], object]
PLAIN = "plain"
WARM_UP = 4  # samples


@dataclass(frozen=True)
class Size:
    pixels: int
    channels: int
    words: int
    width: int
    layers: int


TINY, SMALL, LARGE = Size(8, 8, 8, 16, 1), Size(24, 16, 16, 64, 1), Size(128, 64, 64, 256, 6)


class Towers(nn.Module):
    """Images through convolutions, texts through attention, both to the unit sphere."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        channels, width = size.channels, size.width
        blocks = [layer for i in range(4) for layer in block(channels if i else 3, channels)]
        self.image = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, width))
        self.embedding, self.place = nn.Embedding(1000, width), nn.Parameter(torch.zeros(size.words, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, texts = batch
        read = self.text(self.embedding(texts) + self.place).mean(1)
        return nn.functional.normalize(self.image(images)), nn.functional.normalize(read)


def block(of: int, to: int) -> list[nn.Module]:
    return [nn.Conv2d(of, to, 3, padding=1), nn.GroupNorm(4, to), nn.GELU()]


def clip_loss(model: Towers, images: Tensor, texts: Tensor) -> Tensor:
    """Each image's own text among all, and each text's own image."""
    scores = model.log_scale.exp() * images @ texts.T
    own = torch.arange(len(scores), device=scores.device)
    return (nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)) / 2


def task(size: Size, samples: int, device: torch.device, dtype: torch.dtype) -> tuple[Towers, Batch]:
    torch.manual_seed(0)
    model = Towers(size).to(device, dtype)
    images = torch.randn(samples, 3, size.pixels, size.pixels, device=device, dtype=dtype)
    return model, (images, torch.randint(0, 1000, (samples, size.words), device=device))


def update_of(way: str, micro_batch: int, model: Towers, optimizer: Optimizer) -> Update:
    if way == "contrast":
        accumulator = Accumulator(model, optimizer, batch_size=micro_batch, micro_batch_size=micro_batch)
        return lambda batch: accumulator.contrast(batch, model, lambda *both: clip_loss(model, *both))

    def by_hand(batch: Batch) -> None:
        size = len(batch[0]) if way == PLAIN else micro_batch
        for part in zip(*(one.split(size) for one in batch), strict=True):
            share = len(part[0]) / len(batch[0])
            (clip_loss(model, *model(part)) * share).backward()
        optimizer.step()
        optimizer.zero_grad()

    return by_hand


def ways(samples: int, micro_batches: list[int]) -> dict[str, tuple[str, int]]:
    found = {PLAIN: (PLAIN, samples)}
    found |= {f"contrast {size}": ("contrast", size) for size in micro_batches}
    return found | {f"naive {size}": ("naive", size) for size in micro_batches if size < samples}


def peak(way: str, micro_batch: int, samples: int, device: torch.device) -> float:
    model, batch = task(size_on(device), samples, device, torch.float32)
    update = update_of(way, micro_batch, model, AdamW(model.parameters()))
    update((batch[0][:WARM_UP], batch[1][:WARM_UP]))  # makes the optimizer's state
    return peak_of(lambda: update(batch), device)


def size_on(device: torch.device) -> Size:
    return LARGE if device.type == "cuda" else SMALL


def gradient(way: str, micro_batch: int, samples: int) -> Tensor:
    """In float64 on the CPU, as the optimizer is given it."""
    model, batch = task(TINY, samples, CPU, torch.float64)
    optimizer, seen = SGD(model.parameters(), lr=0.0), []

    def keep(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(keep)
    update_of(way, micro_batch, model, optimizer)(batch)
    return seen[0]


def times(samples: int, micro_batches: list[int], rounds: int, device: torch.device) -> dict[str, list[float]]:
    updates = {}
    for name, (way, size) in ways(samples, micro_batches).items():
        model, batch = task(size_on(device), samples, device, torch.float32)
        update = update_of(way, size, model, AdamW(model.parameters()))
        updates[name] = lambda update=update, batch=batch: update(batch)
    return in_turns(updates, rounds, device)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    samples, passed = options.batch_size, sizes_as_options(options)
    usual = in_fresh_process(*passed, "--times")
    expected = gradient(PLAIN, samples, samples)
    rows = []
    for name, (way, size) in ways(samples, options.micro_batches).items():
        found = gradient(way, size, samples)
        rows.append(
            {
                "way": way,
                "micro_batch": size,
                "time": against(usual, name, PLAIN),
                "time_of_naive": against(usual, name, f"naive {size}"),
                "peak_mb": in_fresh_process(*passed, "--peak-of", way, str(size), environment=RETURNS),
                "gradient_off": relative_difference(found, expected),
                "cosine": torch.cosine_similarity(found, expected, dim=0).item(),
                "seconds": usual[name],
            }
        )
    return rows


def sizes_as_options(options: argparse.Namespace) -> list[str]:
    sizes = [str(size) for size in options.micro_batches]
    numbers = ["--batch-size", str(options.batch_size), "--rounds", str(options.rounds)]
    return ["--device", options.device, *numbers, "--micro-batches", *sizes]


def against(taken: dict[str, list[float]], name: str, other: str) -> dict[str, float]:
    return ratios(taken[name], taken.get(other, taken[PLAIN]))


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("micro-batch", "time / plain", "time / naive", "peak MB", "memory / plain")
    cells = []
    for row in rows:
        times = [spelled(row[name]) for name in ("time", "time_of_naive")]
        memory = f"{row['peak_mb']:.1f}", f"{row['peak_mb'] / rows[0]['peak_mb']:.3f}"
        off = f"{row['gradient_off']:.1e}", f"{row['cosine']:.3f}"
        cells.append((row["way"], row["micro_batch"], *times, *memory, *off))
    return table(("", *heads, "gradient off by", "cosine"), cells)


def notes(samples: int, rounds: int, device: torch.device) -> list[str]:
    size = size_on(device)
    model, batch = task(size, samples, device, torch.float32)
    held = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    data = sum(one.numel() * one.element_size() for one in batch) / 1e6
    return [
        f"Updates of {samples} pairs under CLIP's symmetric loss with a learned temperature, float32, AdamW. Images of "
        f"{size.pixels} pixels through 4 convolutions ({size.channels} channels, GroupNorm), texts of {size.words} "
        f"tokens through a transformer (depth {size.layers}, width {size.width}). Parameters {held:.1f} MB, data "
        f"{data:.1f} MB.",
        f"*Time*: as the ratio to the other update of the same round; median of {rounds} rounds (least to most). "
        "*Naive*: the loop by hand that averages the micro-batches' own losses, in turns with the others; with one "
        "micro-batch it is the plain one. Encoding each sample twice, contrast is expected to take 4/3 of the naive "
        "loop's time.",
        "*Peak*: beyond model, optimizer state and data, with the gradients, in a fresh process. *Off by*: the norm of "
        "the gradient's difference to the big batch's, in parts of that one's norm; smaller towers (width "
        f"{TINY.width}) in float64. *Cosine*: of the angle between the two.",
    ]


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.counts("--batch-size", 256, "of an update")
    parser.counts("--micro-batches", [256, 64, 16, 4])
    parser.counts("--rounds", 5, "of timing")
    parser.hidden("--times", action="store_true")
    parser.hidden("--peak-of", nargs=2)
    options = parser.parse_args()
    device, samples = torch.device(options.device), options.batch_size
    torch.set_num_threads(1)
    if options.times:
        print(json.dumps(times(samples, options.micro_batches, options.rounds, device)))
        return 0
    if options.peak_of:
        way, size = options.peak_of
        print(json.dumps(peak(way, int(size), samples, device)))
        return 0
    rows = measure(options)
    about = circumstances(device)
    lines = header("A loss over pairs", about, *notes(samples, options.rounds, device)) + lines_of(rows)
    write(options.out, "\n".join(lines), {**about, "rows": rows})
    wrong = [row for row in rows if row["way"] == "contrast" and row["gradient_off"] > 1e-12]
    if wrong:
        print(f"the gradient is not the big batch's: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
