"""Several tasks on one trunk, three ways to the same gradient: peak memory and time of each.

    python launch/bench/heads.py --out launch/results/heads

- sum:   all heads, their losses added up, one backward: the graphs of all heads are alive together.
- parts: `window.parts`, a forward and backward of trunk and head for each task: one head's graph at a time.
- heads: `window.heads`, the trunk forward once, each head forward and backward, then the trunk backward once.

Time: a whole update (forward, backward, step of AdamW, clearing), in one process and by turns; read the ratios.
Memory: each way in a fresh process, at its peak beyond what model, optimizer state and data take.
Gradient: of a smaller model in float64, against the summed loss of the whole batch, by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kit import (
    CLOCKS,
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

from distaccum import Accumulator, Window

Batch = tuple[Tensor, Tensor]  # tokens, and for each head the token that it has to name
Backward = Callable[[Window, "Tasks", Batch], None]


@dataclass(frozen=True)
class Size:
    rows: int  # of a micro-batch
    words: int
    width: int
    layers: int
    vocabulary: int


TINY, SMALL, LARGE = Size(2, 8, 16, 1, 50), Size(8, 64, 64, 4, 4096), Size(16, 1024, 512, 12, 32768)


class Tasks(nn.Module):
    """A trunk of attention, and heads that widen to the vocabulary."""

    def __init__(self, size: Size, number: int) -> None:
        super().__init__()
        width = size.width
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(size.vocabulary, width)
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.heads = nn.ModuleList(nn.Linear(width, size.vocabulary) for _ in range(number))

    def forward(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.layers(self.embedding(tokens))
        return features

    def loss(self, head: int, features: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.heads[head](features).flatten(0, 1), labels[:, head].flatten())


def summed(window: Window, model: Tasks, batch: Batch) -> None:
    window.backward(sum_of_losses(model, batch))


def parts(window: Window, model: Tasks, batch: Batch) -> None:
    for head in window.parts(range(len(model.heads))):
        window.backward(model.loss(head, model(batch[0]), batch[1]))


def heads(window: Window, model: Tasks, batch: Batch) -> None:
    for head, features in window.heads(model(batch[0]), range(len(model.heads))):
        window.backward(model.loss(head, features, batch[1]))


WAYS: dict[str, Backward] = {"sum": summed, "parts": parts, "heads": heads}


def sum_of_losses(model: Tasks, batch: Batch) -> Tensor:
    features = model(batch[0])
    return torch.stack([model.loss(head, features, batch[1]) for head in range(len(model.heads))]).sum()


def task(size: Size, number: int, micro_batches: int, device: torch.device, dtype: torch.dtype) -> tuple[Tasks, Batch]:
    torch.manual_seed(0)
    rows = size.rows * micro_batches
    tokens = torch.randint(0, size.vocabulary, (rows, size.words), device=device)
    labels = torch.randint(0, size.vocabulary, (rows, number, size.words), device=device)
    return Tasks(size, number).to(device, dtype), (tokens, labels)


def update_of(way: str, model: Tasks, optimizer: Optimizer, batch: Batch, rows: int) -> Callable[[], object]:
    accumulator = Accumulator(model, optimizer, steps=1)
    micro_batches = list(zip(*(one.split(rows) for one in batch), strict=True))

    def update() -> None:
        window = accumulator.window(micro_batches)
        for micro_batch in window:
            WAYS[way](window, model, micro_batch)
        window.step()

    return update


def size_on(device: torch.device) -> Size:
    return LARGE if device.type == "cuda" else SMALL


def peak(way: str, number: int, micro_batches: int, device: torch.device) -> float:
    size = size_on(device)
    model, batch = task(size, number, micro_batches, device, torch.float32)
    optimizer = AdamW(model.parameters())
    update_of(way, model, optimizer, (batch[0][:1], batch[1][:1]), 1)()  # makes the optimizer's state
    return peak_of(update_of(way, model, optimizer, batch, size.rows), device)


def gradient_off(way: str, number: int, micro_batches: int) -> float:
    """In float64 on the CPU, of the gradient that the optimizer is given."""
    model, batch = task(TINY, number, micro_batches, CPU, torch.float64)
    wanted = torch.autograd.grad(sum_of_losses(model, batch), list(model.parameters()))
    optimizer, seen = SGD(model.parameters(), lr=0.0), []

    def keep(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(keep)
    update_of(way, model, optimizer, batch, TINY.rows)()
    return relative_difference(seen[0], torch.cat([one.flatten() for one in wanted]))


def measure(number: int, micro_batches: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    updates = {}
    for way in WAYS:
        model, batch = task(size_on(device), number, micro_batches, device, torch.float32)
        updates[way] = update_of(way, model, AdamW(model.parameters()), batch, size_on(device).rows)
    taken = in_turns(updates, rounds, device)
    options = ["--device", str(device), "--micro-batches", str(micro_batches)]
    return [
        {
            "heads": number,
            "way": way,
            "time": ratios(taken[way], taken["sum"]),
            "peak_mb": in_fresh_process(*options, "--peak-of", way, str(number), environment=RETURNS),
            "gradient_off": gradient_off(way, number, micro_batches),
            "seconds": taken[way],
        }
        for way in WAYS
    ]


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    sums = {row["heads"]: row["peak_mb"] for row in rows if row["way"] == "sum"}
    cells = []
    for row in rows:
        memory = f"{row['peak_mb']:.0f}", f"{row['peak_mb'] / sums[row['heads']]:.2f}"
        cells.append((f"{row['way']}, {row['heads']}", spelled(row["time"]), *memory, f"{row['gradient_off']:.1e}"))
    return table(("way, heads", "time / sum", "peak MB", "memory / sum", "gradient off by"), cells)


def notes(micro_batches: int, rounds: int, device: torch.device) -> list[str]:
    size = size_on(device)
    model, _ = task(size, 1, 1, device, torch.float32)
    trunk, head = megabytes(model.embedding) + megabytes(model.layers), megabytes(model.heads)
    scores = size.rows * size.words * size.vocabulary * 4 / 1e6
    return [
        f"Windows of {micro_batches} micro-batches of {size.rows} rows of {size.words} tokens, in float32 under AdamW. "
        f"Trunk: a transformer of depth {size.layers} and width {size.width} ({trunk:.1f} MB of parameters). Head: "
        f"linear, to {size.vocabulary} tokens ({head:.1f} MB), and cross-entropy; its scores of a micro-batch take "
        f"{scores:.1f} MB.",
        "*sum*: the losses added up, one backward. *parts*: `window.parts`, trunk and head once for each task. "
        "*heads*: `window.heads`, the trunk once, one head at a time.",
        f"*Time*: {CLOCKS[device.type]}, as the ratio to the sum in the same round; median of {rounds} rounds (least "
        "to most). *Peak*: beyond model, optimizer state and data, with the gradients, in a fresh process. *Off by*: "
        "the norm of the gradient's difference to that of the summed loss of one big batch by hand, in parts of that "
        f"one's norm; a model of width {TINY.width} in float64.",
    ]


def megabytes(module: nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in module.parameters()) / 1e6


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.counts("--heads", [2, 4, 8], "how many")
    parser.counts("--micro-batches", 2, "of an update")
    parser.counts("--rounds", 5, "of timing")
    parser.hidden("--peak-of", nargs=2)
    options = parser.parse_args()
    micro_batches, rounds = options.micro_batches, options.rounds
    device = torch.device(options.device)
    torch.set_num_threads(1)
    if options.peak_of:
        way, number = options.peak_of
        print(json.dumps(peak(way, int(number), micro_batches, device)))
        return 0
    rows = [row for number in options.heads for row in measure(number, micro_batches, rounds, device)]
    about = circumstances(device)
    lines = header("Heads on one trunk", about, *notes(micro_batches, rounds, device)) + lines_of(rows)
    write(options.out, "\n".join(lines), {**about, "rows": rows})
    wrong = [row for row in rows if row["gradient_off"] > 1e-12]
    if wrong:
        print(f"the gradient is not the big batch's: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
