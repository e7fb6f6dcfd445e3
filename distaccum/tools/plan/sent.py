"""Bytes that each rank sends in an update, for each engine and policy, by ring collectives."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}  # of (W - 1) / W of the bytes each
SHARDS_KEPT = 10**9  # parameters; below it ZeRO 3 keeps what forward gathered until backward


class Call(NamedTuple):
    """A collective over all gradients or parameters."""

    kind: str
    among: Literal["all", "node", "replicas"] = "all"


class Policy(NamedTuple):
    """When an engine communicates."""

    name: str
    each: tuple[Call, ...]  # in each micro-step
    once: tuple[Call, ...]  # per window


REDUCE, SCATTER, GATHER = Call("all-reduce"), Call("reduce-scatter"), Call("all-gather")


def policies_for(parameters: int, ranks: int, nodes: int) -> list[Policy]:
    """The policies that run there; the hybrid ones shard within a node, and have one replica per node."""
    zero3 = (GATHER,) if parameters <= SHARDS_KEPT else (GATHER, GATHER)
    found = [
        Policy("DDP, every", (REDUCE,), ()),
        Policy("DDP, last", (), (REDUCE,)),
        Policy("ZeRO 0, last", (), (REDUCE,)),
        Policy("ZeRO 1 and 2, last", (), (REDUCE, GATHER)),
        Policy("ZeRO 2, every", (REDUCE,), (GATHER,)),
        Policy("ZeRO 3, last", zero3, (SCATTER,)),
        Policy("ZeRO 3, every", (*zero3, SCATTER), ()),
        Policy("FSDP2, every", (GATHER, GATHER, SCATTER), ()),
        Policy("FSDP2, last", (GATHER, GATHER), (SCATTER,)),
        Policy("FSDP2, gathered", (), (GATHER, SCATTER)),
    ]
    if 1 < nodes < ranks:
        gathers, scatter = (Call("all-gather", "node"),) * 2, Call("reduce-scatter", "node")
        replicas = Call("all-reduce", "replicas")
        found += [
            Policy("FSDP2 hybrid, last", gathers, (scatter, replicas)),
            Policy("FSDP2 hybrid, replicas", (*gathers, scatter), (replicas,)),
        ]
    return found


def sent(call: Call, size: int, ranks: int, nodes: int) -> int:
    """Bytes that one rank of a ring sends for a collective of `size` bytes, of which replicas have a shard each."""
    members = {"all": ranks, "node": ranks // nodes, "replicas": nodes}[call.among]
    size = -(-size * nodes // ranks) if call.among == "replicas" else size
    return -(-ROUNDS[call.kind] * (members - 1) * size // members)


def row_of(policy: Policy, size: int, ranks: int, nodes: int, steps: int | None) -> dict[str, Any]:
    """The bytes of a policy, for a gradient of `size` bytes in windows of `steps` micro-steps."""
    each, once = (sum(sent(call, size, ranks, nodes) for call in calls) for calls in (policy.each, policy.once))
    total = None if steps is None else steps * each + once
    return {"policy": policy.name, "bytes_per_micro_step": each, "bytes_once": once, "bytes_per_update": total}
