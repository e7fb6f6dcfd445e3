"""Losses over pairs: representations without a graph, one loss over all of them, then a backward per micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..batch import Batch, Columns, fresh
from ..batches import cut_up
from ..job import Job
from ..law import DistaccumError
from ..losses import refuse_loss
from ..norms import HALF, nodes_of, widest
from ..planning import Planner
from ..ranks import Peers
from ..state.randomness import random_devices, random_state, set_random_state, set_seed
from ..text import in_short, ranks_where
from ..update import Update
from ..window import Window
from .memory import fit_of, is_out_of_memory
from .update import SUM_OF_SAMPLES, Agreement, Snapshot, refuse_closure, retry

Encode = Callable[[Batch], Tensor | Sequence[Tensor]]
PairsLoss = Callable[..., Tensor]
# How far a second encoding may be from the first, relative to the largest element.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
# Spreads the windows' seeds.
GOLDEN = 0x9E3779B97F4A7C15


def contrast(planner: Planner, batch: Any, encode: Encode, loss_fn: PairsLoss, columns: Columns) -> Update:
    """Runs one update of a loss over all representations, which is backpropagated one micro-batch at a time.

    Equivalent to `loss_fn(*encode(whole_batch)).backward()`, where the whole batch has all ranks' samples. By the chain
    rule, the gradient is a sum over micro-batches: each runs the backward of its own representations from the loss's
    gradient with respect to them. That gradient needs no graph of `encode`.
    """
    job = planner.job
    refuse_closure(job.engine, "contrast")
    extensions = [extension for extension in job.extensions if extension.in_contrast]
    draw = cut_up(batch, job, columns, in_order=True)
    run = partial(_run_contrast, job, encode, loss_fn)
    return retry(planner, extensions, draw, SUM_OF_SAMPLES, run)


@final
class _Part(torch.autograd.Function):
    """A micro-batch's part of the loss: a scalar of the given value whose backward gives tensors these gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        return None, None, *(gradient * seed.to(gradient.device) for gradient in ctx.gradients)


def _run_contrast(job: Job, encode: Encode, loss_fn: PairsLoss, window: Window, agreement: Agreement) -> None:
    peers = job.engine.peers
    window.begin()
    if window.is_empty:
        # Its loop completes it.
        list(window)
        return
    before = Snapshot(job.models)
    encoded = _encode_all(job, encode, window)
    # A rank that fails has done so by now, and the others wait for it here.
    agreement.agree()
    # Encoding each micro-batch again updates them again.
    before.restore_buffers()
    scale = torch.ones((), device=window.parameters[0].device)
    everyone, start, seed = gather(peers, encoded, scale.device)
    scale = scale if job.scaler is None else job.scaler.scale(scale)
    after = random_state(random_devices(job.models))
    # The loss draws the same on all ranks.
    set_seed((seed + GOLDEN * (window.index + 1)) % 2**63)
    loss, gradients, of_parameters = _differentiate(job, loss_fn, everyone, scale, window)
    number = window.plan.num_micro_batches
    carried = [(p, g / number) for p, g in of_parameters if not hasattr(p, "to_local")]
    # They add up to the loss in the record.
    values = _values(loss, everyone, encoded, number)
    # Checking that encode returns the same again costs a read on the host, so windows of a proven size do not.
    verifies = not fit_of(job).is_proven(*window.plan.measured)
    differences = list[Tensor]()
    set_random_state(before.random)
    for micro_batch in window:
        again = _listed(encode(micro_batch))
        if window.stand_in:
            window.backward(_part_of(loss, again, list(map(torch.zeros_like, again)), ()))
        else:
            first = encoded[window.micro_step]
            if verifies:
                differences += _differences(first, again)
            end = start + len(first[0])
            rows = [None if g is None else g[start:end] for g in gradients]
            window.backward(_part_of(values[window.micro_step], again, rows, carried))
            start = end
        del again
    for parameter, gradient in of_parameters:
        # It is sharded, and used only in the loss.
        if hasattr(parameter, "to_local"):
            whole = gradient * scale.to(gradient.dtype)
            parameter.grad = whole if parameter.grad is None else parameter.grad.add_(whole)
    set_random_state(after)
    if verifies:
        _verify(peers, loss, differences)


def _encode_all(job: Job, encode: Encode, window: Window) -> list[list[Tensor]]:
    """This rank's representations, by micro-batch, without a graph."""
    stand_ins: list[Any] = [window.substitute] * (window.num_micro_steps - len(window))
    with torch.no_grad():
        encoded = [_listed(encode(fresh(micro.batch))) for micro in (*window.micros, *stand_ins)][: len(window)]
    # Torch 2.9 would reuse weights that it cast without a graph.
    torch.clear_autocast_cache()
    job.engine.show_parameters()
    for part, micro in zip(encoded, window.micros, strict=True):
        (length,) = micro.counts
        for tensor in part:
            is_tensor = isinstance(tensor, Tensor)
            if not is_tensor or tensor.ndim == 0 or len(tensor) != length:
                seen = f"a tensor of shape {list(tensor.shape)}" if is_tensor else f"a {type(tensor).__name__}"
                raise ValueError(
                    f"encode() gave {seen} for a micro-batch of {length:g} samples, expected a tensor with a row for "
                    "each, or a tuple of them; give several views of a sample as a representation each, and use what "
                    "is no representation (a temperature) in loss_fn"
                )
    return encoded


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def gather(peers: Peers, encoded: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[list[Tensor], int, int]:
    """All ranks' representations, ready for a loss; the row where this rank's begin; a common seed."""
    own = dict.fromkeys(tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in part) for part in encoded)
    length = sum(len(first) for first, *_ in encoded)
    everyone = peers.gather_objects(([*own], length, torch.initial_seed()))
    lengths = [length for _, length, _ in everyone]
    kinds = list(dict.fromkeys(kind for of_rank, *_ in everyone for kind in of_rank))
    if len(kinds) > 1:
        raise DistaccumError(
            f"encode() gave the representations {kinds}, expected as many each time, with rows of one dtype and shape"
        )
    joined = [torch.cat(parts) for parts in zip(*encoded, strict=True)]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds[0]]
    # Bytes of any dtype go through one collective.
    rows = torch.zeros(max(lengths), sum(sizes), dtype=torch.uint8, device=device)
    for columns, tensor in zip(torch.split(rows, sizes, 1), joined, strict=False):
        columns[: len(tensor)] = tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
    if peers.groups:
        parts = zip(torch.split(peers.gather_rows(rows), max(lengths)), lengths, strict=True)
        rows = torch.cat([part[:length] for part, length in parts])
    copies = [columns.clone(memory_format=torch.contiguous_format).flatten() for columns in torch.split(rows, sizes, 1)]
    whole = [copy.view(dtype).view(len(rows), *shape) for copy, (dtype, shape) in zip(copies, kinds[0], strict=True)]
    for tensor in whole:
        tensor.requires_grad_(_has_gradient(tensor))
    return whole, sum(lengths[: peers.rank]), everyone[0][2]


def _differentiate(
    job: Job, loss_fn: PairsLoss, representations: Sequence[Tensor], scale: Tensor, window: Window
) -> tuple[Tensor, list[Tensor | None], list[tuple[nn.Parameter, Tensor]]]:
    """The loss, and its gradients by representation and by parameter; parameters without one are left out."""
    parameters = [p for p in window.parameters if p.requires_grad]
    wanted = [*(tensor for tensor in representations if tensor.requires_grad), *parameters]
    try:
        with torch.enable_grad():
            loss = loss_fn(*representations)
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0 and not loss.is_complex()):
            refuse_loss(loss, "loss_fn gave")
        # A backward hook may change the loss in place.
        value = loss.detach().clone()
        hidden = job.engine.parameters() if "parameters" in job.engine.owns else []
        known = {*map(id, wanted)} - {*map(id, hidden)}
        leaves = [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]
        if others := [leaf for leaf in leaves if id(leaf) not in known]:
            raise DistaccumError(
                f"loss_fn depends on a tensor of shape {list(others[0].shape)} that requires a gradient, expected "
                "whole parameters of the model or the optimizer; use what FSDP or ZeRO shards in encode() alone (or "
                "FSDP2's .full_tensor()), give others, outside of the wrapper, to the optimizer, or detach() them"
            )
        seed = scale.to(loss.device, loss.dtype)
        scaled = torch.autograd.grad(loss, wanted, grad_outputs=seed, allow_unused=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        shapes = ", ".join(str(list(tensor.shape)) for tensor in representations)
        # With a cause, retry() would try smaller micro-batches.
        raise DistaccumError(
            f"loss_fn does not fit into memory on all representations ({shapes}; {in_short(error)}); take a "
            "smaller batch, or a loss that goes over its pairs in blocks"
        ) from None
    unscaled = iter(None if g is None else _in_float32(g) / scale.to(g.device, _in_float32(g).dtype) for g in scaled)
    gradients = [next(unscaled) if tensor.requires_grad else None for tensor in representations]
    of_parameters = [(p, g) for p, g in zip(parameters, unscaled, strict=True) if g is not None]
    return value, gradients, of_parameters


def _values(loss: Tensor, everyone: Sequence[Tensor], encoded: Sequence[Sequence[Tensor]], number: int) -> list[Tensor]:
    """The value of each micro-batch's part; 0 where representations of others alone made the loss not finite."""
    value = widest(loss) / number
    is_blameless = ~(loss.isfinite() | _are_finite(everyone, loss.device))
    return [value.masked_fill(is_blameless & _are_finite(own, loss.device), 0.0) for own in encoded]


def _are_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tells on the device, without a wait."""
    return torch.stack([tensor.isfinite().all().to(device) for tensor in tensors]).all()


def _part_of(
    value: Tensor,
    representations: Sequence[Tensor],
    rows: Sequence[Tensor | None],
    of_parameters: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    pairs = [(t, g) for t, g in zip(representations, rows, strict=True) if g is not None and t.requires_grad]
    if not pairs:
        raise DistaccumError(
            "encode() gave no representation with a graph that the loss depends on; compute them with the model, "
            "without detach() and outside torch.no_grad()"
        )
    tensors, gradients = zip(*pairs, *of_parameters, strict=True)
    part: Tensor = _Part.apply(value, gradients, *tensors)
    return part


def _differences(first: Sequence[Tensor], again: Sequence[Tensor]) -> Iterator[Tensor]:
    """The differences, in units of the tolerance."""
    for before, now in zip(first, again, strict=True):
        if _has_gradient(before) and before.numel():
            largest = before.abs().max().nan_to_num(1.0, 1.0).clamp(min=torch.finfo(before.dtype).tiny)
            yield (now.detach() - before).abs().max() / largest / TOLERANCES.get(before.dtype.to_real(), 5e-2)


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


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
