"""Losses over pairs: representations without a graph, one loss over all of them, then a backward per micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cutting import Batch, Columns, fresh
from ..feed import cut_up
from ..job import Job, Manner
from ..law import DistaccumError, in_short, ranks_where
from ..losses import refuse_loss
from ..norms import HALF
from ..planner import Planner
from ..ranks import Peers, in_contact
from ..update import Update
from ..window import Window
from .memory import is_out_of_memory
from ..state.randomness import random_devices, random_state, set_random_state, set_seed
from .sizes import PROOFS
from .snapshot import Snapshot
from .update import Agreement, refuse_closure, retry

Encode = Callable[[Batch], Tensor | Sequence[Tensor]]
PairsLoss = Callable[..., Tensor]
# How far a second encoding may be from the first, relative to the largest element.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the windows' seeds


def contrast(planner: Planner, batch: Any, encode: Encode, loss_fn: PairsLoss, columns: Columns) -> Update:
    """Runs one update of a loss over all pairs of a batch."""
    job = planner.job
    refuse_closure(job.engine, "contrast")
    taking_part = [one for one in job.extensions if one.in_contrast]
    run = Contrast(job, encode, loss_fn).run
    update = retry(planner, taking_part, cut_up(batch, job, columns, in_order=True), Manner(is_sum=True), run)
    job.num_contrasts += 1
    return update


@final
@dataclass
class Contrast:
    """A loss over all representations of a window, backpropagated one micro-batch at a time.

    Equivalent to `loss_fn(*encode(whole_batch)).backward()`, where the whole batch has all ranks' samples. By the chain
    rule, the gradient is a sum over micro-batches: each runs the backward of its own representations from the loss's
    gradient with respect to them. That gradient needs no graph of `encode`.
    """

    job: Job
    encode: Encode
    loss_fn: PairsLoss

    def run(self, window: Window, agreement: Agreement) -> None:
        engine, scaler, models = self.job.engine, self.job.scaler, self.job.models
        window.begin()
        if window.plan.is_empty:
            list(window)  # completes it
            return
        before = Snapshot(models)
        encoded = self._encode_all(window)
        agreement.agree()  # a rank that fails does so before this, while the others wait in it
        before.restore_buffers()  # encoding each micro-batch again updates them
        device = window.parameters[0].device
        everyone, start, seed = gather(engine.peers, encoded, device)
        after = random_state(random_devices(models))
        one = torch.ones((), device=device)
        scale = one if scaler is None else scaler.scale(one)
        set_seed((seed + _GOLDEN * (window.index + 1)) % 2**63)  # so that the loss draws the same on all ranks
        try:
            loss, gradients, of_parameters = self._differentiate(everyone, scale, window)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shapes = ", ".join(str(list(one.shape)) for one in everyone)
            raise DistaccumError(
                f"loss_fn does not fit into memory on all representations ({shapes}; {in_short(error)}); take a "
                "smaller batch, or a loss that goes over its pairs in blocks"
            ) from None  # with a cause, retry() would try smaller micro-batches
        window.losses.of_pairs = loss, engine.divisor / engine.peers.num_ranks
        window.losses.largest = [
            (micro.number, one.detach().abs().max())
            for micro, part in zip(window.micros, encoded, strict=True)
            for one in part
            if _has_gradient(one) and one.numel()
        ]
        total = window.plan.num_micro_batches
        carried = [(p, g / total) for p, g in of_parameters if not hasattr(p, "to_local")]
        # Checking that encode returns the same again costs a read on the host, so only the first windows do it.
        verifies, differences = self.job.num_contrasts < PROOFS, list[Tensor]()
        set_random_state(before.random)
        for micro_batch in window:
            representations = _tensors_of(self.encode(micro_batch))
            if window.stand_in:
                zeros = [torch.zeros_like(_in_float32(one)) for one in representations]
                window.backward(_carried(representations, zeros, ()))
            else:
                first = encoded[window.micro_step]
                if verifies:
                    differences += _differences(first, representations)
                end = start + len(first[0])
                rows = [None if g is None else g[start:end] for g in gradients]
                window.backward(_carried(representations, rows, carried))
                start = end
            del representations
        for parameter, gradient in of_parameters:
            if hasattr(parameter, "to_local"):  # sharded, and used only in the loss
                whole = gradient * scale.to(gradient.dtype)
                parameter.grad = whole if parameter.grad is None else parameter.grad.add_(whole)
        set_random_state(after)
        if verifies:
            _verify(engine.peers, loss, differences)

    def _encode_all(self, window: Window) -> list[list[Tensor]]:
        """This rank's representations, by micro-batch."""
        stand_ins = [window.substitute] * (window.num_micro_steps - len(window))
        with torch.no_grad():
            batches = (fresh(one.batch) for one in (*window.micros, *stand_ins) if one is not None)
            encoded = [_tensors_of(self.encode(batch)) for batch in batches]
        del encoded[len(window) :]
        torch.clear_autocast_cache()  # torch 2.9 would reuse weights that it cast without a graph
        self.job.engine.show_parameters()
        _refuse_uneven(encoded, [length for one in window.micros for length in one.counts])
        return encoded

    def _differentiate(
        self, representations: Sequence[Tensor], scale: Tensor, window: Window
    ) -> tuple[Tensor, list[Tensor | None], list[tuple[nn.Parameter, Tensor]]]:
        """The loss, and its gradients by representation and by parameter; parameters without one are left out."""
        with torch.enable_grad():
            loss = self.loss_fn(*representations)
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0 and not loss.is_complex()):
            refuse_loss(loss, "loss_fn gave")
        value = loss.detach().clone()  # before a backward hook can change it in place
        parameters = [p for p in window.parameters if p.requires_grad]
        wanted = [one for one in representations if one.requires_grad]
        _refuse_others(loss, {id(one) for one in (*wanted, *parameters)})
        scaled = torch.autograd.grad(
            loss, [*wanted, *parameters], grad_outputs=scale.to(loss.device, loss.dtype), allow_unused=True
        )
        found = iter(None if g is None else _in_float32(g) / scale.to(g.device, _in_float32(g).dtype) for g in scaled)
        gradients = [next(found) if one.requires_grad else None for one in representations]
        of_parameters = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
        engine = self.job.engine
        hidden = {id(p) for p in engine.parameters()} if "parameters" in engine.owns else set()
        if any(id(p) in hidden for p, _ in of_parameters):
            raise DistaccumError(
                f"loss_fn uses a parameter that {engine.name} shards, of which a rank has a part; use it in "
                "encode(), or keep it outside the wrapper and give it to an optimizer"
            )
        return value, gradients, of_parameters


def _verify(peers: Peers, loss: Tensor, differences: Sequence[Tensor]) -> None:
    """Raises, on all ranks, if their losses differ, or the second encoding gave other values."""
    rows = peers.gather([max(map(float, differences), default=0.0), float(loss)])
    losses = [value for _, value in rows]
    if max(losses) - min(losses) > TOLERANCES[torch.float32] * max(map(abs, losses)):
        raise DistaccumError(
            f"loss_fn gave the ranks different losses ({', '.join(f'{value:.6g}' for value in losses)}), expected one "
            "for all, since each is given all representations; it may draw from torch, random and numpy, which are "
            "seeded alike, and depend on nothing else that differs between ranks"
        )
    if wrong := ranks_where([value > 1 for value, _ in rows]):
        raise DistaccumError(
            f"encode() gave other representations the second time on rank {wrong}, so the gradient would not be the "
            "loss's; it may depend on the micro-batch, the model, and the random numbers of torch, random and numpy, "
            "and on nothing that changes between two calls"
        )


def _carried(
    representations: Sequence[Tensor], rows: Sequence[Tensor | None], of_parameters: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """A scalar whose backward is a micro-batch's part of the loss's backward; its value means nothing."""
    pairs = [(one, g) for one, g in zip(representations, rows, strict=True) if g is not None and one.requires_grad]
    if not pairs:
        raise DistaccumError(
            "encode() gave no representation with a graph that the loss depends on; compute them with the model, "
            "without detach() and outside torch.no_grad()"
        )
    parts = [(tensor * g.conj()).sum().real for tensor, g in (*pairs, *of_parameters)]
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def gather(peers: Peers, encoded: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[list[Tensor], int, int]:
    """All ranks' representations, ready for a loss; the row where this rank's begin; a common seed."""
    joined = [torch.cat(parts) for parts in zip(*encoded, strict=True)]
    kinds = [(one.dtype, tuple(one.shape[1:])) for one in joined]
    everyone = peers.gather_objects((kinds, len(joined[0]) if joined else 0, torch.initial_seed()))
    lengths, given = [length for _, length, _ in everyone], [kinds for kinds, length, _ in everyone if length]
    if any(kinds != given[0] for kinds in given):
        raise DistaccumError(
            f"encode() gave the ranks {given} representations, expected as many, with rows of one dtype and shape"
        )
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in given[0]]
    rows = torch.zeros(max(lengths), sum(sizes), dtype=torch.uint8, device=device)  # bytes, for one collective
    for columns, one in zip(torch.split(rows, sizes, 1), joined, strict=False):
        columns[: len(one)] = one.reshape(len(one), math.prod(one.shape[1:])).view(torch.uint8)
    if peers.group is not None:
        of_ranks = rows.new_empty(peers.num_ranks * len(rows), rows.shape[1])
        # With offloaded parameters the rows are on the host, and the device's group cannot send them.
        group = peers.host_group if device.type == "cpu" else peers.group
        with in_contact():
            dist.all_gather_into_tensor(of_ranks, rows, group=group)
        rows = torch.cat([one[:length] for one, length in zip(torch.split(of_ranks, len(rows)), lengths, strict=True)])
    copies = [columns.clone(memory_format=torch.contiguous_format).flatten() for columns in torch.split(rows, sizes, 1)]
    whole = [one.view(dtype).view(len(rows), *shape) for one, (dtype, shape) in zip(copies, given[0], strict=True)]
    return [one.requires_grad_(_has_gradient(one)) for one in whole], sum(lengths[: peers.rank]), everyone[0][-1]


def _refuse_uneven(encoded: Sequence[Sequence[Tensor]], lengths: Sequence[float]) -> None:
    if len({len(part) for part in encoded}) > 1:
        raise ValueError(f"encode() gave {[len(part) for part in encoded]} representations, expected as many each time")
    for part, length in zip(encoded, lengths, strict=True):
        for one in part:
            if len(one) != length:
                raise ValueError(
                    f"encode() gave {len(one)} rows for a micro-batch of {length:g} samples, expected a row for each; "
                    "give several views of a sample as a representation each"
                )


def _refuse_others(loss: Tensor, known: set[int]) -> None:
    """Raises if the loss depends on tensors that would silently get no gradient."""
    for variable in _leaves_of(loss):
        if id(variable) not in known:
            raise DistaccumError(
                f"loss_fn depends on a tensor of shape {list(variable.shape)} that requires a gradient and is no "
                "parameter of the model or the optimizer as they hold it; give it to the optimizer, use what FSDP "
                "wraps in encode() alone (of a sharded parameter, .full_tensor() may be used), or detach() it"
            )


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors to whose gradients a backward from the loss adds."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                yield variable
            waiting += [following for following, _ in node.next_functions]


def _tensors_of(value: Any) -> list[Tensor]:
    listed = list(value) if isinstance(value, list | tuple) else [value]
    for one in listed:
        if not isinstance(one, Tensor):
            raise TypeError(f"encode() gave a {type(one).__name__}, expected a tensor or a tuple of tensors")
        if one.ndim == 0:
            raise ValueError(
                "encode() gave a tensor without dimensions, expected representations, a row for each sample; what is "
                "no representation (a temperature) is used in loss_fn"
            )
    return listed


def _differences(before: Sequence[Tensor], now: Sequence[Tensor]) -> Iterator[Tensor]:
    """The differences, in units of the tolerance."""
    for one, other in zip(before, now, strict=True):
        if _has_gradient(one) and one.numel():
            largest = one.abs().max().nan_to_num(1.0, 1.0).clamp(min=torch.finfo(one.dtype).tiny)
            yield (other.detach() - one).abs().max() / largest / TOLERANCES.get(one.dtype.to_real(), 5e-2)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
