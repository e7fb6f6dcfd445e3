"""contrast(): the gradient of one loss over all pairs of the global batch, in the memory of a micro-batch."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from tests.support.counting import Counting
from tests.support.engines import KINDS, wrapped
from tests.support.problems import join, make_net
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, freed_by_counts, full, gradient, weights

Pair = dict[str, Tensor]


class Towers(nn.Module):
    """Two encoders; a temperature and a bias that only the loss uses."""

    def __init__(self, dtype: torch.dtype = torch.float64, dropout: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))  # support/engines.py shards these layers
        self.images = nn.Sequential(self.body, dropout or nn.Identity(), nn.Linear(8, 4))
        self.texts = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor([0.7]))  # one-dimensional, since FSDP2 shards no scalar
        self.bias = nn.Parameter(torch.tensor([-0.3]))
        self.to(dtype)

    def forward(self, batch: Pair) -> tuple[Tensor, Tensor]:
        return normalize(self.images(batch["image"]), dim=1), normalize(self.texts(batch["text"]), dim=1)


def pairs(size: int, seed: int, dtype: torch.dtype = torch.float64) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    image, text = (torch.randn(size, num, generator=generator, dtype=torch.float64).to(dtype) for num in (6, 5))
    return {"image": image, "text": text}


def clip(model: Towers, images: Tensor, texts: Tensor) -> Tensor:
    logits, places = images @ texts.T * full(model.scale).exp(), torch.arange(len(images))
    return (cross_entropy(logits, places) + cross_entropy(logits.T, places)) / 2


def siglip(model: Towers, images: Tensor, texts: Tensor) -> Tensor:
    logits = images @ texts.T * full(model.scale).exp() + full(model.bias)
    return -logsigmoid(logits * (2 * torch.eye(len(logits)) - 1)).sum() / len(logits)


def encoded(model: nn.Module, batch: Pair) -> Tensor:
    """By a net that has no parameter which only the loss uses: some wrappers hide parameters outside of forward."""
    return normalize(model(batch.pop("text")), dim=1)


def alike(model: nn.Module, images: Tensor) -> Tensor:
    off_diagonal = 1 - torch.eye(len(images), dtype=images.dtype)
    return ((images @ images.T) * off_diagonal).square().mean()


LOSSES: dict[str, Callable[..., Tensor]] = {"CLIP": clip, "SigLIP": siglip, "alike": alike}


def big_batch(loss: str, batches: list[Pair], at: Tensor | None = None) -> tuple[float, Tensor]:
    model = make_net() if loss == "alike" else Towers()
    if at is not None:
        nn.utils.vector_to_parameters(at.double(), model.parameters())
    batch = {key: one.double() for key, one in join(batches).items()}
    value = LOSSES[loss](model, *([encoded(model, batch)] if loss == "alike" else model(batch)))
    value.backward()
    return value.item(), gradient(model)


class Masks(nn.Module):
    """Dropout that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand_like(x) < 0.7)
        return x * (self.drawn[-1] if self.given is None else self.given)


def test_dropout_masks_are_replayed_in_the_second_pass():
    masks, batch, noise = Masks(), pairs(10, seed=1), []
    model, exact = Towers(dropout=masks), Towers(dropout=Masks())

    def loss_fn(images: Tensor, texts: Tensor) -> Tensor:
        noise.append(torch.rand(()))
        return clip(model, images, texts) * noise[-1]

    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size=4)
    before = weights(model)
    accumulator.contrast(batch, model, loss_fn)
    first, again = masks.drawn[:3], masks.drawn[3:]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    after = torch.rand(())
    exact.images[1].given = torch.cat(first)
    (clip(exact, *exact(batch)) * noise[0]).backward()
    assert error(before - weights(model), gradient(exact)) <= 1e-12
    accumulator.contrast(batch, model, loss_fn)
    assert not torch.equal(masks.drawn[6], first[0]) and noise[1] != noise[0] and after not in noise


def test_graphs_of_micro_batches_live_one_at_a_time():
    model, batch, alive = Towers(), pairs(12, seed=1), []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            assert all(one() is None for one in alive)
            alive.append(weakref.ref(hidden))
            return hidden

    model.body[1] = Watched()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size=3)
    with freed_by_counts():
        accumulator.contrast(batch, model, lambda *both: clip(model, *both))
    assert len(alive) == 8


def test_contrast_under_autocast_is_as_exact_as_one_batch():
    """Autocast caches cast weights; the second pass must not use those of the pass without a graph."""
    batch, ends = pairs(12, seed=1, dtype=torch.float32), []
    for cut in (12, 3):
        options = {"micro_batch_size": cut, "scaler": GradScaler("cpu", init_scale=2.0**12)}
        model, accumulator = accumulating(Towers(torch.float32), 1.0, **options)
        before = weights(model)
        with torch.autocast("cpu", torch.float16):
            assert accumulator.contrast(batch, model, lambda *both, model=model: clip(model, *both)).stepped
        ends.append(before - weights(model))
    exact = big_batch("CLIP", [batch])[1]
    assert error(ends[1], exact) <= 1.5 * error(ends[0], exact) <= 0.05


def test_overflow_is_skipped_and_nan_is_named():
    model, batch = Towers(torch.float32), pairs(6, seed=1, dtype=torch.float32)
    scaler = GradScaler("cpu", init_scale=2.0**127)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size=2, scaler=scaler)
    update = accumulator.contrast(batch, model, lambda *both: 9 * clip(model, *both))
    assert not update.stepped and "overflow" in (update.reason or "")
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size=2)
    before = weights(model)
    with pytest.raises(DistaccumError, match="the loss of micro-batch 0 on rank 0 is nan"):
        accumulator.contrast(batch, model, lambda *both: clip(model, *both) * float("nan"))
    batch["text"][4] = float("nan")
    with pytest.raises(DistaccumError, match="the loss of micro-batch 2 on rank 0 is nan"):
        accumulator.contrast(batch, model, lambda *both: clip(model, *both))
    assert torch.equal(weights(model), before)


def test_micro_batch_that_does_not_fit_is_cut_smaller():
    model, batch, sizes = Towers(), pairs(12, seed=1), []

    def encode(part: Pair) -> tuple[Tensor, Tensor]:
        sizes.append(len(part["image"]))
        if torch.is_grad_enabled() and sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(part)

    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto")
    before = weights(model)
    accumulator.contrast(batch, encode, lambda *both: clip(model, *both))
    assert error(before - weights(model), big_batch("CLIP", [batch])[1]) <= 1e-12
    assert sizes == [12, 12, 6, 6, 6] + [3] * 8

    def no_room(*both: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    sizes.clear()
    with pytest.raises(DistaccumError, match=r"loss_fn does not fit .*\[12, 4\], \[12, 4\].*smaller batch"):
        accumulator.contrast(batch, model, no_room)
    assert accumulator.contrast(batch, encode, lambda *both: clip(model, *both)).micro_batches == 4


LAYOUTS = [(5, 5), (7, 2), (3, 0), (0, 4)]


GRID = [(1, "plain", loss, "last", [(11,), (4,)]) for loss in ("CLIP", "SigLIP")]
GRID += [(2, name, loss, "last", LAYOUTS) for name in ("DDP", "FSDP2") for loss in ("CLIP", "SigLIP")]
GRID += [(2, name, "CLIP", "last", LAYOUTS) for name in ("DDP views", "DDP find")]
GRID += [(2, name, "CLIP", "every", LAYOUTS[:2]) for name in ("DDP", "FSDP2, root only")]
GRID += [(2, "DDP static", "CLIP", "last", LAYOUTS[:2]), (2, "FSDP2", "CLIP", "gathered", LAYOUTS[:2])]
GRID += [(3, "DDP", "SigLIP", "last", [(4, 0, 3), (1, 6, 2)])]
GRID += [(2, f"ZeRO {stage}", "alike", "last", LAYOUTS[:2]) for stage in (1, 2, 3)]
GRID += [(2, name, "alike", "last", LAYOUTS[:2]) for name in ("FSDP1", "FSDP1, flat parameters")]


@pytest.mark.parametrize(("world", "name", "loss", "sync", "layouts"), GRID)
@on_ranks()
def test_gradient_is_exact_on_uneven_ranks(world, name, loss, sync, layouts):
    kind = KINDS[name if loss == "alike" else "FSDP2"]
    model, optimizer, weights_of = wrapped(name, make_net(kind.dtype) if loss == "alike" else Towers())
    size = {"steps": 4} if name == "plain" else {"micro_batch_size": 2}
    accumulator, inner = Accumulator(model, optimizer, sync=sync, **size), getattr(model, "module", model)
    for i, layout in enumerate(layouts):
        batches = [pairs(size, seed=10 * i + r, dtype=kind.dtype) for r, size in enumerate(layout)]
        before = weights_of(model)
        encode = partial(encoded, model) if loss == "alike" else model
        update = accumulator.contrast(batches[dist.get_rank()], encode, lambda *both: LOSSES[loss](inner, *both))
        value, exact = big_batch(loss, batches, before)
        assert max(error(before - weights_of(model), exact), abs(update.loss / value - 1)) <= kind.bound
        assert (update.stepped, update.index, update.counts) == (True, i, {"samples": sum(layout)})


FAULTS = {
    "differs": "different losses",
    "rows": "encode() gave a tensor of shape [1, 4] for a micro-batch of 2 samples",
    "number": "expected as many each time, with rows of one dtype and shape",
    "kind": "expected as many each time, with rows of one dtype and shape",
    "changes": "the second time on rank 0, 1",
    "raises": "a bug",
}


@on_ranks(2)
def test_fault_on_one_rank_is_raised_on_all_ranks_and_leaves_no_trace():
    model, optimizer, weights_of = wrapped("DDP", Towers())
    accumulator, rank, calls = Accumulator(model, optimizer, micro_batch_size=2), dist.get_rank(), 0
    before, drawn = weights_of(model), 0.0
    torch.manual_seed(rank)

    def encode(part: Pair) -> Any:
        nonlocal calls
        calls += 1
        images, texts = model(part)
        if fault == "changes":
            images = images * calls
        if fault == "rows" and rank == 1:
            return images[:1], texts
        if fault == "kind" and rank == 1:
            return images[:, :3], texts
        return (images,) if fault == "number" and rank == 1 and calls == 2 else (images, texts)

    def loss_fn(*both: Tensor) -> Tensor:
        nonlocal drawn
        drawn = float(torch.rand(())) + random.random() + numpy.random.rand()  # alike on all ranks
        if fault == "raises" and rank == 1:
            raise KeyError("a bug")
        return siglip(model.module, *both) * drawn * (1 + rank if fault == "differs" else 1)

    for fault, text in FAULTS.items():  # the closures read it
        calls = 0
        with pytest.raises((DistaccumError, ValueError, KeyError)) as caught:
            accumulator.contrast(pairs(4, seed=rank), encode, loss_fn)
        assert torch.equal(weights_of(model), before) and text in str(caught.value)
        assert rank or fault not in ("rows", "raises") or "rank 1 failed in update 0" in str(caught.value)
    fault, batches = "none", [pairs(4, seed=r) for r in range(2)]
    accumulator.contrast(batches[rank], encode, loss_fn)
    assert error(before - weights_of(model), drawn * big_batch("SigLIP", batches)[1]) <= 1e-12


@on_ranks(2)
def test_parameter_hidden_by_fsdp1_is_refused_in_the_loss():
    net = Towers()
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    _, accumulator = accumulating(model, 1.0, micro_batch_size=2)
    with pytest.raises(DistaccumError, match="what FSDP or ZeRO shards in encode"):
        loss_fn = lambda a, b: (a @ b.T).mean() * sum(map(torch.sum, net.parameters()))  # noqa: E731
        accumulator.contrast(pairs(4, seed=0), model, loss_fn)


@on_ranks(2)
def test_representations_and_gradients_take_one_collective_each():
    taken, size = [], sum(p.numel() for p in Towers().parameters())
    for number in (2, 4):
        model, optimizer, _ = wrapped("DDP", Towers())
        accumulator = Accumulator(model, optimizer, micro_batch_size=8 // number)
        for i in range(4):
            with Counting() as count:
                accumulator.contrast(pairs(8, seed=i), model, lambda *both, model=model: siglip(model.module, *both))
                taken.append(count.take())
        assert [n for _, n in taken[-1]].count(size) == 1  # the gradient
        ours = 2 * 8 * 4 * 8  # bytes of two representations of 8 samples in float64
        assert [n for name, n in taken[-1] if n == ours] == [ours]
    assert len(taken[3]) == len(taken[7])
