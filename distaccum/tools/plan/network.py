"""Bytes and predicted seconds of each engine and policy on a network of ranks.

Bytes are those of ring collectives. A collective takes latency x hops + bytes / rate seconds; a forward or backward at
the same time hides as much of it as fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Backend = Literal["gloo", "nccl"]
Kind = Literal["all-reduce", "reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class Transport:
    """The performance of a backend on a link."""

    latency: float  # seconds of a hop
    reduce: float  # the fraction of the nominal rate that reductions reach
    gather: float  # the fraction that gathers reach
    source: str
    processor: float = 0.0  # seconds per byte of the computing core; 0 where ranks have cores to spare

    def given(
        self, latency_us: float | None, efficiency: float | None, gather_efficiency: float | None, per_gb: float
    ) -> Transport:
        """This transport with the user's numbers in it."""
        gather = efficiency if gather_efficiency is None else gather_efficiency
        latency = None if latency_us is None else latency_us / 1e6
        values = {"latency": latency, "reduce": efficiency, "gather": gather}
        changed: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        sources = {0: self.source, len(values): "given"}
        source = sources.get(len(changed), f"given; else {self.source}")
        return replace(self, **changed, source=source, processor=per_gb / 1e9)


BACKENDS: Mapping[str, Transport] = {
    # A hop is what forecast.py fitted. 0.956 of a full Ethernet frame is payload, and DDP reaches that in two_nodes.md.
    # Gathers reach 0.75 in forecast.py's fit and 0.55 in two_nodes.md, whose messages are larger.
    "gloo": Transport(262e-6, 0.956, 0.65, "seen at 1 Gbit/s, launch/results/forecast.md and two_nodes.md"),
    "nccl": Transport(5e-6, 0.9, 0.9, "assumed, not measured; give your own"),
}
HOST_HOP = 50e-6  # seconds of a hop of gloo beside another backend: assumed, of TCP between hosts
ROW = 120  # bytes of a rank in the plan
BUCKET_MB = 25.0  # DDP's default; FSDP and ZeRO 3 cut by layers, which is near it
ZERO_BUCKET = 5 * 10**8  # numbers: DeepSpeed's default up to ZeRO 2
BACKWARD = 2 / 3  # of a micro-step: two products for each one of the forward
SHARDS_KEPT = 10**9  # parameters; below it ZeRO 3 keeps what forward gathered until backward
LEVELS = (0.10, 0.05)  # of an update, in exposed communication


@dataclass(frozen=True)
class Call:
    """A collective over all gradients or parameters."""

    kind: Kind
    under: Literal["forward", "backward", "nothing"]  # the computation that hides it
    among: Literal["all", "node", "replicas"] = "all"


@dataclass(frozen=True)
class Policy:
    """When an engine communicates."""

    name: str
    each: tuple[Call, ...]  # in each micro-step
    once: tuple[Call, ...]  # per window
    hides_on_gloo: bool = False
    bucket: int | None = None  # numbers, where the engine has a size of its own


REDUCE = Call("all-reduce", "backward")
AFTER = Call("all-reduce", "nothing")  # DeepSpeed reduces when backward is over
GATHERS = (Call("all-gather", "forward"), Call("all-gather", "backward"))
SCATTER = Call("reduce-scatter", "backward")
REFRESH = Call("all-gather", "nothing")
LAST = "DDP, last"


def policies_for(parameters: int, ranks: int, nodes: int) -> list[Policy]:
    """All policies that run there; the hybrid ones shard within a node, and have one replica per node."""
    zero3 = GATHERS[:1] if parameters <= SHARDS_KEPT else GATHERS
    found = [
        Policy("DDP, every", (REDUCE,), (), hides_on_gloo=True),
        Policy(LAST, (), (REDUCE,), hides_on_gloo=True),
        Policy("ZeRO 0, last", (), (AFTER,), bucket=ZERO_BUCKET),
        Policy("ZeRO 1 and 2, last", (), (AFTER, REFRESH), bucket=ZERO_BUCKET),
        Policy("ZeRO 2, every", (AFTER,), (REFRESH,), bucket=ZERO_BUCKET),
        Policy("ZeRO 3, last", zero3, (replace(SCATTER, under="nothing"),)),
        Policy("ZeRO 3, every", (*zero3, SCATTER), ()),
        Policy("FSDP2, every", (*GATHERS, SCATTER), ()),
        Policy("FSDP2, last", GATHERS, (SCATTER,)),
        Policy("FSDP2, gathered", (), (REFRESH, SCATTER)),
    ]
    if 1 < nodes < ranks:
        gathers = tuple(replace(call, among="node") for call in GATHERS)
        scatter, replicas = replace(SCATTER, among="node"), replace(REDUCE, among="replicas")
        found += [
            Policy("FSDP2 hybrid, last", gathers, (scatter, replicas)),
            Policy("FSDP2 hybrid, replicas", (*gathers, scatter), (replicas,)),
        ]
    return found


@dataclass(frozen=True)
class Network:
    """The cost of collectives of `size` bytes, in `buckets`, on these ranks."""

    ranks: int
    nodes: int
    backend: str
    transport: Transport
    rates: Mapping[str, float | None]  # bytes per second of a rank, by `Call.among`
    size: int
    buckets: int

    def members(self, call: Call) -> int:
        return {"all": self.ranks, "node": self.ranks // self.nodes, "replicas": self.nodes}[call.among]

    def sent(self, call: Call) -> int:
        """Bytes that one rank of a ring sends: 2 (W - 1) / W of the whole for an all-reduce, else half of that."""
        num = self.members(call)
        size = -(-self.size * self.nodes // self.ranks) if call.among == "replicas" else self.size  # a shard
        return -(-self._rounds(call.kind) * (num - 1) * size // num)

    def _rounds(self, kind: Kind) -> int:
        both = kind == "all-reduce" or (kind == "reduce-scatter" and self.backend == "gloo")  # which all-reduces
        return 2 if both else 1

    def latency(self, call: Call, times: int) -> float:
        return times * self.transport.latency * self._hops(call)

    def _hops(self, call: Call) -> float:
        num = self.members(call)
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
        reached = self.transport.gather if call.kind == "all-gather" else self.transport.reduce
        return self.latency(call, self.buckets) + self.sent(call) / (rate * reached)

    def small(self) -> float:
        """Of a window's plan and record.

        For the plan one rank of each node sends, in a round for each bit of the nodes. Ranks of one node on gloo leave
        the record in its memory too.
        """
        hop = self.transport.latency if self.backend == "gloo" else HOST_HOP
        rate, others = self.rates["all"], self.ranks - self.ranks // self.nodes
        rows = 0.0 if rate is None else others * ROW / (rate * self.transport.gather)
        record = 0.0 if self.backend == "gloo" and self.nodes == 1 else self.latency(REDUCE, 1)
        return (self.nodes - 1).bit_length() * hop + rows + record


def rates_between(ranks: int, nodes: int, link_gbit: float | None, node_gbit: float | None) -> dict[str, float | None]:
    """A ring over all ranks crosses each node's link once each way; rings of replicas share it."""
    per_node = ranks // nodes
    within = node_gbit if node_gbit is not None or nodes > 1 else link_gbit
    link = None if link_gbit is None else link_gbit * 1e9 / 8
    node = None if within is None else within * 1e9 / 8
    if nodes == 1:
        return {"all": node, "node": node, "replicas": None}
    ring = link if link is None or node is None or per_node == 1 else min(link, node)
    return {"all": ring, "node": node, "replicas": None if link is None else link / per_node}


class Spans(NamedTuple):
    """Seconds: an update of K micro-steps takes K x each + rest, and its collectives K x sent_each + sent_rest."""

    each: float
    rest: float
    sent_each: float
    sent_rest: float


def _spans(policy: Policy, network: Network, micro_step: float) -> Spans | None:
    hides = network.backend != "gloo" or policy.hides_on_gloo
    if None in [network.seconds(call) for call in (*policy.each, *policy.once)]:
        return None
    each, sent_each = _one_step(policy.each, network, micro_step, hides)
    last, sent_last = _one_step((*policy.each, *policy.once), network, micro_step, hides)
    small = network.small()
    return Spans(each, last - each + small, sent_each, sent_last - sent_each + small)


def _one_step(calls: Sequence[Call], network: Network, micro_step: float, hides: bool) -> tuple[float, float]:
    """Seconds of a micro-step with these collectives, and of the collectives alone."""
    under, takes = ({"forward": 0.0, "backward": 0.0, "nothing": 0.0} for _ in range(2))
    for call in calls:
        where = call.under if hides else "nothing"
        under[where] += network.seconds(call) or 0.0
        takes[where] += network.sent(call) * network.transport.processor
    lasts = under["nothing"]
    for name, compute in (("forward", (1 - BACKWARD) * micro_step), ("backward", BACKWARD * micro_step)):
        lasts += beneath(compute, under[name], network.buckets, takes[name])
    return lasts, sum(under.values())


def beneath(compute: float, sent: float, buckets: int, processor: float = 0.0) -> float:
    """Seconds of both, where each bucket is sent as soon as its part of the computation is ready (or the reverse).

    Sending takes `processor` seconds from the computation.

    >>> beneath(compute=4.0, sent=4.0, buckets=4), beneath(compute=4.0, sent=4.0, buckets=1)
    (5.0, 8.0)
    >>> beneath(compute=4.0, sent=4.0, buckets=4, processor=2.0)
    6.5
    """
    if not sent:
        return compute
    return max(compute / buckets + sent, compute + (1 - 1 / buckets) * processor + sent / buckets)


def policy_row(policy: Policy, network: Network, steps: int | None, micro_step: float | None) -> dict[str, Any]:
    """Bytes, and seconds as far as they are known: of the update `exposed` is waited for, `hidden` is not."""
    each, once = (sum(map(network.sent, calls)) for calls in (policy.each, policy.once))
    row: dict[str, Any] = {"policy": policy.name, "bytes_per_micro_step": each, "bytes_once": once}
    row |= {"bytes_per_update": None if steps is None else steps * each + once}
    row |= dict.fromkeys(("seconds_per_update", "timing", "window_for", "next_doubling_wins", "line"))
    spans = None if micro_step is None else _spans(policy, network, micro_step)
    if spans is None or micro_step is None:
        return row
    row["line"] = {"per_micro_step": spans.each, "per_update": spans.rest}
    row["window_for"] = {f"{level:.0%}": enough(spans, micro_step, level) for level in LEVELS}
    if steps is not None:
        update, compute = steps * spans.each + spans.rest, steps * micro_step
        sent = steps * spans.sent_each + spans.sent_rest
        hidden = sent - (update - compute)
        latency = [
            sum(network.latency(call, network.buckets) for call in calls) for calls in (policy.each, policy.once)
        ]
        row["seconds_per_update"] = update
        row["timing"] = {
            "update": update,
            "compute": compute,
            "exposed": update - compute,
            "hidden": hidden if hidden > 1e-9 * sent else 0.0,
            "latency": steps * latency[0] + latency[1] + network.small(),  # of exposed and hidden
        }
        row["next_doubling_wins"] = 1 - (2 * steps * spans.each + spans.rest) / (2 * update)
    return row


def enough(spans: Spans, micro_step: float, level: float) -> int | None:
    """The shortest window that exposes communication for less than `level` of its seconds; None if there is none.

    >>> enough(Spans(1.0, 0.5, 0.0, 0.5), 1.0, 0.1)
    5
    """
    room = micro_step - (1 - level) * spans.each  # per micro-step, before the level is reached
    if room <= 0:
        return None
    return max(1, math.floor((1 - level) * spans.rest / room) + 1)
