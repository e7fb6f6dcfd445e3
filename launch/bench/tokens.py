"""Texts of different lengths in micro-batches of fixed rows, or by what they cost: time and padding.

    python launch/bench/tokens.py --out launch/results/tokens

- fixed:  8 rows in a micro-batch, padded to the longest row of the whole batch.
- short:  the same rows, padded to the longest of their micro-batch.
- sorted: the rows of the batch sorted by length, then 8 in a micro-batch, padded to its longest.
- cost:   `ByCost` of as many tokens as "fixed" has in a micro-batch, with `trim_padding`.

An update is 64 rows; all ways learn from the same rows, weighted by tokens. Lengths are log-normal, fitted to published
statistics of two instruction sets, an eighth as long so that a processor can do it, and cut off at 256.
Time: whole updates, by turns, in seconds of the processor.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from kit import (
    CPU,
    Options,
    circumstances,
    header,
    in_turns,
    ratios,
    spelled,
    table,
    write,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from training.gpt import GPT

from distaccum import Accumulator, ByCost, count_tokens
from distaccum.feeding import trim_padding

ROWS, FIXED, LONGEST, SCALE, VOCABULARY = 64, 8, 256, 8, 2048
WAYS = ("fixed", "short", "sorted", "cost")
# By set: the median, and the spread of the logarithm.
SETS = {
    "wide": (357, math.sqrt(2 * math.log(687.7 / 357))),  # from the median and the mean
    "narrow": (274, math.log(467 / 274) / 1.2816),  # from the median and the 90th percentile
}
SOURCES = (
    "Lengths. wide: 24,690 conversations with a median of 357 tokens and a mean of 687.7 "
    "(https://huggingface.co/datasets/Efe2898/last, reports/token_stats.csv). narrow: recipes in Alpaca's form with a "
    "median of 274 and a 90th percentile of 467 (https://huggingface.co/datasets/AdamCodd/recipe-nlg-alpaca). Both are "
    f"divided by {SCALE} here."
)
Batch = dict[str, Tensor]


def make_reader(width: int) -> GPT:
    torch.manual_seed(0)
    return GPT(width, layers=3, context=LONGEST, tokens=VOCABULARY)


def lengths_of(name: str, seed: int) -> list[int]:
    median, spread = SETS[name]
    drawn = torch.randn(ROWS, generator=torch.Generator().manual_seed(seed)).mul(spread).exp() * median / SCALE
    return drawn.round().clamp(2, LONGEST).int().tolist()


def most_of(name: str, number: int) -> int:
    """Tokens of a micro-batch of fixed rows, in the batch with the longest row."""
    return FIXED * max(max(lengths_of(name, seed)) for seed in range(number))


def make_batch(lengths: list[int], seed: int) -> Batch:
    """Padded to its longest row."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(1, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    labels = tokens.roll(-1, dims=1).masked_fill(mask.roll(-1, dims=1) == 0, -100)
    labels[:, -1] = -100
    return {"tokens": tokens, "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def micro_batches(way: str, batch: Batch) -> list[Batch]:
    """Of fixed rows."""
    order = batch["attention_mask"].sum(1).argsort() if way == "sorted" else torch.arange(len(batch["tokens"]))
    parts = [{name: value[rows] for name, value in batch.items()} for rows in order.split(FIXED)]
    return parts if way == "fixed" else list(map(trim_padding(), parts))


def make_update(way: str, model: nn.Module, most: int) -> Callable[[Batch], Any]:
    options: dict[str, Any] = {"count": count_tokens("labels")}
    if way == "cost":
        cost = count_tokens("attention_mask", ignore_index=0)
        options |= {"micro_batch_size": ByCost(most, cost=cost, trim=trim_padding())}
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1e-3), **options)

    def update(batch: Batch) -> Any:
        window = accumulator.split(batch) if way == "cost" else accumulator.window(micro_batches(way, batch))
        computed = 0
        for one in window:
            computed += one["tokens"].numel()
            window.backward(loss_of(model, one))
        return computed, window.step()

    return update


def batches(name: str, number: int) -> list[Batch]:
    return [make_batch(lengths_of(name, seed), seed) for seed in range(number)]


def times_alone(name: str, rounds: int, width: int, number: int) -> dict[str, list[float]]:
    updates = {way: make_update(way, make_reader(width), most_of(name, number)) for way in WAYS}
    data = batches(name, number)
    return in_turns({way: lambda u=u: [u(batch) for batch in data] for way, u in updates.items()}, rounds, CPU)  # type: ignore[misc]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in SETS:
        print(f"{name}: {options.rounds} rounds", flush=True)
        data, rows = batches(name, options.updates), {}
        alone = times_alone(name, options.rounds, options.width, options.updates)
        for way in WAYS:
            update = make_update(way, make_reader(16), most_of(name, options.updates))
            done = [update(batch) for batch in data]
            computed = sum(number for number, _ in done)
            rows[way] = {
                "samples per second": len(data) * ROWS / sorted(alone[way])[len(alone[way]) // 2],
                "speed": ratios(alone["fixed"], alone[way]),
                "padding": 1 - sum(int(batch["attention_mask"].sum()) for batch in data) / computed,
                "micro-batches": sum(record.micro_batches for _, record in done) / len(done),
            }
        result[name] = rows
    return result


def lines_of(result: dict[str, Any]) -> list[str]:
    heads = ["way", "samples per second", "speed", "padding", "micro-batches"]
    lines = []
    for name, rows in result.items():
        cells = [
            (
                way,
                f"{row['samples per second']:.0f}",
                spelled(row["speed"]),
                f"{row['padding']:.0%}",
                f"{row['micro-batches']:.1f}",
            )
            for way, row in rows.items()
        ]
        lines += [f"## {name}", "", *table(heads, cells)]
    return lines


def main() -> int:
    parser = Options(__doc__)
    parser.counts("--rounds", 9, "rounds of all ways by turns")
    parser.counts("--width", 128, "of the model")
    parser.counts("--updates", 4, "in each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    notes = (
        f"Updates of {ROWS} rows; {FIXED} rows in a micro-batch, or as many tokens as the largest of these. "
        "Speed: how many times the samples per second of fixed rows, round by round: the median, the least and the "
        f"most of {options.rounds}.",
        SOURCES,
    )
    about = circumstances(CPU)
    write(options.out, "\n".join([*header("Batches by tokens", about, *notes), *lines_of(result)]), {**about, **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
