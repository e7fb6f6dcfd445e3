"""`plan`: what fits, how a batch is cut, bytes and learning rate, before a run starts. It needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal, get_args

from ..law import REDUCTIONS, Reduction, cut_evenly, steps_for
from ..text import plural
from .terminal import bytes_text, fitted

Optimizer = Literal["sgd", "momentum", "adam"]
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHOICES = {"optimizer": get_args(Optimizer), "reduction": REDUCTIONS, "dtype": tuple(DTYPES)}
AMOUNTS = ("batch_size", "micro_batch_size", "base_batch_size", "parameters", "ranks", "nodes", "layers", "memory")
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
# Of each model, its parameters and its equal layers.
MODELS = {"resnet50": (25_557_032, 16), "gpt2": (124_439_808, 12), "llama-7b": (6_738_415_616, 32)}
MODELS |= {"bert-base": (109_482_240, 12), "gpt2-xl": (1_557_611_200, 48), "llama-70b": (68_976_648_192, 80)}
HELD = ("parameters", "gradients", "optimizer", "buffers")
SENT = ("bytes_per_micro_step", "bytes_once", "bytes_per_update")
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287"


@dataclasses.dataclass(frozen=True)
class Alike:
    """Ranks with the same micro-batches, given as pairs (number of micro-batches, samples in each)."""

    ranks: int
    samples: int
    micro_batches: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = " + ".join(f"{times:,} x {size:,}" for times, size in self.micro_batches)
        return f"{plural(self.ranks, 'rank')}: {self.samples:,}{f' = {parts}' if parts else ', dry'}"


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cut of one update: its samples, by groups of ranks."""

    samples: int
    ranks: tuple[Alike, ...]

    def __str__(self) -> str:
        return f"{plural(self.samples, 'sample')} ({'; '.join(map(str, self.ranks))})"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The result of `plan`. Values whose arguments are missing are None, and `missing` names the arguments.

    `print(forecast)` prints the text of `distaccum plan`.

    Attributes:
        given (dict[str, Any]): The arguments, with counts as numbers.
        steps (int | None): Micro-batches per rank and update.
        windows (Cut | None): An update of `windows(loader)`, in whole micro-batches: its `samples`, and `ranks`, groups
            of ranks with equal parts (`ranks`, `samples`, and `micro_batches` as pairs of number and size).
        split (Cut | None): An update of `split(batch)` and `update(batch, loss_fn)`, which cut the batch exactly.
        policies (tuple[dict[str, Any], ...]): A row for each engine and `sync`: `policy`, its name; what a rank holds,
            `parameters`, `gradients`, `optimizer`, `buffers`, and their sum, `bytes`; whether it `fits`; and what a
            rank sends, `bytes_per_micro_step`, `bytes_once` and `bytes_per_update`.
        learning_rate (dict[str, Any] | None): `advice`, sentences; with `optimizer` also `lr_times`, `lr`, and for
            Adam `eps_times`.
        missing (tuple[str, ...]): Which options to give for the values that are None.
    """

    given: dict[str, Any]
    steps: int | None
    windows: Cut | None
    split: Cut | None
    policies: tuple[dict[str, Any], ...]
    learning_rate: dict[str, Any] | None
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All attributes as plain dicts, tuples and numbers."""
        return dataclasses.asdict(self)

    @property
    def answer(self) -> str:
        """Says whether the usual policy fits in `memory`, and if not, which does."""
        usual = next(row for row in self.policies if row["policy"] in ("plain", "DDP, last"))
        best = self.policies[0]
        name = "A plain module" if usual["policy"] == "plain" else "DDP"
        fits = "fits" if usual["fits"] else "does not fit"
        memory = bytes_text(self.given["memory"])
        text = f"{name} {fits} in {memory}: it takes {bytes_text(usual['bytes'])} and activations on each rank."
        if usual["fits"]:
            return text
        if not best["fits"]:
            return f"{text} Nothing else does; take more ranks, a smaller dtype or offloading."
        policy = best["policy"].replace(", ", " with sync=")
        return f"{text} {policy} fits with {bytes_text(best['bytes'])} and activations, and sends the least."

    def __str__(self) -> str:
        given = self.given
        lines = [self.answer] if self.policies and given["memory"] is not None else []
        lines += [f"plan for {plural(given['ranks'], 'rank')} on {plural(given['nodes'], 'node')}"]
        if self.steps is not None and self.windows is not None and self.split is not None:
            batch = given["batch_size"]
            more = self.windows.samples - given["batch_size"]
            steps = f"steps: {plural(self.steps, 'micro-step')} per rank and update"
            lines += ["", f"{steps}, for {plural(batch, 'sample')} in micro-batches of {given['micro_batch_size']:,}"]
            lines += [f"  windows(loader)  {self.windows}" + f", {more:,} more than asked" * bool(more)]
            of_dry = ", but an error under FSDP and ZeRO 3, where each rank needs a micro-batch"
            lines += [f"  split(batch)     {self.split}: exact" + of_dry * (batch < given["ranks"])]
        if self.policies:
            about = f"{plural(given['parameters'], 'parameter')}, {given['optimizer'] or 'adam'}"
            lines += self._table(f"held by each rank at its peak ({about})", (*HELD, "all"), (*HELD, "bytes"))
            if given["ranks"] > 1:
                lines += self._table("sent by each rank", ("micro-step", "once", "update"), SENT)
        if self.learning_rate is not None:
            batch, base = given["batch_size"], given["base_batch_size"]
            lines += ["", f"learning rate for a batch of {batch:,} from {base:,} (rules of thumb: try them)"]
            lines += [f"  {sentence}" for sentence in self.learning_rate["advice"]]
        if self.missing:
            lines += ["", "to know more, give", *(f"  {options}" for options in self.missing)]
        return fitted(lines)

    def _table(self, title: str, headings: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
        lines = ["", title, " " * 24 + "".join(f"{heading:>11}" for heading in headings)]
        for row in self.policies:
            cells = "".join(f"{bytes_text(row[name]):>11}" for name in names)
            lines += [f"  {row['policy']:22}{cells}" + "  too much" * (not row["fits"])]
        return lines


def plan(
    *,
    batch_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    parameters: float | str | None = None,
    dtype: str = "float32",
    layers: int | None = None,
    memory: float | str | None = None,
    base_batch_size: int | str | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    reduction: Reduction = "mean",
) -> Forecast:
    """Works out the steps, cut, bytes and learning rate of a run, as far as the arguments determine them.

    Whole numbers may be strings such as "512", "7e9" or "350M". What cannot be worked out is None in the result, whose
    `missing` names the arguments to give.

    Args:
        batch_size: Samples per update over all ranks.
        micro_batch_size: The most samples in one forward on one rank.
        ranks: Data-parallel ranks of the job; a multiple of `nodes`. Ranks that share samples count as one.
        nodes: Machines, each with equally many ranks.
        parameters: Trained parameters of the model, or its name, such as `"gpt2"` or `"llama-7b"`.
        dtype: The dtype of parameters and gradients: `"float32"`, `"bfloat16"` or `"float16"`.
        layers: Equal layers of the model, each wrapped by itself under FSDP2; by default the named model's, or 32.
        memory: Bytes of a device, such as `"80GB"`: shows which policies fit, the best first.
        base_batch_size: The batch size that `lr` was chosen for.
        lr: The learning rate at `base_batch_size`.
        optimizer: `"sgd"`, `"momentum"` or `"adam"`; None gives the rules for SGD and Adam, and the bytes of Adam.
        reduction: As for the Accumulator. With `"sum"`, SGD's step already grows with the batch.
    """
    given: dict[str, Any] = dict(locals())
    given["parameters"], equal_layers = MODELS.get(str(parameters).lower(), (parameters, 32))
    for name in AMOUNTS:
        if given[name] is not None or name in ("ranks", "nodes"):
            given[name] = amount(name, given[name])
    ranks, nodes, batch, micro = (given[name] for name in ("ranks", "nodes", "batch_size", "micro_batch_size"))
    if ranks % nodes:
        raise ValueError(f"ranks={ranks} on nodes={nodes}, expected as many ranks on each node")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr}, expected a number above 0")
    for name, known in CHOICES.items():
        if given[name] is not None and given[name] not in known:
            raise ValueError(f"{name}={given[name]!r}, expected one of {', '.join(known)}")
    steps = windows = split = rate = None
    rows: list[dict[str, Any]] = []
    if batch is not None and micro is not None:
        steps = steps_for(batch, micro, ranks)
        windows = Cut(steps * micro * ranks, (Alike(ranks, steps * micro, ((steps, micro),)),))
        split = _split(batch, micro, ranks)
    if given["parameters"] is not None:
        given["layers"] = given["layers"] or equal_layers
        rows = _policies(given, steps)
    if batch is not None and given["base_batch_size"] is not None:
        rate = scaled_learning_rate(batch / given["base_batch_size"], lr, optimizer, reduction)
    wanted = {
        "--batch-size and --micro-batch-size for the steps and the cut": steps is None,
        "--parameters for the bytes": not rows,
        "--memory, such as 80GB, for what fits": given["memory"] is None,
        "--batch-size and --base-batch-size for the learning rate": rate is None,
    }
    missing = tuple(options for options, is_missing in wanted.items() if is_missing)
    return Forecast(given, steps, windows, split, tuple(rows), rate, missing)


def amount(name: str, value: object) -> int:
    """A whole number of at least 1, from a number or a string.

    >>> amount("parameters", "11.7M"), amount("parameters", "7e9"), amount("samples", "1_281_167")
    (11700000, 7000000000, 1281167)
    """
    text = str(value).strip().upper()
    least, such = {"memory": (10**6, "80GB"), "parameters": (1, "7e9, 7b, 350M or 11.7M")}.get(name, (1, "8 or 512"))
    text = text.removesuffix("B") if name == "memory" else text
    times = SUFFIXES.get(text[-1:], 1)
    # A text that is no number raises the error below.
    with suppress(ArithmeticError):
        number = Decimal(text[:-1] if times > 1 else text) * times
        if number >= least and number == int(number):
            return int(number)
    models = f"; or one of {', '.join(MODELS)}" if name == "parameters" else ""
    raise ValueError(f"{name}={value!r}, expected a whole number of at least {least:,}, such as {such}{models}")


def _split(batch: int, micro: int, ranks: int) -> Cut:
    groups = [Alike(ranks - batch, 0, ())] if batch < ranks else []
    for samples, times in Counter(cut_evenly(batch, parts=ranks)).items():
        sizes = Counter(cut_evenly(samples, largest=micro))
        groups.append(Alike(times, samples, tuple((number, size) for size, number in sizes.items())))
    return Cut(batch, tuple(groups))


def _policies(given: dict[str, Any], steps: int | None) -> list[dict[str, Any]]:
    """Makes a row for each policy: the bytes that a rank holds at the peak of an update, and the bytes that it sends.

    Among W ranks a reduce-scatter or an all-gather sends (W - 1) / W of the bytes, an all-reduce twice that. Policies
    that fit in memory come first, sorted by what they send.
    """
    numbers, ranks, nodes, memory = (given[name] for name in ("parameters", "ranks", "nodes", "memory"))
    # The bytes of all parameters, which are those of their gradients too, and of a layer.
    p = g = numbers * DTYPES[given["dtype"]]
    layer = p // given["layers"]
    kept = {"sgd": 0, "momentum": 1, "adam": 2}[given["optimizer"] or "adam"]
    # Adam's step on a GPU makes a copy.
    state = kept * g
    copy = g * (kept == 2)
    w = ranks // nodes
    # DeepSpeed's masters are in float32, and its buckets have 5e8 numbers unless told otherwise.
    masters = (1 + kept) * 4 * numbers // ranks
    bucket = min(numbers, 5 * 10**8) * g // numbers

    def sent(collectives: int, members: int = ranks, num_bytes: int = g) -> int:
        return -(-collectives * (members - 1) * num_bytes // members)

    shard = sent(1, w)
    between = sent(2, nodes, -(-g * nodes // ranks))
    # ZeRO 3 keeps what the forward gathered until the backward, up to 1e9 parameters.
    gathers = 1 + (numbers > 10**9)
    live = min(p, 10**9 * p // numbers)
    last = 3 * layer + layer // ranks
    # Sent in each micro-step and once per window; then held: parameters, gradients, state and buffers.
    table: list[Any] = [
        ("plain", 0, 0, p, g, state, max(layer, copy)),
        ("DDP, every", sent(2), 0, p, g, state, g + max(layer, copy)),
        ("DDP, last", 0, sent(2), p, g, state, g + max(layer, copy)),
        ("ZeRO 0, last", 0, sent(2), p, g, state, max(bucket, copy)),
        ("ZeRO 1 and 2, last", 0, sent(2) + sent(1), p, g, masters, bucket),
        ("ZeRO 2, every", sent(2), sent(1), p, g // ranks, masters, 2 * bucket),
        ("ZeRO 3, last", gathers * sent(1), sent(1), p // ranks, g + g // ranks, masters, 2 * bucket + live),
        ("ZeRO 3, every", (gathers + 1) * sent(1), 0, p // ranks, g // ranks, masters, 2 * bucket + live + layer),
        ("FSDP2, every", 3 * sent(1), 0, p // ranks, g // ranks, state // ranks, max(4 * layer, copy // ranks)),
        ("FSDP2, last", 2 * sent(1), sent(1), p // ranks, g, state // ranks, last),
        ("FSDP2, gathered", 0, 2 * sent(1), p // ranks, g, state // ranks, p + layer),
        ("FSDP2 hybrid, last", 2 * shard, shard + between, p // w, g, state // w, last),
        ("FSDP2 hybrid, replicas", 3 * shard, between, p // w, g // w, state // w, max(4 * layer, copy // w)),
    ]
    table = table[:1] if ranks == 1 else table[1:] if 1 < nodes < ranks else table[1:-2]
    rows = [dict(zip(("policy", *SENT[:2], *HELD), row, strict=True)) for row in table]
    for row in rows:
        row["bytes_per_update"] = None if steps is None else steps * row[SENT[0]] + row[SENT[1]]
        row["bytes"] = sum(row[name] for name in HELD)
        row["fits"] = memory is None or row["bytes"] <= memory
    return sorted(rows, key=lambda row: (not row["fits"], *(row[name] or 0 for name in (SENT[2], *SENT[:2], "bytes"))))


def scaled_learning_rate(
    kappa: float, lr: float | None, optimizer: Optimizer | None, reduction: Reduction
) -> dict[str, Any]:
    """The learning rate and its companions for a batch `kappa` times as large as the one that `lr` suits.

    >>> scaled_learning_rate(4, 0.1, "sgd", "mean")["lr"], scaled_learning_rate(4, 0.1, "sgd", "sum")["lr"]
    (0.4, 0.1)
    """
    is_sum = reduction == "sum"
    root = math.sqrt(kappa)
    eps = 1 / root
    of_sgd = kappa
    why = f"linear in the batch ({GOYAL}; held up to 8,192 on ImageNet there)"
    if is_sum:
        eps = root
        of_sgd = 1.0
        why = f"the gradient of a sum has grown by {kappa:g} already ({GOYAL}, section 3)"
    by_root = f"square root of the batch ({MALLADI}); eps x {eps:g}, 1 - beta x {kappa:g} while beta stays above 0"
    rules = [("SGD", of_sgd, f"{why}, with a warm-up of 5 epochs"), ("Adam", root, by_root)]
    if optimizer is not None:
        rules = [rules[1] if optimizer == "adam" else rules[0]]
    advice = [f"{name}: lr x {times:g}{f' = {lr * times:g}' if lr else ''}: {rule}" for name, times, rule in rules]
    if is_sum and kappa != 1:
        advice.append(f"a sum: max_norm and SGD's weight decay x {kappa:g}, to keep their relative weight")
    if optimizer is None:
        return {"advice": advice}
    times = rules[0][1]
    values = {"advice": advice, "lr_times": times, "lr": None if lr is None else lr * times}
    return values | {"eps_times": eps} if optimizer == "adam" else values
