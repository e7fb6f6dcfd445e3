"""Losses over pairs: representations without a graph, one loss over all of them, then each micro-batch's part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn

from ..cutting import Columns
from ..drawing import Manner, cut_up
from ..extension import Extension, hooks_of
from ..law import DistaccumError, in_short, ranks_where
from ..losses import Loss, refuse_loss
from ..norms import HALF, leaves
from ..planner import Planner
from ..randomness import random_devices, random_state, set_random_state, set_seed
from ..ranks import Peers
from ..sizes import PROOFS
from ..update import Update
from ..window import Window
from .memory import is_out_of_memory
from .snapshot import Snapshot
from .update import Agreement, retry

Encode = Callable[[Any], Tensor | Sequence[Tensor]]
PairsLoss = Callable[..., Tensor]
# How far representations may be from those of the first time, in parts of the largest.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}


def contrast(
    planner: Planner,
    extensions: Sequence[Extension],
    batch: Any,
    encode: Encode,
    loss_fn: PairsLoss,
    columns: Columns,
) -> Update:
    """One update of a loss over all pairs of a batch."""
    planner.job.engine.refuse_closure("contrast")
    verifies = planner.job.num_contrasts < PROOFS

    def begin(agreement: Agreement) -> tuple[Callable[[Window], None], Manner]:
        one = Contrast(planner, agreement, encode, loss_fn, verifies=verifies)
        hear = [agreement, *(other for other in extensions if other.in_contrast), one]
        return one.run, Manner(hooks_of(hear), is_sum=True)

    update = retry(planner, cut_up(batch, planner.job, columns, in_order=True), begin)
    planner.job.num_contrasts += 1
    return update


@final
class Contrast(Extension):
    """A loss over all representations of a window, carried back a micro-batch at a time.

    Equivalent to `loss_fn(*encode(whole_batch)).backward()`, with all ranks' samples in the whole batch: by the chain
    rule the gradient is the sum, over micro-batches, of their representations' own backward from the loss's gradient
    at these representations. That gradient needs no graph of `encode`.
    """

    def __init__(
        self, planner: Planner, agreement: Agreement, encode: Encode, loss_fn: PairsLoss, *, verifies: bool
    ) -> None:
        """`verifies`: that encode gives the same again, which costs a read on the host."""
        self._engine, self._scaler = planner.job.engine, planner.job.scaler
        self._agreement, self._encode, self._loss_fn = agreement, encode, loss_fn
        self._verifies = verifies
        self._differences: list[Tensor] = []
        self._parts: list[_Part] = []  # to come, a micro-batch each
        self._sharded: list[tuple[nn.Parameter, Tensor]] = []  # used in the loss alone, with their gradients
        self._random: dict[str, Any] = {}  # as it is after the loss
        self._loss = torch.zeros((), device="cpu")

    def run(self, window: Window) -> None:
        for micro_batch in window:
            representations = _tensors_of(self._encode(micro_batch))
            if window.stand_in:
                window.backward(_of_no_weight(representations))
            else:
                window.backward(self._carried(self._parts.pop(0), representations))
            del representations
        for parameter, gradient in self._sharded:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self._random:
            set_random_state(self._random)
        if self._verifies:
            self._verify(window)

    def begin(self, window: Window) -> None:
        """Takes the loss, on all ranks, before the first micro-batch that has a graph."""
        at = window
        if at.plan.is_empty:
            return
        device = at.parameters[0].device
        before = Snapshot(self._engine.models)
        encoded = self._encode_all(at)
        before.restore_buffers()  # they move when each micro-batch is encoded again
        everyone, mine = gather(self._engine.peers, encoded, at.index, device)
        gradients, of_parameters, scale = self._loss_over(everyone, at, device)
        total = sum(at.plan.num_counted)
        carried = [(p, g / total) for p, g in of_parameters if not hasattr(p, "to_local")]
        self._sharded = [(p, g * scale.to(g.dtype)) for p, g in of_parameters if hasattr(p, "to_local")]
        of_all: list[tuple[int, Loss]] = []
        for i, part in enumerate(encoded):
            rows = [None if g is None else g[start[i] : start[i + 1]] for g, start in zip(gradients, mine, strict=True)]
            self._parts.append(_Part(rows, carried, part if self._verifies else None))
            largest = [one.detach().abs().max() for one in part if _has_gradient(one) and one.numel()]
            of_all += [(at.micros[i].number, one) for one in largest]
        at.losses.largest = of_all
        set_random_state(before.random)

    def _encode_all(self, at: Window) -> list[list[Tensor]]:
        """This rank's representations, by micro-batch; all ranks know then that none has failed."""
        with torch.no_grad():
            encoded = [_tensors_of(self._encode(micro_batch)) for micro_batch in at.to_come()][: len(at)]
        torch.clear_autocast_cache()  # torch 2.9 would use the weights again that it cast without a graph
        self._engine.show_parameters()
        _refuse_uneven(encoded, [length for one in at.micros for length in one.counts])
        self._agreement.agree()  # what fails on one rank fails before this; the others wait in it
        return encoded

    def _loss_over(
        self, everyone: Everyone, at: Window, device: torch.device
    ) -> tuple[list[Tensor | None], list[tuple[nn.Parameter, Tensor]], Tensor]:
        """Its gradient by representation and by parameter, and the scaler's scale; the same on all ranks."""
        peers, devices = self._engine.peers, random_devices(self._engine.models)
        self._random = random_state(devices)
        scale = torch.ones((), device=device)
        if self._scaler is not None:
            scale = self._scaler.scale(scale)
        if peers.num_ranks > 1:
            set_seed(everyone.seed)
        out_of_memory = None
        try:
            with torch.enable_grad():
                loss = self._loss_fn(*everyone.tensors)
            gradients, of_parameters = self._differentiate(loss, everyone.tensors, scale, at)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            out_of_memory = in_short(error)
        if out_of_memory is not None:  # not with its cause: smaller micro-batches would not help
            shapes = ", ".join(str(list(one.shape)) for one in everyone.tensors)
            raise DistaccumError(
                f"loss_fn does not fit into memory on all representations ({shapes}; {out_of_memory}); take a smaller "
                "batch, or a loss that goes over its pairs in blocks"
            )
        if peers.num_ranks == 1:
            self._random = random_state(devices)  # what the loss drew is drawn
        return gradients, of_parameters, scale

    def _differentiate(
        self, loss: Tensor, representations: Sequence[Tensor], scale: Tensor, at: Window
    ) -> tuple[list[Tensor | None], list[tuple[nn.Parameter, Tensor]]]:
        """By representation and by parameter; what has none is left out. The window's record gets the loss."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0 and not loss.is_complex()):
            refuse_loss(loss, "loss_fn gave")
        self._loss = loss.detach().clone()  # before a hook of backward's can change it in place
        at.losses.of_pairs = self._loss, self._engine.divisor / self._engine.peers.num_ranks
        parameters = [p for p in at.parameters if p.requires_grad]
        wanted = [one for one in representations if one.requires_grad]
        _refuse_others(loss, {id(one) for one in (*wanted, *parameters)})
        scaled = torch.autograd.grad(
            loss, [*wanted, *parameters], grad_outputs=scale.to(loss.device, loss.dtype), allow_unused=True
        )
        hidden = {id(p) for p in self._engine.parameters()} if self._engine.hides_parameters else set()
        if any(g is not None and id(p) in hidden for p, g in zip(parameters, scaled[len(wanted) :], strict=True)):
            raise DistaccumError(
                f"loss_fn uses a parameter that {self._engine.name} shards, of which a rank has a part; use it in "
                "encode(), or keep it outside the wrapper and give it to an optimizer"
            )
        found = [None if g is None else _in_float32(g) / scale.to(g.device, _in_float32(g).dtype) for g in scaled]
        by_tensor = dict(zip(map(id, wanted), found, strict=False))
        of_parameters = zip(parameters, found[len(wanted) :], strict=True)
        return [by_tensor.get(id(one)) for one in representations], [(p, g) for p, g in of_parameters if g is not None]

    def _carried(self, part: _Part, representations: list[Tensor]) -> Tensor:
        """A scalar whose backward is this micro-batch's part of the loss's."""
        if part.before is not None:
            self._differences += _differences(part.before, representations)
        pairs = [
            (one, g) for one, g in zip(representations, part.rows, strict=True) if g is not None and one.requires_grad
        ]
        if not pairs:
            raise DistaccumError(
                "encode() gave no representation with a graph that the loss depends on; compute them with the model, "
                "without detach() and outside torch.no_grad()"
            )
        tensors, gradients = zip(*pairs, *part.of_parameters, strict=True)
        carried: Tensor = _Carry.apply(gradients, *tensors)
        return carried

    def _verify(self, window: Window) -> None:
        off = max((float(one) for one in self._differences), default=0.0)
        rows = self._engine.peers.gather([off, float(self._loss)])
        losses = [loss for _, loss in rows]
        if max(losses) - min(losses) > TOLERANCES[torch.float32] * max(map(abs, losses)):
            window.discard()
            raise DistaccumError(
                f"loss_fn gave the ranks different losses ({', '.join(f'{loss:.6g}' for loss in losses)}), expected "
                "one for all, since each is given all representations; it may draw from torch, random and numpy, "
                "which are seeded alike, and depend on nothing else that differs between ranks"
            )
        if wrong := ranks_where([value > 1 for value, _ in rows]):
            window.discard()
            raise DistaccumError(
                f"encode() gave other representations the second time on rank {wrong}, so the gradient "
                "would not be the loss's; it may depend on the micro-batch, the model, and the random numbers of "
                "torch, random and numpy, and on nothing that changes between two calls"
            )


@dataclass(frozen=True)
class _Part:
    """What goes back through one micro-batch."""

    rows: list[Tensor | None]  # the gradient of each representation
    of_parameters: list[tuple[nn.Parameter, Tensor]]  # used in the loss, and their gradients' part
    before: list[Tensor] | None  # the representations of the first time


class _Carry(torch.autograd.Function):
    """A zero whose backward gives each tensor its gradient, weighted."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.dtypes = gradients, [tensor.dtype for tensor in tensors]
        return gradients[0].new_zeros((), dtype=gradients[0].dtype.to_real())

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> tuple[Tensor | None, ...]:
        given = [
            (g * seeds[0].to(g.device, g.dtype)).to(dtype) for g, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        return None, *given


@dataclass(frozen=True)
class Everyone:
    """Representations of all ranks, in their order, and a seed that they have in common."""

    tensors: list[Tensor]
    seed: int


def gather(
    peers: Peers, encoded: Sequence[Sequence[Tensor]], index: int, device: torch.device
) -> tuple[Everyone, list[list[int]]]:
    """All ranks' representations, ready for a loss; and where this rank's micro-batches begin in each."""
    number = len(encoded[0]) if encoded else 0
    starts = [[0, *accumulate(len(part[j]) for part in encoded)] for j in range(number)]
    joined = [torch.cat([part[j] for part in encoded]) for j in range(number)]
    seed = 0
    if peers.num_ranks > 1:
        everyone = peers.gather_objects(([(one.dtype, tuple(one.shape)) for one in joined], torch.initial_seed()))
        kinds = [kinds for kinds, _ in everyone]
        _refuse_unlike(kinds)
        seed = (everyone[0][1] + _GOLDEN * (index + 1)) % 2**63
        packed = peers.gather_bytes(_pack(joined, device), [_size(kind) for kind in kinds])
        by_rank = [_unpack(one, kind) for one, kind in zip(packed, kinds, strict=True) if kind]
        before = [sum(kind[j][1][0] for kind in kinds[: peers.rank] if kind) for j in range(number)]
        starts = [[first + place for place in places] for first, places in zip(before, starts, strict=True)]
        joined = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    return Everyone([one.requires_grad_(_has_gradient(one)) for one in joined], seed), starts


Kind = tuple[torch.dtype, tuple[int, ...]]
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the windows' seeds
_ALIGNED = 16  # bytes: a multiple of every dtype's


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """All of them as bytes, so that they go round in one collective."""
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    for one in tensors:
        pieces.append(one.detach().contiguous().reshape(-1).view(torch.uint8))
        pieces.append(pieces[0].new_empty(-pieces[-1].numel() % _ALIGNED))
    return torch.cat(pieces)


def _unpack(packed: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    found, start = [], 0
    for dtype, shape in kinds:
        found.append(packed[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        start += _size([(dtype, shape)])
    return found


def _size(kinds: Sequence[Kind]) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for dtype, shape in kinds)


def _refuse_uneven(encoded: Sequence[Sequence[Tensor]], lengths: Sequence[float]) -> None:
    """Of this rank's micro-batches."""
    if len({len(part) for part in encoded}) > 1:
        raise ValueError(f"encode() gave {[len(part) for part in encoded]} representations, expected as many each time")
    for part, length in zip(encoded, lengths, strict=True):
        for one in part:
            if len(one) != length:
                raise ValueError(
                    f"encode() gave {len(one)} rows for a micro-batch of {length:g} samples, expected a row for each; "
                    "give several views of a sample as a representation each"
                )


def _refuse_unlike(kinds: Sequence[Sequence[Kind]]) -> None:
    seen = {rank: [(dtype, shape[1:]) for dtype, shape in kind] for rank, kind in enumerate(kinds) if kind}
    first, *others = seen.values()
    if any(other != first for other in others):
        kinds_by_rank = "; ".join(
            f"rank {rank}: {', '.join(f'{d} {list(s)}' for d, s in kind)}" for rank, kind in seen.items()
        )
        raise DistaccumError(
            f"encode() gives ranks different representations (dtype and shape of a sample: {kinds_by_rank}), expected "
            "the same everywhere but for the number of samples"
        )


def _refuse_others(loss: Tensor, known: set[int]) -> None:
    """Refuses tensors that the loss depends on and that would silently get no gradient."""
    for of, variable in leaves([loss]).items():
        if of not in known:
            raise DistaccumError(
                f"loss_fn depends on a tensor of shape {list(variable.shape)} that requires a gradient and is no "
                "parameter of the model or the optimizer as they hold it; give it to the optimizer, use what FSDP "
                "wraps in encode() alone (of a sharded parameter, .full_tensor() may be used), or detach() it"
            )


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


def _of_no_weight(representations: Sequence[Tensor]) -> Tensor:
    tensors = [one for one in representations if one.requires_grad]
    nothing: Tensor = _Carry.apply([torch.zeros_like(_in_float32(one)) for one in tensors], *tensors)
    return nothing


def _differences(before: Sequence[Tensor], now: Sequence[Tensor]) -> Iterator[Tensor]:
    """In parts of what is tolerated."""
    for one, other in zip(before, now, strict=True):
        if _has_gradient(one) and one.numel():
            largest = one.abs().max().nan_to_num(1.0, 1.0).clamp(min=torch.finfo(one.dtype).tiny)
            yield (other.detach() - one).abs().max() / largest / TOLERANCES.get(one.dtype.to_real(), 5e-2)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
