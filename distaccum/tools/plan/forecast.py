"""`plan`: the cut of a run, the tail of its epoch, its bytes, seconds and learning rate, before it is started."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, get_args

from ...law.shares import REDUCTIONS, Reduction, steps_for, whole_number
from .cuts import split_cut, tail_of_split, tail_of_windows, windows_cut
from .learning_rate import Optimizer, scaled_learning_rate
from .network import BACKENDS, BUCKET_MB, Backend, Network, policy_row, rates_between
from .report import Forecast
from .sharing import SIZES, Sharing

CHOSEN: Mapping[str, str] = {  # where the user named no backend
    "gloo": "on gloo, since there is no CUDA device here; --backend nccl gives NCCL's numbers",
    "nccl": "on NCCL, since there is a CUDA device here; --backend gloo gives gloo's numbers",
}
AMOUNTS = ("batch_size", "micro_batch_size", "samples", "base_batch_size", "parameters")
ACTIVATIONS = ("tokens", "width", "layers")
POSITIVE = ("link_gbit", "node_gbit", "micro_step_seconds", "lr", "latency_us", "bucket_mb", "cpu_seconds_per_gb")
MAY_BE_ZERO = ("latency_us", "cpu_seconds_per_gb")
CHOICES = {"backend": tuple(BACKENDS), "optimizer": get_args(Optimizer), "reduction": REDUCTIONS}


def plan(
    *,
    batch_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
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
    tokens: int | str | None = None,
    width: int | str | None = None,
    layers: int | None = None,
) -> Forecast:
    """Steps, cut, tail, bytes and seconds of a run, and its learning rate, as far as the arguments determine them.

    Whole numbers may be texts such as "512", "7e9", "350M" or "1,281,167". What is left out is None in the result.

    Args:
        batch_size: Samples per update over all ranks.
        micro_batch_size: The most samples of one forward on one rank.
        ranks: Ranks of the job; a multiple of `nodes`, and of `tp * cp * pp`. What remains are data-parallel ranks.
        nodes: Machines, with as many ranks on each.
        tp: Tensor-parallel ranks, which share each layer.
        cp: Context-parallel ranks, which share each sequence.
        pp: Stages of a pipeline, which share the layers.
        parameters: Trained parameters of the model.
        dtype_bytes: Bytes of one number of the gradient; 4 by default, or the model's own with `model`.
        link_gbit: The rate between two nodes in Gbit/s, each way and nominal; with one node between two ranks.
        node_gbit: The rate of one rank within a node in Gbit/s, each way and nominal.
        micro_step_seconds: Seconds of one forward and backward of a micro-batch on one rank, without communication.
        samples: Samples of an epoch, dealt out to the ranks one by one.
        model: A model, a batch and a `loss_fn` (micro-batch -> loss), on which parameters and seconds are measured.
        backend: `"nccl"` or `"gloo"`; by default NCCL where there is a CUDA device.
        latency_us: Microseconds of one hop of a collective; by default the backend's.
        efficiency: The part of the nominal rate that reductions reach, above 0 and at most 1; by default the backend's.
        gather_efficiency: The same of gathers; by default `efficiency`, else the backend's.
        cpu_seconds_per_gb: Seconds that sending a GB takes of the computing core, where a rank has only one.
        bucket_mb: Megabytes of gradients that are reduced at a time; 25 by default, as DDP's.
        base_batch_size: The batch size that `lr` and `betas` were chosen for.
        lr: The learning rate at `base_batch_size`.
        optimizer: `"sgd"` or `"adam"`; None gives the rules of both.
        betas: Adam's, at `base_batch_size`.
        reduction: The criterion's, as the Accumulator's. `"sum"` has scaled SGD's step with the batch already.
        tokens: Tokens of a sample; with `width` and `layers` for what ranks that share samples send each other.
        width: Numbers that a token has between two layers.
        layers: Layers of attention, each with its feed-forward.

    Returns:
        A `Forecast`; its `missing` says which arguments to give for what is None.

    Raises:
        TypeError: A count that is no whole number.
        ValueError: A number out of range, an unknown choice, or `ranks` that `nodes` or `tp * cp * pp` does not divide.

    Example:
        >>> forecast = plan(batch_size=1000, micro_batch_size=32, ranks=8)
        >>> forecast.steps, forecast.windows.samples, str(forecast.split)
        (4, 1024, '1,000 samples (8 ranks: 125 = 3 x 31 + 1 x 32)')
    """
    given = _checked(dict(locals()))
    sharing = Sharing.of(given)
    notes = list(sharing.notes())
    batch, micro, epoch, base, numbers = (given[name] for name in AMOUNTS)
    gradient_bytes = None if numbers is None else numbers * (dtype_bytes or 4)
    if model is not None:
        from .measure import measure_micro_step  # imports torch, which takes seconds

        found = measure_micro_step(*model, micro_batch_size=micro)
        notes.append(found.summary)
        micro = found.micro_batch_size  # as asked, or as much of it as fits
        micro_step_seconds = found.seconds if micro_step_seconds is None else micro_step_seconds
        if numbers is None:
            numbers = found.parameters
            gradient_bytes = found.gradient_bytes if dtype_bytes is None else numbers * dtype_bytes
    is_chosen, backend = backend is not None, backend or ("nccl" if _sees_cuda() else "gloo")
    transport = BACKENDS[backend].given(latency_us, efficiency, gather_efficiency, cpu_seconds_per_gb)
    given |= {"micro_batch_size": micro, "parameters": numbers, "micro_step_seconds": micro_step_seconds}
    given |= {"backend": backend, "link": dataclasses.asdict(transport)}
    steps = windows = split = windows_tail = split_tail = rate = None
    if batch is not None and micro is not None:
        num = sharing.data_ranks
        steps = steps_for(batch, micro, num)
        windows, split = windows_cut(steps, micro, num), split_cut(batch, micro, num)
        if epoch is not None:
            windows_tail = tail_of_windows(epoch, steps, micro, num)
            split_tail = tail_of_split(epoch, batch, micro, num)
    rows: list[dict[str, Any]] = []
    if numbers is not None and gradient_bytes is not None and sharing.reducing > 1:
        rates = rates_between(ranks, nodes, link_gbit, node_gbit)
        own_bytes = sharing.part(gradient_bytes)
        buckets = max(1, math.ceil(own_bytes / (bucket_mb * 1e6)))
        network = Network(sharing.reducing, nodes, backend, transport, rates, own_bytes, buckets)
        timed = micro_step_seconds if sharing.size == 1 else None
        for one in sharing.policies(numbers, nodes):
            own = network if one.bucket is None else dataclasses.replace(network, buckets=-(-numbers // one.bucket))
            rows.append(policy_row(one, own, steps, timed))
    shared = tuple(sharing.sent(given, steps))
    if rows or any(row["bytes_per_micro_step"] for row in shared):
        notes += [] if is_chosen else [CHOSEN[backend]]
    if batch is not None and base is not None:
        updates = windows_tail.updates if windows_tail is not None else None
        rate = scaled_learning_rate(batch, base, lr, optimizer, betas, reduction, updates)
    return Forecast(
        *(given, gradient_bytes, steps, windows, split, windows_tail, split_tail),
        *(tuple(rows), shared, rate, tuple(notes), _missing(given)),
    )


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the model, and their counts as numbers."""
    del given["model"]
    for name in ("ranks", "nodes", "dtype_bytes"):
        given[name] = None if given[name] is None else whole_number(name, given[name])
    ranks, nodes = given["ranks"], given["nodes"]
    if ranks % nodes:
        below, above = ranks - ranks % nodes, ranks - ranks % nodes + nodes
        cure = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"ranks={ranks} on nodes={nodes}, expected as many on each node; give {cure} ranks")
    for name in (*AMOUNTS, *ACTIVATIONS):
        given[name] = None if given[name] is None else amount(name, given[name])
    for name in POSITIVE:
        value = given[name]
        if value is not None and not (0 < value < math.inf or (name in MAY_BE_ZERO and value == 0)):
            raise ValueError(f"{name}={value}, expected a number above 0")
    for name in ("efficiency", "gather_efficiency"):
        value = given[name]
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}={value}, expected a part of the nominal rate, above 0 and at most 1")
    betas = given["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}, expected two numbers from 0 to below 1")
    for name, known in CHOICES.items():
        if given[name] is not None and given[name] not in known:
            raise ValueError(f"{name}={given[name]!r}, expected one of {', '.join(known)}")
    return given


def _sees_cuda() -> bool:
    """By torch if the caller has imported it, else by the driver's files: importing torch takes seconds."""
    torch = sys.modules.get("torch")
    return any(Path("/dev").glob("nvidia[0-9]*")) if torch is None else bool(torch.cuda.is_available())


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def amount(name: str, value: object) -> int:
    """A whole number of at least 1, from a number or a text.

    >>> amount("parameters", "11.7M"), amount("parameters", "7e9"), amount("samples", "1,281,167")
    (11700000, 7000000000, 1281167)
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str):
        return whole_number(name, value)
    whole = r"\d{1,3}(?:[,_]\d{3})+|\d+"  # no decimal comma
    found = re.fullmatch(rf"((?:{whole}|\d*\.\d+|\d+\.)(?:[eE][+]?\d{{1,2}})?)\s*([kKmMbBgGtT]?)", value.strip())
    try:
        exact = found and Decimal(re.sub("[,_]", "", found[1])) * SUFFIXES[found[2].upper()]
    except InvalidOperation:
        exact = None
    if exact is None or exact != int(exact):
        raise ValueError(f"{name}={value!r}, expected a whole number such as 512, 7e9, 7b, 350M or 11.7M")
    return whole_number(name, int(exact))


def _missing(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Which options to give, and what for."""
    ranks, nodes, node = given["ranks"], given["nodes"], given["node_gbit"]
    wanted: list[tuple[tuple[str, ...], str]] = [
        (("batch_size", "micro_batch_size"), "the steps and the cut"),
        (("samples",), "an epoch's tail"),
        (("parameters",), "the bytes per update"),
        (("base_batch_size",), "the learning rate"),
    ]
    shares = any(given[name] > 1 for name in ("tp", "cp", "pp"))
    if shares:
        wanted.append((SIZES, "the bytes between ranks that share samples"))
    elif ranks > 1:
        has_rate = given["link_gbit"] is not None or (nodes == 1 and node is not None)
        both = ("link_gbit", "micro_step_seconds")
        wanted.append((both[1:] if has_rate else both, "the seconds per update"))
    found = []
    for names, purpose in wanted:
        if lacking := [f"--{name.replace('_', '-')}" for name in names if given[name] is None]:
            found.append(f"{' and '.join(lacking)} for {purpose}")
    if given["parameters"] is not None and ranks == 1:
        found.append("--ranks above 1 for what is sent between them")
    if 1 < nodes < ranks and node is None and not shares:
        found.append("--node-gbit for the seconds of the hybrid policies, and for a node's own link in a ring of all")
    return tuple(found)
