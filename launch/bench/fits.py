"""What `micro_batch_size="auto"` finds, against the largest micro-batch that fits, and the peak memory of both.

    python launch/bench/fits.py --out launch/results/fits            on a GPU: until it says that it is full
    python launch/bench/fits.py --device cpu --limit 3 --out ...     on a host: until 3 GB of addresses are used up

Nothing is simulated: the allocator refuses, and what comes after is the library's. Largest: by bisection, a window of
one micro-batch (forward, backward, step of SGD with momentum) at each size, in this process.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit import Options, circumstances, header, table, write
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError

MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of allocators and CUDA libraries
Task = tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(message in str(error) for message in MESSAGES)


def resnet(device: torch.device) -> Task:
    """ResNet-50 at 224 pixels; on a host ResNet-18 at 64."""
    from torchvision.models import resnet18, resnet50

    make, pixels = (resnet50, 224) if device.type == "cuda" else (resnet18, 64)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, pixels, pixels, device=device), torch.randint(0, 1000, (size,), device=device)

    return make(norm_layer=lambda channels: nn.GroupNorm(32, channels)).to(device), batch


class Language(nn.Module):
    def __init__(self, tokens: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.place)).flatten(0, 1)


def transformer(device: torch.device) -> Task:
    tokens, width, layers, context = (32768, 1024, 24, 1024) if device.type == "cuda" else (2048, 128, 2, 128)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, tokens, (size, context), device=device)
        return rows, rows

    return Language(tokens, width, layers, context).to(device), batch


def loss_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda pair: nn.functional.cross_entropy(model(pair[0]).float(), pair[1].flatten())


def peak(device: torch.device) -> float:
    """In GB, since the last reset; of a host, of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def fits(task: Task, device: torch.device, size: int) -> bool:
    model, batch = task
    try:
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0, momentum=0.9))
        for _ in range(2):  # the optimizer's state is there from the second on
            pair = batch(size)
            window = accumulator.window([pair])
            for pair in window:
                window.backward(loss_of(model)(pair))
            window.step()
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        free(device)


def largest_that_fits(task: Task, device: torch.device, most: int) -> int:
    good, bad = 0, most + 1
    size = 1
    while bad - good > 1:
        if fits(task, device, size):
            good = size
        else:
            bad = size
        size = min(2 * size, (good + bad) // 2) if bad <= most else 2 * size
        size = min(max(size, good + 1), bad - 1) if bad - good > 1 else size
    return good


def found_by_auto(task: Task, device: torch.device, batch_size: int, updates: int) -> dict[str, Any]:
    model, batch = task
    free(device)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=0.0, momentum=0.9), batch_size=batch_size, micro_batch_size="auto"
    )
    sizes, losses, began = [], [], time.perf_counter()
    first = 0.0
    for _ in range(updates):
        seen: list[int] = []

        def loss_fn(pair: tuple[Tensor, Tensor], seen: list[int] = seen) -> Tensor:
            seen.append(len(pair[0]))
            return loss_of(model)(pair)

        losses.append(accumulator.update(batch(batch_size), loss_fn).loss)
        sizes.append(seen[-1])
        first = first or time.perf_counter() - began
    return {"sizes": sizes, "first": first, "seconds": time.perf_counter() - began, "peak": peak(device)}


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.add_argument("--limit", type=float, default=3, metavar="GB", help="of addresses, on a host (3)")
    parser.add_argument("--batch-size", type=int, default=0, metavar="N", help="of an update (4 times what fits)")
    parser.counts("--updates", 40, "of 'auto'; a larger size is tried after 16")
    parser.add_argument("--models", nargs="+", choices=["resnet", "transformer"], default=["resnet", "transformer"])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        limit = int(arguments.limit * 1e9)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
    rows = []
    for name in arguments.models:
        task = {"resnet": resnet, "transformer": transformer}[name](device)
        free(device)
        most = largest_that_fits(task, device, 4096)
        peak_of_largest = peak(device)
        if not most:
            raise DistaccumError(f"{name} does not fit with one sample; give a larger --limit")
        batch_size = arguments.batch_size or 4 * most
        found = found_by_auto(task, device, batch_size, arguments.updates)
        rows.append(
            {"model": name, "largest": most, "batch_size": batch_size, "peak_of_largest": peak_of_largest, **found}
        )
        print(json.dumps(rows[-1]), flush=True)
        del task
    where = "" if device.type == "cuda" else f"{arguments.limit:g} GB of addresses. "
    about = circumstances(device)
    what = "The largest micro-batch that fits, found by bisection, and the one that `micro_batch_size='auto'` uses."
    heads = ("model", "largest", "batch of an update", "in the first update", "in the last", "seconds: first, all")
    cells = []
    for row in rows:
        seconds, peaks = (
            f"{row['first']:.1f}, {row['seconds']:.1f}",
            f"{row['peak_of_largest']:.2f}, auto {row['peak']:.2f}",
        )
        sizes = row["largest"], row["batch_size"], row["sizes"][0], row["sizes"][-1]
        cells.append((row["model"], *sizes, seconds, peaks))
    lines = header("What fits", about, where + what) + table((*heads, "peak GB"), cells)
    write(arguments.out, "\n".join(lines), {**about, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
