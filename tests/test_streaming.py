"""lookahead=False: at most one further micro-batch is alive, and the gradient equals the big batch's."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import FSDP2_RUNS_ON_CPU, KINDS, big_batch_at
from problems import CASES, IGNORED, error, loss_of, make_batch, make_net, trunk, weights
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens


def stream(name: str, case: str, layouts: list[Any], **options: Any) -> Any:
    """The errors of windows over one loader per rank: each change of the weights, compared with one big batch."""
    kind, (loss_fn, how, reduction, count) = KINDS[name], CASES[case]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    lr = 1 / 32 if reduction == "sum" else 1.0
    model, optimizer = kind.wrap(make_net(kind.dtype), lr)
    steps = max(len(one) for layout in layouts for one in layout)
    accumulator = Accumulator(
        model, optimizer, steps=steps, reduction=reduction, count=count, lookahead=False, **options
    )
    batches = [
        [[make_batch(size, seed=100 * i + 10 * r + j) for j, size in enumerate(layout[r])] for r in range(world)]
        for i, layout in enumerate(layouts)
    ]
    for window in batches:
        for of_rank in window:  # micro-batches without counted samples pad the short ranks
            empty = make_batch(2, seed=0)
            empty["labels"][:] = IGNORED
            of_rank.extend([{key: value[:0] for key, value in empty.items()}] * (steps - len(of_rank)))
    loader = [batch for window in batches for batch in window[rank]]
    while loader and not len(loader[-1]["x"]):
        loader.pop()
    wrong = []
    for i, window in enumerate(accumulator.windows(iter(loader))):
        before = kind.weights(model)
        for batch in window:
            assert not window.counts
            window.backward(loss_fn(model, {**batch, "x": batch["x"].to(kind.dtype)}, how))
        counts = window.counts
        update = window.step()
        whole = [b for of_rank in batches[i] for b in of_rank if len(b["x"])]
        loss, exact = big_batch_at(case, before, whole)
        moved = (before.double() - kind.weights(model).double()) / lr
        wrong.append((error(moved, exact), abs(update.loss - loss) / abs(loss)))
        assert update.counts == counts and sum(counts.values()) == sum(float(count(b)) for b in whole)
    assert len(wrong) == len(layouts)
    return wrong


EVEN = [[[2, 3], [1, 2]], [[3, 1], [2, 2]]]
UNEVEN = [[[2, 3, 1], [4]], [[1], [2, 3, 2]], [[1, 1], []], [[2], [3]]]
ONE = [[[2, 3, 1]], [[4]], [[1, 2]]]
STREAMED = {
    "plain": ("last",),
    "DDP": ("last",),
    "FSDP1": ("last", "every"),
    **(
        {"FSDP2": ("last", "every", "gathered"), "HSDP, 2 replicas of 1 shard": ("replicas",)}
        if FSDP2_RUNS_ON_CPU
        else {}
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "sync"), [(name, sync) for name, syncs in STREAMED.items() for sync in syncs])
def test_streamed_window_is_exact(ranks, name, sync, case):
    kind = KINDS[name]
    layouts = [*EVEN, *UNEVEN] if kind.world > 1 else ONE
    if kind.world > 1:
        seen = ranks(kind.world).run(stream, name, case, layouts)
    else:
        seen = [stream(name, case, layouts)]
    assert max(value for of_rank in seen for pair in of_rank for value in pair) <= 1e-10


@pytest.mark.slow
def test_stream_keeps_one_further_micro_batch_alive():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=4, lookahead=False)
    alive: list[Any] = []

    def loader() -> Iterator[torch.Tensor]:
        for i in range(8):
            x = make_batch(2, seed=i)["x"]
            alive.append(weakref.ref(x))
            yield x
            del x

    most = 0
    for window in accumulator.windows(loader()):
        for x in window:
            window.backward(model(x).square().mean())
            gc.collect()
            most = max(most, sum(one() is not None for one in alive))
        window.step()
    assert most == 2 and len(alive) == 8


def test_correction_needs_no_collective_but_the_count(ranks):
    seen, other = ranks(2).run(collectives, False)
    assert seen == other == [["allgather_", "allreduce_", "allgather_", "allreduce_"]] * 3
    seen, _ = ranks(2).run(collectives, True)
    assert seen == [["allgather_", "allreduce_", "allreduce_"]] * 3


def collectives(lookahead: bool) -> Any:
    model = DistributedDataParallel(trunk())
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=4, lookahead=lookahead)
    seen = []
    with Counting() as counting:
        windows = accumulator.windows([make_batch(2, seed=i) for i in range(16)])
        for i, window in enumerate(windows):
            for batch in window:
                window.backward(loss_of(model, batch))
            window.step()
            names = [name for name, _ in counting.take()]
            seen += [names] if i else []  # DDP builds its buckets in the first window
    return [[name for name in names if name != "broadcast_"] for names in seen]


def test_scaler_and_clipping_see_the_corrected_gradient():
    ends = []
    for lookahead in (True, False):
        model = trunk()
        scaler = GradScaler("cpu", init_scale=1024.0)
        accumulator = Accumulator(
            model, SGD(model.parameters(), lr=0.1), steps=3, max_norm=0.01, scaler=scaler, lookahead=lookahead
        )
        for window in accumulator.windows([make_batch(size, seed=size) for size in (2, 5, 1, 3)]):
            for batch in window:
                window.backward(loss_of(model, batch))
            update = window.step()
            assert update.grad_norm > 0.01
        ends.append([*weights(model).tolist(), update.grad_norm, update.loss])
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_abandoned_window_consumes_its_data():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=3, lookahead=False)
    batches = [make_batch(1, seed=i) for i in range(9)]
    seen = []
    for window in accumulator.windows(batches):
        for batch in window:
            seen.append(next(i for i, one in enumerate(batches) if one is batch))
            window.backward(loss_of(model, batch))
            if seen == [0]:
                break
        else:
            window.step()
    assert seen == [0, 3, 4, 5, 6, 7, 8]  # as with lookahead


def test_window_without_counts_makes_no_update():
    model = make_net()
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=0.1), steps=2, count=count_tokens("labels"), lookahead=False
    )
    batches = [make_batch(2, seed=i) for i in range(6)]
    for empty in batches[2:4]:
        empty["labels"][:] = IGNORED
    updates = []
    for window in accumulator.windows(batches):
        for batch in window:
            window.backward(CASES["tokens mean"][0](model, batch))
        updates.append(window.step())
    assert [update.stepped for update in updates] == [True, False, True]
    assert updates[1].reason == "no tokens in any micro-batch of any rank" and math.isfinite(updates[2].loss)


def streamed_each_step() -> str:
    with pytest.raises(ValueError, match="lookahead") as caught:
        Accumulator(DistributedDataParallel(trunk()), steps=2, sync="every", lookahead=False)
    return str(caught.value)


def test_sync_every_under_ddp_is_refused(ranks):
    assert all("sync='every' with DistributedDataParallel" in message for message in ranks(2).run(streamed_each_step))


def test_sync_batchnorm_is_refused():
    with pytest.raises(ValueError, match="lookahead=False with SyncBatchNorm"):
        Accumulator(nn.Sequential(trunk(), nn.SyncBatchNorm(4)), steps=2, lookahead=False)


def test_losses_of_several_denominators_are_refused():
    names = {"tokens": count_tokens("labels"), "samples": count_samples}
    with pytest.raises(ValueError, match=r"several denominators \(tokens, samples\)"):
        Accumulator(trunk(), steps=2, count=names, lookahead=False)


def deepspeed_streams() -> str:
    model, optimizer = KINDS["ZeRO 1"].wrap(make_net(torch.float32), 0.1)
    with pytest.raises(ValueError, match="lookahead") as caught:
        Accumulator(model, optimizer, steps=2, lookahead=False)
    return str(caught.value)


def test_deepspeed_does_not_stream(ranks):
    assert all(
        "keeps gradients where they cannot be corrected" in message for message in ranks(2).run(deepspeed_streams)
    )


def test_paused_stream_resumes():
    ends = []
    for stops in (False, True):
        model = trunk()
        optimizer = SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, steps=3, lookahead=False)
        batches = [make_batch(size, seed=size) for size in (2, 5, 1)]
        window = next(accumulator.windows(batches))
        for i, batch in enumerate(window):
            window.backward(loss_of(model, batch))
            if stops and i == 1:
                state = accumulator.state_dict()
                break
        if stops:
            accumulator = Accumulator(model, optimizer, steps=3, lookahead=False)
            accumulator.load_state_dict(state)
            with pytest.raises(DistaccumError, match="first micro-batch on"):
                next(accumulator.windows(batches[1:]))
            window = next(accumulator.windows(batches))
            for batch in window:
                assert batch is batches[2]
                window.backward(loss_of(model, batch))
        update = window.step()
        ends.append([*weights(model).tolist(), update.loss, *update.counts.values()])
    assert ends[0] == ends[1]


def loader_fails(name: str) -> str:
    kind = KINDS[name]
    model, optimizer = kind.wrap(make_net(kind.dtype), 0.1)
    accumulator = Accumulator(model, optimizer, steps=3, lookahead=False)

    def loader() -> Iterator[Any]:
        for i in range(6):
            if i == 1 and dist.get_rank() == 1:
                raise OSError("the disk is gone")
            yield make_batch(2, seed=i)

    try:
        for window in accumulator.windows(loader()):
            for batch in window:
                window.backward(loss_of(model, batch))
            window.step()
    except (OSError, DistaccumError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on this torch's CPU")
def test_failing_loader_of_one_rank_raises_on_all_ranks(ranks):
    zero, one = ranks(2).run(loader_fails, "FSDP2")
    assert one == "OSError: the disk is gone"
    assert zero.startswith("DistaccumError: rank 1 could not draw a micro-batch")


def skips_in_a_stream() -> Any:
    model, optimizer = KINDS["FSDP2"].wrap(make_net(), 0.1)
    accumulator = Accumulator(model, optimizer, steps=3, lookahead=False, on_nonfinite="skip")
    steps = []
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(6 - 2 * dist.get_rank())]):
        for i, batch in enumerate(window):
            loss = loss_of(model, batch)
            window.backward(loss if window.index or i else loss + (loss - loss.detach()).sqrt())
        update = window.step()
        steps.append((update.stepped, update.counts))
    return steps


@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on this torch's CPU")
def test_skipped_update_leaves_uneven_ranks_synchronised(ranks):
    seen = ranks(2).run(skips_in_a_stream)
    assert seen == [[(False, {"samples": 12}), (True, {"samples": 8})]] * 2
