"""Agreement: what must be equal on all ranks is compared, so that a difference is an error and no silent drift.

Ranks exchange one row of checksums, once. Only if these differ do they exchange what the checksums are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import private
from .job import Job
from .law import DistaccumError, LostRanksError
from .norms import local, names_of
from .ranks import Rows
from .text import in_short, shorten

ROUNDING = 1e-3  # of a norm: copies may be off by the order in which ranks added sparse rows
Values = dict[str, Any]  # by what an error calls them
Subjects = list[tuple[object, Values]]  # ranks that have the same key, in the first place, must have the same values
COMPARABLE = (type(None), bool, int, float, str, tuple)
PLAIN = (Tensor, nn.Parameter)  # not a subclass, which may have no numbers to add up


class Numbers(NamedTuple):
    """The sum of a tensor's elements, and their norm."""

    sum: float
    norm: float

    def __str__(self) -> str:
        return f"sum {self.sum:.6g}, norm {self.norm:.6g}"


def compare(job: Job) -> None:
    """Raises on all ranks if options, parameters or copies of weights differ between them; call it on all ranks.

    Costs one small collective on the host, and one read of the device.
    """
    peers = job.engine.peers
    if not peers.is_alone:
        subjects = [*_settings(job), *_weights(job)]
        checksums = [float(crc32(repr(part).encode())) for subject in subjects for part in subject]
        rows = _gather_first(job, checksums) if job.compared is None else peers.gather(checksums, everyone=True)
        for i in range(0, len(checksums), 2):
            pairs = {(row[i], row[i + 1]) for row in rows}
            if len(pairs) > len({key for key, _ in pairs}):  # of one key, several values
                gathered = peers.gather_objects((peers.global_rank, *subjects[i // 2]), everyone=True)
                for own in dict.fromkeys(repr(key) for _, key, _ in gathered):
                    _refuse_differences({rank: values for rank, key, values in gathered if repr(key) == own})
    job.compared = job.trainable()


@contextmanager
def heard_by_all() -> Iterator[None]:
    """Leaves a note if the block, which makes an Accumulator, fails: ranks that wait for this one can tell why."""
    is_job = dist.is_available() and dist.is_initialized()
    try:
        yield
    except Exception as error:
        if is_job:
            private.leave_note(private.FAILED, in_short(error))
        raise
    if is_job and private.read_note(private.FAILED, dist.get_rank()):
        private.leave_note(private.FAILED, "")


def _gather_first(job: Job, checksums: Sequence[float]) -> Rows:
    """Gathers the rows of all ranks, or says which ranks do not come to their first window."""
    peers = job.engine.peers
    place = private.sign_in("first window", peers.ranks)
    try:
        return peers.gather(checksums, everyone=True)
    except LostRanksError as error:
        if absent := private.absent_from(place, peers.ranks):
            raise LostRanksError(
                f"rank {peers.global_rank} lost contact with the other ranks: it waited in its first window for "
                f"{absent}, which did not come to it; make the Accumulator and its windows on all ranks, alike, and "
                "start all ranks again"
            ) from error
        raise


def _settings(job: Job) -> Subjects:
    """The options, which are those of all ranks, and what those of a data-parallel group train, and with what."""
    engine, config = job.engine, job.config
    options: Values = {
        **{name: _kind(getattr(config, name)) for name in ("steps", "batch_size", "sync", "on_nonfinite")},
        "micro_batch_size": type(config.micro_batch_size).__name__,  # ranks with less memory may cut smaller
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
    names, parameters = names_of(engine.models), job.parameters()
    for i, (parameter, groups) in enumerate(zip(parameters, engine.cut_over(parameters), strict=True)):
        shape = "" if groups and not hasattr(parameter, "to_local") else f" of shape {list(parameter.shape)}"
        # A loss's own parameter may be frozen on the ranks that do not use it.
        frozen = ", frozen" if id(parameter) in names and not parameter.requires_grad else ""
        shared[f"parameter {i}"] = f"{names.get(id(parameter), '')}{shape} in {parameter.dtype}{frozen}"
    return [((), options), (_ranks_of(job), shared)]


def _weights(job: Job) -> Subjects:
    """Sums and norms of what the ranks of a data-parallel group have whole, and of what those with equal parts have."""
    names, parameters = names_of(job.engine.models), job.parameters()
    cuts = job.engine.cut_over(parameters)
    places = list(dict.fromkeys(tuple(map(dist.get_rank, groups)) for groups in cuts))
    named = [(names.get(id(one), f"parameter {i}"), local(one.detach())) for i, one in enumerate(parameters)]
    numbers = _sums_and_norms([tensor for _, tensor in named])
    whole, parts = Values(), Values()
    for (name, _), groups, pair in zip(named, cuts, numbers, strict=True):
        (parts if groups else whole)[name] = pair
    return [(_ranks_of(job), whole), ((_ranks_of(job), places), parts)]


def _ranks_of(job: Job) -> tuple[int, ...]:
    group = job.engine.peers.group
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _kind(value: Any) -> Any:
    return value if isinstance(value, COMPARABLE) else type(value).__name__


def _sums_and_norms(tensors: Sequence[Tensor]) -> list[Numbers]:
    """Reads both of each tensor from the device at once; zeros where it has no plain numbers."""
    values = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    known = [tensor.itemsize > 1 and tensor.is_floating_point() and type(tensor) in PLAIN for tensor in values]
    read = [tensor for tensor, is_known in zip(values, known, strict=True) if is_known and not tensor.is_meta]
    if not read:
        return [Numbers(0.0, 0.0)] * len(values)
    device, wide = read[0].device, torch.float64
    sums = torch.stack([torch.sum(tensor, dtype=wide).to(device) for tensor in read])
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=wide).to(device) for tensor in read])
    pairs = iter(torch.stack([sums, norms], 1).tolist())
    return [Numbers(*next(pairs)) if is_known else Numbers(0.0, 0.0) for is_known in known]


def _refuse_differences(by_rank: Mapping[int, Values]) -> None:
    """Raises if values differ between these ranks, and says which."""
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
