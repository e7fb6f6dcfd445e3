"""Agreement: what must be equal on all ranks is compared, so that a difference is an error and no silent drift.

Ranks exchange one row of checksums, once. Only if these differ do they exchange what the checksums are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .job import Job
from .law import DistaccumError, LostRanksError
from .norms import local, names_of
from .private import NO_STORE, store
from .text import in_short, shorten

# Of a norm: copies may be off by the order in which ranks added sparse rows.
ROUNDING = 1e-3
# Values by what an error calls them. Ranks that have the same key, in the first place, must have the same values.
Values = dict[str, Any]
Subjects = list[tuple[object, Values]]
COMPARABLE = (type(None), bool, int, float, str, tuple)
# Not a subclass, which may have no numbers to add up.
PLAIN = (Tensor, nn.Parameter)


class Numbers(NamedTuple):
    """The sum of a tensor's elements, and their norm."""

    sum: float
    norm: float

    def __str__(self) -> str:
        return f"sum {self.sum:.6g}, norm {self.norm:.6g}"


def compare(job: Job) -> None:
    """Raises on all ranks if options, parameters or copies of weights differ between them; call it on all ranks.

    Costs one small collective, and one read of the device.
    """
    peers = job.engine.peers
    if not peers.is_alone:
        subjects = _subjects(job)
        checksums = [float(crc32(repr(part).encode())) for subject in subjects for part in subject]
        with _all_coming(peers.ranks) if job.compared is None else nullcontext():
            rows = peers.gather(checksums, everyone=True)
        for i in range(0, len(checksums), 2):
            pairs = {(row[i], row[i + 1]) for row in rows}
            # Several values of one key.
            if len(pairs) > len({key for key, _ in pairs}):
                gathered = peers.gather_objects((peers.global_rank, *subjects[i // 2]), everyone=True)
                for own in dict.fromkeys(repr(key) for _, key, _ in gathered):
                    _refuse_differences({rank: values for rank, key, values in gathered if repr(key) == own})
    job.compared = job.trainable()


@contextmanager
def heard_by_all() -> Iterator[None]:
    """Leaves a note in the job's store if the block, which makes an Accumulator, fails; `_all_coming` reads it."""
    why = ""
    try:
        yield
    except Exception as error:
        why = in_short(error)
        raise
    finally:
        with suppress(*NO_STORE):
            store().set(f"distaccum/failed/{dist.get_rank()}", why)


@contextmanager
def _all_coming(ranks: Sequence[int]) -> Iterator[None]:
    """A block to which all of `ranks` shall come; if it fails and some did not, the error names them."""
    place = f"distaccum/{crc32(repr(ranks).encode())}"
    rank = dist.get_rank()
    times = 0
    with suppress(*NO_STORE):
        times = store().add(f"{place}/{rank}", 1)
    try:
        yield
    except LostRanksError as error:
        absent = list[str]()
        why = ", which did not come to it"
        with suppress(*NO_STORE):
            absent = [str(other) for other in ranks if store().add(f"{place}/{other}", 0) < times]
            notes = [f"distaccum/failed/{other}" for other in absent]
            texts = [store().get(note).decode() for note in notes if store().check([note])]
            why = next((f" ({text})" for text in texts if text), why)
        if not absent:
            raise
        raise LostRanksError(
            f"rank {rank} lost contact with the other ranks: it waited in its first window for rank "
            f"{', '.join(absent)}{why}; make the Accumulator and its windows on all ranks, alike, and start all ranks "
            "again"
        ) from error


def _subjects(job: Job) -> Subjects:
    """The options, which are those of all ranks, and what a data-parallel group trains: how, from which weights."""
    engine, config = job.engine, job.config
    options: Values = {
        **{name: _kind(getattr(config, name)) for name in ("steps", "batch_size", "sync", "on_nonfinite")},
        # Ranks with less memory may cut smaller.
        "micro_batch_size": type(config.micro_batch_size).__name__,
        "max_norm": None if config.max_norm is None else float(config.max_norm),
        "reduction": dict(config.reductions),
        "count": {name: _kind(count) for name, count in config.counts.items()},
        "scaler": _kind(job.scaler),
        "extensions": list(map(_kind, job.extensions)),
    }
    shared: Values = {
        "the wrapper": engine.name,
        "optimizer": list(map(_kind, job.optimizers)),
        "scheduler": list(map(_kind, job.schedulers)),
    }
    for optimizer in job.optimizers:
        for i, group in enumerate(optimizer.param_groups):
            where = f"in group {i} of {_kind(optimizer)}"
            shared[f"the number of parameters {where}"] = len(group["params"])
            shared |= {f"{name} {where}": value for name, value in group.items() if isinstance(value, COMPARABLE)}
    names = names_of(engine.models)
    parameters = job.parameters()
    cuts = engine.gradient(parameters).cuts
    numbers = _sums_and_norms([local(parameter.detach()) for parameter in parameters])
    # The ranks of a group have the same of what is whole, and those at the same places the same parts of the rest.
    whole = Values()
    parts = Values()
    for i, (parameter, groups, pair) in enumerate(zip(parameters, cuts, numbers, strict=True)):
        name = names.get(id(parameter))
        shape = "" if groups and not hasattr(parameter, "to_local") else f" of shape {list(parameter.shape)}"
        # A loss's own parameter may be frozen on the ranks that do not use it.
        frozen = ", frozen" if name is not None and not parameter.requires_grad else ""
        shared[f"parameter {i}"] = f"{name or ''}{shape} in {parameter.dtype}{frozen}"
        (parts if groups else whole)[f"parameter {i}" if name is None else name] = pair
    ranks = tuple(engine.peers.here)
    places = list(dict.fromkeys(tuple(map(dist.get_rank, groups)) for groups in cuts))
    return [((), options), (ranks, shared), (ranks, whole), ((ranks, places), parts)]


def _kind(value: Any) -> Any:
    return value if isinstance(value, COMPARABLE) else type(value).__name__


def _sums_and_norms(tensors: Sequence[Tensor]) -> list[Numbers]:
    """Reads both of each tensor from the device at once; zeros where it has no plain numbers."""
    values = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    plain = [value.itemsize > 1 and value.is_floating_point() and type(value) in PLAIN for value in values]
    read = [i for i, value in enumerate(values) if plain[i] and not value.is_meta]
    numbers = [Numbers(0.0, 0.0)] * len(values)
    if read:
        both = [f(values[i], dtype=torch.float64) for f in (torch.sum, torch.linalg.vector_norm) for i in read]
        pairs = torch.stack([one.to(both[0].device) for one in both]).view(2, -1).T.tolist()
        for i, pair in zip(read, pairs, strict=True):
            numbers[i] = Numbers(*pair)
    return numbers


def _refuse_differences(by_rank: Mapping[int, Values]) -> None:
    names = dict.fromkeys(name for values in by_rank.values() for name in values)
    differ = [name for name in names if _differ([values.get(name) for values in by_rank.values()])]
    if not differ:
        return
    by_value: dict[str, list[str]] = {}
    for rank, values in by_rank.items():
        by_value.setdefault(str(values.get(differ[0])), []).append(str(rank))
    seen = "; ".join(f"rank {shorten(ranks)}: {value}" for value, ranks in by_value.items())
    if any(isinstance(values.get(differ[0]), Numbers) for values in by_rank.values()):
        raise DistaccumError(
            f"{shorten(differ)} differs between the data-parallel ranks ({seen}), so that its gradient "
            "would be averaged over different parameters; if it is one parameter, give it the same values on all "
            "ranks: wrap the model after they are set, or load the same checkpoint; if each rank has its own "
            "(experts), cut it over the ranks under fully_shard: distribute_tensor(whole, mesh, [Shard(0)])"
        )
    raise DistaccumError(
        f"ranks disagree on {differ[0]} ({seen}), expected the same everywhere; make the same model, optimizer and "
        "Accumulator on every rank"
    )


def _differ(values: Sequence[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, Numbers)]
    if len(numbers) < len(values):
        return len(set(map(repr, values))) > 1
    sums, norms = zip(*numbers, strict=True)
    return bool(max(sums) - min(sums) > ROUNDING * max(norms))
