"""What a run will do that is not started yet: its cut, its epoch's tail, bytes, seconds, and learning rate.

Cuts are whole numbers, and exact. Bytes are those of ring collectives. Seconds are a prediction: a collective takes
latency x hops + bytes / rate, and what runs under a forward or backward is hidden as far as it fits there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ..law.shares import REDUCTIONS, Reduction, even_cut, steps_for, whole_number
from ..law.table import table, width, wrapped
from .picture import blank, save

Backend = Literal["gloo", "nccl"]
Optimizer = Literal["sgd", "adam"]
Kind = Literal["all-reduce", "reduce-scatter", "all-gather"]


class Link(NamedTuple):
    """What a backend makes of a link."""

    latency: float  # seconds of a hop
    reduce: float  # the part of the nominal rate that a reduction's bytes reach
    gather: float  # that a gather's reach
    source: str
    processor: float = 0.0  # seconds per byte of the core that computes; none where ranks have cores to spare


BACKENDS: Mapping[str, Link] = {
    # A hop is what forecast.py fitted. 0.956 of a full Ethernet frame is payload, and DDP reaches that in two_nodes.md.
    # Gathers reach 0.75 in forecast.py's fit and 0.55 in two_nodes.md, whose messages are larger.
    "gloo": Link(262e-6, 0.956, 0.65, "seen at 1 Gbit/s, launch/results/forecast.md and two_nodes.md"),
    "nccl": Link(5e-6, 0.9, 0.9, "assumed, not measured; give your own"),
}
CHOSEN: Mapping[str, str] = {  # where nobody named a backend
    "gloo": "on gloo, since there is no CUDA device here; --backend nccl gives NCCL's numbers",
    "nccl": "on NCCL, since there is a CUDA device here; --backend gloo gives gloo's numbers",
}
HOST_HOP = 50e-6  # seconds of gloo's beside another backend: assumed, of TCP between hosts
BUCKET_MB = 25.0  # DDP's default; FSDP and ZeRO 3 cut by layers, which is near it
ZERO_BUCKET = 5 * 10**8  # numbers: DeepSpeed's default up to ZeRO 2
BACKWARD = 2 / 3  # of a micro-step: two products for each one of the forward
SHARDS_KEPT = 10**9  # parameters; below it ZeRO 3 keeps what forward gathered until backward
LEVELS = (0.10, 0.05)  # of an update, in communication that nothing hides
LONGEST = 1024  # window, in the picture
MAY_BE_NONE = ("latency_us", "cpu_seconds_per_gb")


class Call(NamedTuple):
    """A collective over all gradients or parameters."""

    kind: Kind
    under: Literal["forward", "backward", "nothing"]  # what hides it
    among: Literal["all", "node", "replicas"] = "all"


@dataclasses.dataclass(frozen=True)
class Policy:
    """When an engine communicates."""

    name: str
    each: tuple[Call, ...]  # in each micro-step
    once: tuple[Call, ...]  # per window
    on_gloo: bool = True  # what it hides is hidden there too
    bucket: int | None = None  # numbers, where the engine has a size of its own


REDUCE = Call("all-reduce", "backward")
AFTER = Call("all-reduce", "nothing")  # DeepSpeed reduces when backward is over
GATHERS = (Call("all-gather", "forward"), Call("all-gather", "backward"))
SCATTER = Call("reduce-scatter", "backward")
REFRESH = Call("all-gather", "nothing")
LAST = "DDP, last"


def policies_for(parameters: int, ranks: int, nodes: int) -> list[Policy]:
    """All that run there; the hybrid ones shard within a node, and have a replica on each."""
    zero3 = GATHERS[:1] if parameters <= SHARDS_KEPT else GATHERS
    found = [
        Policy("DDP, every", (REDUCE,), ()),
        Policy(LAST, (), (REDUCE,)),
        Policy("ZeRO 0, last", (), (AFTER,), bucket=ZERO_BUCKET),
        Policy("ZeRO 1 and 2, last", (), (AFTER, REFRESH), bucket=ZERO_BUCKET),
        Policy("ZeRO 2, every", (AFTER,), (REFRESH,), bucket=ZERO_BUCKET),
        Policy("ZeRO 3, last", zero3, (SCATTER._replace(under="nothing"),), on_gloo=False),
        Policy("ZeRO 3, every", (*zero3, SCATTER), (), on_gloo=False),
        Policy("FSDP2, every", (*GATHERS, SCATTER), (), on_gloo=False),
        Policy("FSDP2, last", GATHERS, (SCATTER,), on_gloo=False),
        Policy("FSDP2, gathered", (), (REFRESH, SCATTER), on_gloo=False),
    ]
    if 1 < nodes < ranks:
        gathers = tuple(call._replace(among="node") for call in GATHERS)
        scatter, replicas = SCATTER._replace(among="node"), REDUCE._replace(among="replicas")
        found += [
            Policy("FSDP2 hybrid, last", gathers, (scatter, replicas), on_gloo=False),
            Policy("FSDP2 hybrid, replicas", (*gathers, scatter), (replicas,), on_gloo=False),
        ]
    return found


@dataclasses.dataclass(frozen=True)
class Alike:
    """Ranks that have the same micro-batches, as (how many, samples in each)."""

    ranks: int
    samples: int
    micro_batches: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = " + ".join(f"{times:,} x {size:,}" for times, size in self.micro_batches)
        return f"{_num(self.ranks, 'rank')}: {self.samples:,}{f' = {parts}' if parts else ', dry'}"


@dataclasses.dataclass(frozen=True)
class Cut:
    """Samples of one update."""

    samples: int
    ranks: tuple[Alike, ...]

    def __str__(self) -> str:
        return f"{_num(self.samples, 'sample')} ({'; '.join(map(str, self.ranks))})"


@dataclasses.dataclass(frozen=True)
class Tail:
    """An epoch's end."""

    updates: int
    last: Cut
    share: float  # of a whole window's samples
    ranks_with_fewer_micro_batches: int
    dry_ranks: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """Predicted seconds of an update, and where they go."""

    update: float
    compute: float
    exposed: float  # communication that the ranks wait for
    hidden: float  # communication under a forward or backward
    latency: float  # the part of both that does not shrink with the bytes


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What `plan` found; what it could not is None, and `missing` says what to give for it.

    `print(forecast)` is the text of `distaccum plan`, `as_dict()` its `--json`, `plot(path)` its `--plot`.
    """

    given: dict[str, Any]
    gradient_bytes: int | None
    steps: int | None  # micro-batches per rank and update
    windows: Cut | None  # what windows(loader) gives: whole micro-batches
    split: Cut | None  # what split(batch) and update(batch, loss_fn) give: the batch, exactly
    windows_tail: Tail | None
    split_tail: Tail | None
    policies: tuple[dict[str, Any], ...]
    learning_rate: dict[str, Any] | None
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        columns = width()
        return "\n".join(wrapped(_text(self, columns), columns))

    def plot(self, path: str | Path) -> None:
        """Seconds per micro-step against the window's length, and where an update's seconds go (png, svg or pdf)."""
        _plot(self, Path(path))


def plan(
    *,
    batch_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    parameters: float | str | None = None,
    dtype_bytes: int | None = None,
    link_gbit: float | None = None,
    node_gbit: float | None = None,
    micro_step_seconds: float | None = None,
    samples: int | str | None = None,
    model: tuple[Any, Any, Callable[[Any], Any]] | None = None,
    backend: Backend | None = None,
    latency_us: float | None = None,
    efficiency: float | None = None,
    gather_efficiency: float | None = None,
    cpu_seconds_per_gb: float = 0.0,
    bucket_mb: float = BUCKET_MB,
    base_batch_size: int | str | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    reduction: Reduction = "mean",
) -> Forecast:
    """Steps, cut, tail, bytes and seconds of a run, and its learning rate, as far as what is given tells.

    `samples` are those of an epoch. Counts may be texts such as "350M". `link_gbit` is the rate between two nodes (each
    way, nominal; with one node between two ranks), `node_gbit` of one rank within a node. `model` is a model, a batch
    and a loss_fn to measure parameters and seconds on. `backend` is "nccl" where there is a CUDA device, else "gloo".
    `cpu_seconds_per_gb` is what sending a GB takes of the core that computes, where a rank on a CPU has only one.

    >>> forecast = plan(batch_size=1000, micro_batch_size=32, ranks=8)
    >>> forecast.steps, forecast.windows.samples, str(forecast.split)
    (4, 1024, '1,000 samples (8 ranks: 125 = 3 x 31 + 1 x 32)')
    """
    ranks, nodes = whole_number("ranks", ranks), whole_number("nodes", nodes)
    if ranks % nodes:
        below, above = ranks - ranks % nodes, ranks - ranks % nodes + nodes
        cure = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"ranks={ranks} on nodes={nodes}, expected as many on each node; give {cure} ranks")
    batch, micro, epoch, base, numbers = (
        None if value is None else amount(name, value)
        for name, value in (
            ("batch_size", batch_size),
            ("micro_batch_size", micro_batch_size),
            ("samples", samples),
            ("base_batch_size", base_batch_size),
            ("parameters", parameters),
        )
    )
    num_bytes = 4 if dtype_bytes is None else whole_number("dtype_bytes", dtype_bytes)
    positive = {"link_gbit": link_gbit, "node_gbit": node_gbit, "micro_step_seconds": micro_step_seconds, "lr": lr}
    positive |= {"latency_us": latency_us, "bucket_mb": bucket_mb, "cpu_seconds_per_gb": cpu_seconds_per_gb}
    for name, value in positive.items():
        if value is not None and not (0 < value < math.inf or (name in MAY_BE_NONE and value == 0)):
            raise ValueError(f"{name}={value}, expected a number above 0")
    for name, value in (("efficiency", efficiency), ("gather_efficiency", gather_efficiency)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}={value}, expected a part of the nominal rate, above 0 and at most 1")
    if not all(0 <= beta < 1 for beta in betas) or len(betas) != 2:
        raise ValueError(f"betas={betas}, expected two numbers from 0 to below 1")
    for name, chosen, known in (
        ("backend", backend, tuple(BACKENDS)),
        ("optimizer", optimizer, get_args(Optimizer)),
        ("reduction", reduction, REDUCTIONS),
    ):
        if chosen is not None and chosen not in known:
            raise ValueError(f"{name}={chosen!r}, expected one of {', '.join(known)}")

    notes, gradient_bytes = [], None if numbers is None else numbers * num_bytes
    if model is not None:
        from .measure import measure  # which needs torch: seconds to import, and all else does without

        found = measure(*model, micro_batch_size=micro)
        notes.append(found.told)
        micro = found.micro_batch_size  # what was asked for, or what fits of it
        micro_step_seconds = found.seconds if micro_step_seconds is None else micro_step_seconds
        if numbers is None:
            numbers = found.parameters
            gradient_bytes = found.gradient_bytes if dtype_bytes is None else numbers * num_bytes
    is_chosen, backend = backend is not None, backend or ("nccl" if _sees_cuda() else "gloo")
    link = _link(BACKENDS[backend], latency_us, efficiency, gather_efficiency)
    link = link._replace(processor=cpu_seconds_per_gb / 1e9)
    given = {
        "batch_size": batch,
        "micro_batch_size": micro,
        "ranks": ranks,
        "nodes": nodes,
        "parameters": numbers,
        "link_gbit": link_gbit,
        "node_gbit": node_gbit,
        "micro_step_seconds": micro_step_seconds,
        "samples": epoch,
        "backend": backend,
        "link": link._asdict(),
        "bucket_mb": bucket_mb,
        "base_batch_size": base,
        "dtype_bytes": dtype_bytes,
        "lr": lr,
        "optimizer": optimizer,
        "betas": list(betas),
        "reduction": reduction,
    }
    steps = windows = split = windows_tail = split_tail = None
    if batch is not None and micro is not None:
        steps = steps_for(batch, micro, ranks)
        windows = Cut(steps * micro * ranks, (Alike(ranks, steps * micro, ((steps, micro),)),))
        split = _split(batch, micro, ranks)
        if epoch is not None:
            windows_tail, split_tail = _tail_of_windows(epoch, steps, micro, ranks), _tail_of_split(epoch, split, micro)
    rows: tuple[dict[str, Any], ...] = ()
    if numbers is not None and gradient_bytes is not None and ranks > 1:
        rates = _rates(ranks, nodes, link_gbit, node_gbit)
        buckets = max(1, math.ceil(gradient_bytes / (bucket_mb * 1e6)))
        network = Network(ranks, nodes, backend, link, rates, gradient_bytes, buckets)
        for one in policies_for(numbers, ranks, nodes):
            own = network if one.bucket is None else dataclasses.replace(network, buckets=-(-numbers // one.bucket))
            rows += (_row(one, own, steps, micro_step_seconds),)
    if rows and not is_chosen:
        notes.append(CHOSEN[backend])
    rate = None
    if batch is not None and base is not None:
        updates = windows_tail.updates if windows_tail is not None else None
        rate = scaled_learning_rate(batch, base, lr, optimizer, betas, reduction, updates)
    return Forecast(
        given,
        gradient_bytes,
        steps,
        windows,
        split,
        windows_tail,
        split_tail,
        rows,
        rate,
        tuple(notes),
        _missing(given),
    )


def _sees_cuda() -> bool:
    """As torch says where the caller has imported it, else by the driver's files: importing it takes seconds."""
    torch = sys.modules.get("torch")
    return any(Path("/dev").glob("nvidia[0-9]*")) if torch is None else bool(torch.cuda.is_available())


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def amount(name: str, value: object) -> int:
    """A whole number of at least 1, also as a text.

    >>> amount("parameters", "11.7M"), amount("parameters", "7e9"), amount("samples", "1,281,167")
    (11700000, 7000000000, 1281167)
    >>> amount("parameters", "7b"), amount("parameters", "350m")
    (7000000000, 350000000)
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str):
        return whole_number(name, value)
    whole = r"\d{1,3}(?:[,_]\d{3})+|\d+"  # a decimal comma is none of it
    found = re.fullmatch(rf"((?:{whole}|\d*\.\d+|\d+\.)(?:[eE][+]?\d{{1,2}})?)\s*([kKmMbBgGtT]?)", value.strip())
    try:
        number = Decimal(found[1].replace(",", "").replace("_", "")) if found else None
    except InvalidOperation:
        number = None
    exact = None if number is None or found is None else number * SUFFIXES[found[2].upper()]
    if exact is None or exact != int(exact):
        raise ValueError(f"{name}={value!r}, expected a whole number such as 512, 7e9, 7b, 350M or 11.7M")
    return whole_number(name, int(exact))


# The cut
def _split(batch: int, micro: int, ranks: int) -> Cut:
    alike = [Alike(times, size, tuple(even_cut(size, largest=micro))) for times, size in even_cut(batch, parts=ranks)]
    dry = ranks - sum(one.ranks for one in alike)
    return Cut(batch, (*([Alike(dry, 0, ())] if dry else []), *alike))


def _tail_of_windows(epoch: int, steps: int, micro: int, ranks: int) -> Tail:
    """Rank r has samples[r::ranks], in micro-batches of which the last may be short."""
    least, with_more = divmod(epoch, ranks)
    updates = -(-(least + (with_more > 0)) // (steps * micro))
    done = (updates - 1) * steps * micro
    alike = []
    for num, of_rank in ((ranks - with_more, least - done), (with_more, least + 1 - done)):
        whole, rest = divmod(of_rank, micro)
        parts = tuple((times, size) for times, size in ((whole, micro), (1, rest)) if times and size)
        if num:
            alike.append(Alike(num, of_rank, parts))
    return _tail(updates, alike, steps * micro * ranks)


def _tail_of_split(epoch: int, split: Cut, micro: int) -> Tail:
    updates = -(-epoch // split.samples)
    ranks = sum(one.ranks for one in split.ranks)
    return _tail(updates, _split(epoch - (updates - 1) * split.samples, micro, ranks).ranks, split.samples)


def _tail(updates: int, alike: Iterable[Alike], whole: int) -> Tail:
    alike = tuple(alike)
    nums = [sum(times for times, _ in one.micro_batches) for one in alike]
    samples = sum(one.ranks * one.samples for one in alike)
    return Tail(
        updates,
        Cut(samples, alike),
        samples / whole,
        sum(one.ranks for one, num in zip(alike, nums, strict=True) if num < max(nums)),
        sum(one.ranks for one in alike if not one.samples),
    )


# Bytes and seconds
@dataclasses.dataclass(frozen=True)
class Network:
    """What collectives of `size` bytes, in `buckets`, cost on these ranks."""

    ranks: int
    nodes: int
    backend: str
    link: Link
    rates: Mapping[str, float | None]  # bytes per second of a rank, by `Call.among`
    size: int
    buckets: int

    def members(self, among: str) -> int:
        return {"all": self.ranks, "node": self.ranks // self.nodes, "replicas": self.nodes}[among]

    def sent(self, call: Call) -> int:
        """Bytes by one rank: of a ring, 2 (W - 1) / W of the whole for an all-reduce, half of that for a half."""
        num = self.members(call.among)
        size = -(-self.size * self.nodes // self.ranks) if call.among == "replicas" else self.size  # a shard
        return -(-self._rounds(call.kind) * (num - 1) * size // num)

    def _rounds(self, kind: Kind) -> int:
        both = kind == "all-reduce" or (kind == "reduce-scatter" and self.backend == "gloo")  # which all-reduces
        return 2 if both else 1

    def latency(self, call: Call, times: int) -> float:
        return times * self.link.latency * self._hops(call)

    def _hops(self, call: Call) -> float:
        num = self.members(call.among)
        ring = self._rounds(call.kind) * (num - 1)
        if self.backend == "nccl" and call.kind == "all-reduce" and num > 2:
            nodes = self.nodes if call.among != "node" else 1
            tree = 2 * (math.log2(nodes) + (num // nodes - 1))  # NCCL's double binary trees between nodes
            return min(ring, tree)
        return ring

    def seconds(self, call: Call) -> float | None:
        rate = self.rates[call.among]
        if rate is None:
            return None
        part = self.link.gather if call.kind == "all-gather" else self.link.reduce
        return self.latency(call, self.buckets) + self.sent(call) / (rate * part)

    def processor(self, call: Call) -> float:
        return self.sent(call) * self.link.processor

    def beside(self) -> float:
        """Latency of the two small collectives of a window: its plan, which gloo gathers, and its record."""
        hop = self.link.latency if self.backend == "gloo" else HOST_HOP
        return (self.ranks - 1) * hop + self.latency(REDUCE, 1)


def _rates(ranks: int, nodes: int, link_gbit: float | None, node_gbit: float | None) -> dict[str, float | None]:
    """A ring over all ranks crosses each node's link once each way; rings of replicas share it."""
    per_node = ranks // nodes
    within = node_gbit if node_gbit is not None or nodes > 1 else link_gbit
    link = None if link_gbit is None else link_gbit * 1e9 / 8
    node = None if within is None else within * 1e9 / 8
    if nodes == 1:
        return {"all": node, "node": node, "replicas": None}
    ring = link if link is None or node is None or per_node == 1 else min(link, node)
    return {"all": ring, "node": node, "replicas": None if link is None else link / per_node}


def _link(known: Link, latency_us: float | None, efficiency: float | None, gather: float | None) -> Link:
    changed: dict[str, Any] = {}
    if latency_us is not None:
        changed["latency"] = latency_us / 1e6
    if efficiency is not None:
        changed["reduce"] = changed["gather"] = efficiency
    if gather is not None:
        changed["gather"] = gather
    if changed:
        changed["source"] = f"given; else {known.source}" if len(changed) < 3 else "given"
    return known._replace(**changed)


class Spans(NamedTuple):
    """Seconds: `each` of a micro-step, `rest` of an update beyond them; and of their communication."""

    each: float
    rest: float
    sent_each: float
    sent_rest: float


def _spans(policy: Policy, network: Network, micro_step: float) -> Spans | None:
    """An update of K micro-steps takes K x each + rest."""
    hides = network.backend != "gloo" or policy.on_gloo
    if None in [network.seconds(call) for call in (*policy.each, *policy.once)]:
        return None
    each, sent_each = _one_step(policy.each, network, micro_step, hides)
    last, sent_last = _one_step((*policy.each, *policy.once), network, micro_step, hides)
    beside = network.beside()
    return Spans(each, last - each + beside, sent_each, sent_last - sent_each + beside)


def _one_step(calls: Sequence[Call], network: Network, micro_step: float, hides: bool) -> tuple[float, float]:
    """Seconds of a micro-step with these collectives, and of the collectives alone."""
    under, takes = ({"forward": 0.0, "backward": 0.0, "nothing": 0.0} for _ in range(2))
    for call in calls:
        where = call.under if hides else "nothing"
        under[where] += network.seconds(call) or 0.0
        takes[where] += network.processor(call)
    lasts = under["nothing"]
    for name, compute in (("forward", (1 - BACKWARD) * micro_step), ("backward", BACKWARD * micro_step)):
        lasts += beneath(compute, under[name], network.buckets, takes[name])
    return lasts, sum(under.values())


def beneath(compute: float, sent: float, buckets: int, processor: float = 0.0) -> float:
    """Seconds of both, where each bucket is sent as soon as its part of the computation is there (or the reverse).

    `processor` seconds of the sending are taken from the computation.

    >>> beneath(compute=4.0, sent=4.0, buckets=4), beneath(compute=4.0, sent=4.0, buckets=1)
    (5.0, 8.0)
    >>> beneath(compute=4.0, sent=4.0, buckets=4, processor=2.0)
    6.5
    """
    if not sent:
        return compute
    return max(compute / buckets + sent, compute + (1 - 1 / buckets) * processor + sent / buckets)


def _row(policy: Policy, network: Network, steps: int | None, micro_step: float | None) -> dict[str, Any]:
    each, once = (sum(map(network.sent, calls)) for calls in (policy.each, policy.once))
    row: dict[str, Any] = {"policy": policy.name, "bytes_per_micro_step": each, "bytes_once": once}
    row |= {"bytes_per_update": None if steps is None else steps * each + once}
    row |= {"seconds_per_update": None, "timing": None, "window_for": None, "next_doubling_wins": None, "line": None}
    spans = None if micro_step is None else _spans(policy, network, micro_step)
    if spans is None or micro_step is None:
        return row
    row["line"] = {"per_micro_step": spans.each, "per_update": spans.rest}
    row["window_for"] = {f"{level:.0%}": enough(spans, micro_step, level) for level in LEVELS}
    if steps is not None:
        update, compute = steps * spans.each + spans.rest, steps * micro_step
        sent = steps * spans.sent_each + spans.sent_rest
        hidden, count = sent - (update - compute), network.buckets
        latency = steps * sum(network.latency(call, count) for call in policy.each)
        latency += sum(network.latency(call, count) for call in policy.once) + network.beside()
        row["timing"] = dataclasses.asdict(
            Timing(update, compute, update - compute, hidden if hidden > 1e-9 * sent else 0.0, latency)
        )
        row["seconds_per_update"] = update
        row["next_doubling_wins"] = 1 - (2 * steps * spans.each + spans.rest) / (2 * update)
    return row


def enough(spans: Spans, micro_step: float, level: float) -> int | None:
    """The shortest window of whose seconds less than `level` are exposed communication; None: no window is.

    >>> enough(Spans(1.0, 0.5, 0.0, 0.5), 1.0, 0.1)
    5
    """
    room = micro_step - (1 - level) * spans.each  # per micro-step, before the level is reached
    if room <= 0:
        return None
    return max(1, math.floor((1 - level) * spans.rest / room) + 1)


# The learning rate
GOYAL = "Goyal et al. 2017, arXiv:1706.02677"
MALLADI = "Malladi et al. 2022, arXiv:2205.10287"


def scaled_learning_rate(
    batch_size: int,
    base_batch_size: int,
    lr: float | None,
    optimizer: Optimizer | None,
    betas: tuple[float, float],
    reduction: Reduction,
    updates_per_epoch: int | None = None,
) -> dict[str, Any]:
    """What the rules say for `batch_size` of what was good for `base_batch_size`; rules of thumb, to be tried.

    >>> scaled_learning_rate(1024, 256, 0.1, "sgd", (0.9, 0.999), "mean")["lr"]
    0.4
    >>> found = scaled_learning_rate(1024, 256, 1e-3, "adam", (0.9, 0.999), "mean")
    >>> found["lr"], [round(beta, 6) for beta in found["betas"]], found["eps_times"]
    (0.002, [0.6, 0.996], 0.5)
    >>> scaled_learning_rate(1024, 256, 0.1, "sgd", (0.9, 0.999), "sum")["lr"]
    0.1
    """
    kappa = batch_size / base_batch_size
    found: dict[str, Any] = {"kappa": kappa, "reduction": reduction, "optimizer": optimizer, "advice": []}
    advice: list[str] = found["advice"]
    is_sum = reduction == "sum"
    if optimizer in (None, "sgd"):
        times = 1.0 if is_sum else kappa
        word = f"SGD: lr x {times:g}" + (f" = {lr * times:g}" if lr is not None else "")
        if is_sum:
            advice.append(
                f"{word}: the gradient of a sum has grown by {kappa:g} with the batch already, which is the linear "
                f"scaling; do not scale the rate again ({GOYAL}, section 3 on normalising the loss)"
            )
        else:
            advice.append(f"{word}: linear in the batch ({GOYAL}; held up to 8,192 on ImageNet there)")
        if kappa > 1:
            epochs = "" if updates_per_epoch is None else f" ({5 * updates_per_epoch:,} updates)"
            start = f"the rate / {kappa:g}" if is_sum else "the base rate"
            advice.append(f"SGD: warm up from {start} over 5 epochs{epochs} (the same, section 2.2)")
        if optimizer == "sgd":
            found |= {"lr_times": times, "lr": None if lr is None else lr * times}
    if optimizer in (None, "adam"):
        root = math.sqrt(kappa)
        scaled = [round(1 - kappa * (1 - beta), 12) for beta in betas]
        eps = root if is_sum else 1 / root
        shown = f"Adam: lr x {root:g}" + (f" = {lr * root:g}" if lr is not None else "")
        advice.append(f"{shown}: square root of the batch ({MALLADI})")
        if min(scaled) < 0:
            would_be, most = ", ".join(f"{beta:g}" for beta in scaled), f"{_most(base_batch_size, betas):,}"
            advice.append(
                f"Adam: betas would be {would_be} by 1 - beta x {kappa:g}, and below 0 the rule ends; keep the batch "
                f"at {most} or below (the same)"
            )
            scaled = []
        else:
            advice.append(f"Adam: betas {', '.join(f'{beta:g}' for beta in scaled)}: 1 - beta x {kappa:g} (the same)")
        of_sum = ", since the gradient of a sum is larger, which Adam divides out again" if is_sum else ""
        advice.append(f"Adam: eps x {eps:g} (the same{of_sum})")
        if optimizer == "adam":
            found |= {"lr_times": root, "lr": None if lr is None else lr * root, "betas": scaled or None}
            found["eps_times"] = eps
    if is_sum and kappa != 1:
        advice.append(f"a sum: max_norm x {kappa:g} if you clip, and SGD's weight decay x {kappa:g} to weigh as before")
    return found


def _most(base: int, betas: tuple[float, float]) -> int:
    return math.floor(base / (1 - min(betas)) + 1e-9)


# What is printed
def _missing(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences: what to give, and for what."""

    def lacks(*names: str) -> str:
        return " and ".join(f"--{name.replace('_', '-')}" for name in names if given[name] is None)

    wanted = [
        (("batch_size", "micro_batch_size"), "the steps and the cut"),
        (("samples",), "an epoch's tail"),
        (("parameters",), "the bytes per update"),
        (("base_batch_size",), "the learning rate"),
    ]
    ranks, nodes, node = given["ranks"], given["nodes"], given["node_gbit"]
    found = [f"{lacks(*names)} for {what}" for names, what in wanted if lacks(*names)]
    if given["parameters"] is not None and ranks == 1:
        found.append("--ranks above 1 for what is sent between them")
    has_rate = given["link_gbit"] is not None or (nodes == 1 and node is not None)
    for_seconds = ("micro_step_seconds",) if has_rate else ("link_gbit", "micro_step_seconds")
    if ranks > 1 and lacks(*for_seconds):
        found.append(f"{lacks(*for_seconds)} for the seconds per update")
    if 1 < nodes < ranks and node is None:
        found.append("--node-gbit for the seconds of the hybrid policies, and for a node's own link in a ring of all")
    return tuple(found)


def _text(forecast: Forecast, columns: int) -> list[str]:
    given = forecast.given
    shape = f"{_num(given['ranks'], 'rank')} on {_num(given['nodes'], 'node')}"
    lines = [f"plan for {shape}"]
    lines += [f"  {note}" for note in forecast.notes]
    if forecast.steps is not None and forecast.windows is not None and forecast.split is not None:
        batch, micro, more = given["batch_size"], given["micro_batch_size"], forecast.windows.samples
        per_rank = f"{_num(forecast.steps, 'micro-step')} per rank and update"
        lines += ["", f"steps: {per_rank}, for {batch:,} samples of which {micro:,} fit"]
        beyond = "" if more == batch else f", {more - batch:,} more than asked for"
        lines.append(f"  windows(loader)  {forecast.windows}{beyond}")
        is_dry = any(not one.samples for one in forecast.split.ranks)
        of_dry = ", but an error under FSDP and ZeRO 3, where each rank needs a micro-batch" if is_dry else ""
        lines.append(f"  split(batch)     {forecast.split}: exact{of_dry}")
    for name, tail in (("windows(loader)", forecast.windows_tail), ("split(batch)", forecast.split_tail)):
        if tail is None:
            continue
        if name.startswith("windows"):
            lines += ["", f"epoch of {given['samples']:,} samples, dealt out to the ranks one by one"]
        last = "the last is whole: " if tail.share == 1 else f"the last has {tail.share:.2%} of a window: "
        lines.append(f"  {name:15}  {_num(tail.updates, 'update')}; {last}{tail.last}")
        if tail.ranks_with_fewer_micro_batches:
            fewer = f"{_num(tail.ranks_with_fewer_micro_batches, 'rank')} with fewer micro-batches there"
            dry = f", {tail.dry_ranks:,} of them with none" if tail.dry_ranks else ""
            others = "they stand in under FSDP and ZeRO 3"
            if tail.dry_ranks and tail.updates == 1:
                others = "an error under FSDP and ZeRO 3, with no window before it to stand in from"
            lines.append(f"  {'':15}  {fewer}{dry}; {others}")
    if forecast.policies:
        lines += ["", *_table(forecast, columns)]
    if forecast.learning_rate is not None:
        base = given["base_batch_size"]
        lines += ["", f"learning rate for a batch of {given['batch_size']:,} from {base:,} (rules of thumb: try them)"]
        lines += [f"  {one}" for one in forecast.learning_rate["advice"]]
    if forecast.missing:
        lines += ["", "to know more, give", *(f"  {one}" for one in forecast.missing)]
    return lines


def _table(forecast: Forecast, columns: int) -> list[str]:
    given, rows = forecast.given, forecast.policies
    parameters, link = given["parameters"], given["link"]
    what = f"{parameters:,} parameters, {_bytes(forecast.gradient_bytes)} of gradients, on {given['backend']}"
    lines = [f"sent by each rank ({what})"]
    cells = [
        [row["policy"], *(_bytes(row[f"bytes_{name}"]) for name in ("per_micro_step", "once", "per_update"))]
        for row in rows
    ]
    lines += table([["", "each micro-step", "once", "per update"], *cells], columns)
    timed = any(row["line"] is not None for row in rows)
    if timed:
        names = ("update", "compute", "exposed", "hidden", "latency")
        cells = [["", "s per update", *names[1:], "< 10% from", "< 5% from", "2x wins"]]
        for row in rows:
            timing, windows, wins = row["timing"] or {}, row["window_for"], row["next_doubling_wins"]
            cell = [row["policy"], *(_seconds(timing.get(name)) for name in names)]
            cell += ["-" if windows is None else _window(windows[f"{level:.0%}"]) for level in LEVELS]
            cells.append([*cell, "-" if wins is None else f"{wins:.1%}"])
        lines += ["", "predicted", *table(cells, columns)]
    if timed:
        between, within = given["link_gbit"], given["node_gbit"]
        if given["nodes"] == 1:
            rate = f", {within or between:g} Gbit/s between ranks"
        else:
            rate = "" if between is None else f", {between:g} Gbit/s between nodes"
            rate += "" if within is None else f", {within:g} within one"
        of_rate = f"{link['reduce']:.0%} of the rate for reductions and {link['gather']:.0%} for gathers"
        lines += [
            f"  {given['micro_step_seconds']:.4g} s per micro-step{rate}",
            f"  {link['latency'] * 1e6:g} us per hop, {of_rate}",
            f"  ({link['source']})",
            "  exposed: communication that ranks wait for; hidden: under a forward or backward; latency: the part of "
            "both that is no bytes; < 10% from: the window length from which less than that is exposed, and more "
            "accumulation stops helping; 2x wins: per sample, by a window twice as long",
        ]
    return lines


def _window(length: int | None) -> str:
    return "never" if length is None else f"K = {length:,}"


def _num(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bytes(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


# The picture
STYLES = {  # colours that the colour-blind can tell apart, and dashes for those who print in grey
    "DDP, every": ("#D55E00", "--"),
    LAST: ("#0072B2", "-"),
    "ZeRO 3, last": ("#CC79A7", "-."),
    "FSDP2, every": ("#E69F00", "--"),
    "FSDP2, last": ("#E69F00", "-"),
    "FSDP2, gathered": ("#009E73", "--"),
    "ZeRO 1 and 2, last": ("#56B4E9", "-."),  # where it is gathered's, both show
    "FSDP2 hybrid, replicas": ("#009E73", ":"),
}


def _plot(forecast: Forecast, path: Path) -> None:
    rows = [row for row in forecast.policies if row["line"] is not None]
    if not rows:
        raise ValueError(
            "nothing to draw without seconds; give --ranks, --parameters, --link-gbit, --micro-step-seconds"
        )
    steps, compute = forecast.steps, forecast.given["micro_step_seconds"]
    bars = [row for row in rows if row["timing"] is not None]
    height = max(4.8, 1.8 + 0.36 * len(rows))
    figure = blank(path, 12 if bars else 7, height)
    panels = figure.subplots(1, 2 if bars else 1, squeeze=False)
    left = panels[0, 0]

    from matplotlib.ticker import LogLocator

    longest = max(LONGEST, 2 * (steps or 1))
    lengths = [2**power for power in range(longest.bit_length())]
    for row in (row for row in rows if row["policy"] in STYLES):
        colour, dashes = STYLES[row["policy"]]
        each, rest = row["line"]["per_micro_step"], row["line"]["per_update"]
        left.plot(lengths, [each + rest / num for num in lengths], dashes, color=colour, label=row["policy"], lw=1.8)
    left.axhline(compute, color="black", linewidth=1, linestyle=(0, (1, 1)), label="computing alone")
    if steps is not None:
        left.axvline(steps, color="#888888", linewidth=1, label=f"planned: {_num(steps, 'micro-step')}")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xlim(1, lengths[-1])
    left.set_xticks(lengths[::2], [f"{num:,}" for num in lengths[::2]])
    left.set_xlabel("micro-steps per update (window length)")
    left.set_ylabel("seconds per update / micro-steps")
    left.set_title("What a micro-step costs, by the window's length", fontsize=10, loc="left")
    left.grid(alpha=0.3)
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5 if bars else 3, fontsize=8)
    if bars:
        _draw_bars(panels[0, 1], bars, steps)
    given = forecast.given
    shape = f"{_num(given['ranks'], 'rank')} on {_num(given['nodes'], 'node')}, {given['backend']}"
    rate = f", {given['link_gbit']:g} Gbit/s" if given["link_gbit"] is not None else ""
    figure.suptitle(f"Predicted: {shape}{rate}, {_bytes(forecast.gradient_bytes)} of gradients", fontsize=11)
    save(figure, path)


def _draw_bars(panel: Any, rows: Sequence[Mapping[str, Any]], steps: int | None) -> None:
    furthest = max(row["seconds_per_update"] for row in rows)
    parts = (("compute", "#0072B2", ""), ("exposed", "#E69F00", "///"))
    for y, row in enumerate(rows):
        start = 0.0
        for name, colour, hatch in parts:
            panel.barh(y, row["timing"][name], left=start, color=colour, hatch=hatch, edgecolor="white", height=0.75)
            start += row["timing"][name]
        text = f"{_seconds(start)} s, {_bytes(row['bytes_per_update'])}"
        panel.text(start + 0.01 * furthest, y, text, va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [row["policy"] for row in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, 1.38 * furthest)
    panel.set_xlabel("seconds per update; bytes that a rank sends")
    panel.set_title(f"Where they go, in windows of {_num(steps or 0, 'micro-step')}", fontsize=10, loc="left")
    from matplotlib.patches import Patch

    words = {"compute": "computing", "exposed": "waiting for communication"}
    signs = [Patch(facecolor=c, hatch=h, edgecolor="white", label=words[name]) for name, c, h in parts]
    panel.legend(handles=signs, fontsize=8, loc="lower right")
