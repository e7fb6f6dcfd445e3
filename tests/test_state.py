"""state_dict() in mid-window, and going on from it: bit for bit, in a new process group of the same size."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import FSDP2_RUNS_ON_CPU, KINDS, fully_sharded
from problems import make_batch, make_net_without_router, trunk, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from distaccum import Accumulator, DistaccumError


class Noisy(nn.Module):
    """Dropout draws, so that the random numbers must go on too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        net = make_net_without_router()
        self.body, self.head = net.body, net.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.3))


WRAPS = {
    "plain": lambda net: net,
    "DDP": DistributedDataParallel,
    "DDP, views": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True),
    "DDP, unused": lambda net: DistributedDataParallel(net, find_unused_parameters=True),
    "FSDP2": lambda net: fully_sharded()(net, 0.0)[0],
    "FSDP2, mixed": lambda net: fully_sharded(mp_policy=mixed())(net.float(), 0.0)[0],
    "HSDP": lambda net: fully_sharded(shape=(2, 1))(net, 0.0)[0],
}


def mixed() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


CASES = [
    ("plain", "last", 1),
    ("DDP", "last", 2),
    ("DDP", "every", 2),
    ("DDP, views", "last", 2),
    ("DDP, unused", "last", 2),
    *(
        [(name, sync, 2) for name in ("FSDP2", "FSDP2, mixed") for sync in ("last", "every", "gathered")]
        + [("HSDP", "replicas", 2), ("HSDP", "last", 2)]
        if FSDP2_RUNS_ON_CPU
        else []
    ),
]


def make(name: str, sync: str, **options: Any) -> Any:
    model = WRAPS[name](Noisy())
    optimizer = Adam(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradients of .* add up in half precision")
        return model, optimizer, Accumulator(model, optimizer, steps=4, sync=sync, **options)


def micro_batches(first_update: int, rank: int) -> list[Any]:
    return [
        make_batch(size, seed=100 * update + 10 * rank + i)
        for update in range(first_update, 3)
        for i, size in enumerate([2, 3, 1, 2])
    ]


def run(made: Any, loader: Any, pause: tuple[int, int] | None = None) -> Any:
    """The rest of the updates; where it pauses, what is saved."""
    model, optimizer, accumulator = made
    losses = []
    for window in accumulator.windows(loader):
        for i, batch in enumerate(window, start=window._done_before):
            x = batch["x"].to(next(model.parameters()).dtype)
            window.backward(model(x).float().square().mean())
            if (window.index, i) == pause:
                box = io.BytesIO()
                parts = {"accumulator": accumulator.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "weights": local_weights(model)}, box)
                return box.getvalue()
        losses.append(window.step().loss)
    return losses


def local_weights(model: nn.Module) -> list[torch.Tensor]:
    """By state_dict(), which shows shards also where parameters are gathered."""
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.state_dict().values()]


def load(made: Any, saved: bytes) -> None:
    model, optimizer, accumulator = made
    state = torch.load(io.BytesIO(saved), weights_only=False)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), state["weights"], strict=True):
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    accumulator.load_state_dict(state["accumulator"])


def paused(name: str, sync: str, pause: tuple[int, int]) -> tuple[bool, list[float], list[float]]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(11 + rank)
    whole = make(name, sync)
    expected = run(whole, micro_batches(0, rank))
    torch.manual_seed(11 + rank)
    saved = run(make(name, sync), micro_batches(0, rank), pause)
    torch.manual_seed(99)
    resumed = make(name, sync)
    load(resumed, saved)
    losses = run(resumed, micro_batches(pause[0], rank))
    same = all(map(torch.equal, local_weights(whole[0]), local_weights(resumed[0])))
    return same, expected[pause[0] :], losses


@pytest.mark.parametrize("pause", [(0, 0), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(("name", "sync", "world"), CASES)
def test_a_window_goes_on_bit_for_bit(ranks, name, sync, world, pause):
    seen = ranks(world).run(paused, name, sync, pause) if world > 1 else [paused(name, sync, pause)]
    for same, expected, losses in seen:
        assert same and losses == expected


# What a state can be used for


def half_a_window() -> Any:
    made = make("plain", "last")
    return made, run(made, micro_batches(0, 0), (1, 1))


def test_what_the_window_was_is_checked():
    _, saved = half_a_window()
    resumed = make("plain", "last")
    load(resumed, saved)
    with pytest.raises(DistaccumError, match=r"the middle of update 1 and.* not that one on rank 0 .*first micro-b"):
        next(resumed[2].windows(micro_batches(1, 0)[1:]))
    losses = run(resumed, micro_batches(1, 0))  # nothing was lost by it
    assert len(losses) == 2


def test_another_number_of_ranks_is_refused_in_mid_window_and_allowed_at_an_edge(ranks):
    _, saved = half_a_window()
    messages = ranks(2).run(loads_on_two, saved)
    assert all("mid-window on 1 ranks and this job has 2, expected as many" in message for message in messages)
    made = make("plain", "last")
    run(made, micro_batches(2, 0))
    assert ranks(2).run(indices, made[2].state_dict()) == [1, 1]


def loads_on_two(saved: bytes) -> str:
    with pytest.raises(DistaccumError) as told:
        load(make("DDP", "last"), saved)
    return str(told.value)


def indices(state: Any) -> int:
    _, _, accumulator = make("DDP", "last")
    accumulator.load_state_dict(state)
    return accumulator.index


def test_a_state_without_this_rank_s_part_is_told():
    _, saved = half_a_window()
    state = torch.load(io.BytesIO(saved), weights_only=False)["accumulator"]
    del state["rank 0"]
    with pytest.raises(DistaccumError, match="no part for rank 0; save and load the state_dict"):
        make("plain", "last")[2].load_state_dict(state)


def test_the_state_is_loaded_without_running_code():
    _, saved = half_a_window()
    in_window = torch.load(io.BytesIO(saved), weights_only=False)["accumulator"]
    for state in (in_window, make("plain", "last")[2].state_dict()):
        box = io.BytesIO()
        torch.save(state, box)
        box.seek(0)
        assert torch.load(box, weights_only=True)["rank 0"] == state["rank 0"]


def test_where_a_state_cannot_be_taken():
    model, _, accumulator = make("plain", "last")
    window = accumulator.window(micro_batches(2, 0))
    for batch in window:
        window.backward(model(batch["x"]).square().mean())
    with pytest.raises(DistaccumError, match=r"between a window's loop and its step\(\); call window.step\(\) first"):
        accumulator.state_dict()
    state = None
    window.step()
    window = accumulator.window(micro_batches(2, 0))
    for batch in window:
        window.backward(model(batch["x"]).square().mean())
        state = state or accumulator.state_dict()
        with pytest.raises(DistaccumError, match="while a window is in its loop"):
            accumulator.load_state_dict(state)


def test_can_pause_while_every_rank_has_more(ranks):
    assert ranks(2).run(pauses) == [[False, True, True, False], [False, True, True, False, False]]


def pauses() -> list[bool]:
    model, _, accumulator = make("DDP", "last")
    window = accumulator.window(micro_batches(0, 0)[: 3 + dist.get_rank()])
    seen = []
    for i, batch in enumerate(window):
        seen += [window.can_pause] if i == 0 else []
        window.backward(model(batch["x"]).square().mean())
        seen.append(window.can_pause)
    return seen


@pytest.mark.parametrize("name", ["FSDP1", "ZeRO 0", "ZeRO 2"])
def test_engines_that_cannot_say_so(ranks, name):
    (told, _) = ranks(2).run(cannot, name)
    assert "does not show what it has added up; call it between two windows" in told


def cannot(name: str) -> str:
    kind = KINDS[name]
    model, optimizer = kind.wrap(make_net_without_router().to(kind.dtype), 0.1)
    accumulator = Accumulator(model, optimizer, steps=2)
    told = ""
    for window in accumulator.windows([make_batch(2, seed=i, dtype=kind.dtype) for i in range(2)]):
        for batch in window:
            window.backward(model(batch["x"]).square().mean())
            assert not window.can_pause
            if not told:
                try:
                    accumulator.state_dict()
                except DistaccumError as error:
                    told = str(error)
        window.step()
    accumulator.state_dict()
    return told


# Distributed checkpoints


@pytest.mark.parametrize("name", ["DDP", *(["FSDP2"] if FSDP2_RUNS_ON_CPU else [])])
def test_a_distributed_checkpoint_holds_a_window(ranks, tmp_path, name):
    seen = ranks(2).run(through_a_checkpoint, name, str(tmp_path))
    assert all(same and losses == expected for same, expected, losses in seen)


def through_a_checkpoint(name: str, folder: str) -> Any:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank = dist.get_rank()

    def everything(made: Any) -> dict[str, Any]:
        model, optimizer = get_state_dict(made[0], made[1])
        return {"model": model, "optimizer": optimizer, "accumulator": made[2]}

    torch.manual_seed(11 + rank)
    whole = make(name, "last")
    expected = run(whole, micro_batches(0, rank))
    torch.manual_seed(11 + rank)
    stopped = make(name, "last")
    saved = False
    for window in stopped[2].windows(micro_batches(0, rank)):
        for i, batch in enumerate(window):
            window.backward(stopped[0](batch["x"]).float().square().mean())
            if (window.index, i) == (1, 1):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    dcp.save(everything(stopped), checkpoint_id=folder)
                saved = True
                break
        if saved:
            break
        window.step()
    resumed = make(name, "last")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = everything(resumed)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(resumed[0], resumed[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = run(resumed, micro_batches(1, rank))
    same = all(map(torch.equal, local_weights(whole[0]), local_weights(resumed[0])))
    return same, expected[1:], losses


# Loaders that can tell their state


def stateful_loader(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(21)
    return StatefulDataLoader([make_batch(2, seed=i)["x"][0] for i in range(30)], 2, shuffle=True, num_workers=workers)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", ["in the window", "at its edge"])
def test_a_stateful_loader_goes_on_where_it_stopped(workers, at):
    pytest.importorskip("torchdata")
    runs: list[list[float]] = []
    for stops in (False, True):
        model = trunk()
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.01), steps=4)
        seen: list[float] = []
        state: Any = None

        def consume(model: Any, accumulator: Any, seen: list[float], stop: bool) -> Any:
            for window in accumulator.windows(stateful_loader(workers)):
                for i, x in enumerate(window):
                    seen.append(float(x.sum()))
                    window.backward(model(x).square().mean())
                    if stop and at == "in the window" and (window.index, i) == (1, 1):
                        return accumulator.state_dict()
                window.step()
                if stop and at == "at its edge" and window.index == 1:
                    return accumulator.state_dict()
            return None

        state = consume(model, accumulator, seen, stops)
        if stops:
            again = trunk()
            again.load_state_dict(model.state_dict())
            accumulator = Accumulator(again, SGD(again.parameters(), lr=0.01), steps=4)
            accumulator.load_state_dict(state)
            consume(again, accumulator, seen, False)
            model = again
        runs.append([*seen, *weights(model).tolist()])
    assert runs[0] == runs[1]  # no sample lost or repeated, and the same weights


def test_another_loader_than_the_state_s_is_told():
    class Loader:
        def __iter__(self):
            return iter([make_batch(2, seed=0)])

        def state_dict(self):
            return {"at": 0}

        def load_state_dict(self, state):
            self.loaded = state

    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.01), steps=1)
    windows = accumulator.windows(Loader())
    next(windows)
    state = accumulator.state_dict()
    accumulator.load_state_dict(state)
    with pytest.warns(UserWarning, match="a list cannot load that"):
        next(accumulator.windows([make_batch(2, seed=0)]))


class Counted:
    """A loader of numbered micro-batches that can tell its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield make_batch(2, seed=self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def seeds_of(batches: list[Any]) -> list[int]:
    return [next(i for i in range(6) if torch.equal(batch["x"], make_batch(2, seed=i)["x"])) for batch in batches]


def consumed(accumulator: Any, model: nn.Module, loader: Any) -> list[int]:
    seen = []
    for window in accumulator.windows(loader):
        for batch in window:
            seen.append(batch)
            window.backward(model(batch["x"]).square().mean())
        window.step()
    return seeds_of(seen)


def test_a_state_taken_before_the_window_begins_keeps_its_data():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    windows = accumulator.windows(Counted())
    window = next(windows)
    for batch in window:
        window.backward(model(batch["x"]).square().mean())
    window.step()
    window = next(windows)  # drawn, and not begun
    state = accumulator.state_dict()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    accumulator.load_state_dict(state)
    assert consumed(accumulator, model, Counted()) == [2, 3, 4, 5]


def test_a_state_that_was_loaded_can_be_saved_again_at_once():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    window = next(accumulator.windows(Counted()))
    for batch in window:
        window.backward(model(batch["x"]).square().mean())
        state = accumulator.state_dict()
        break
    for begin in (False, True):
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
        accumulator.load_state_dict(state)
        if begin:
            window = next(accumulator.windows(Counted()))
        again = accumulator.state_dict()
        assert again["in_window"] and again["rank 0"] == state["rank 0"]
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    accumulator.load_state_dict(again)
    assert consumed(accumulator, model, Counted()) == [1, 2, 3, 4, 5]


def past_the_shortest() -> str:
    model, _, accumulator = make("DDP", "last")
    window = accumulator.window(micro_batches(2, 0)[: 3 - 2 * dist.get_rank()])
    told = ""
    for i, batch in enumerate(window):
        window.backward(model(batch["x"]).float().square().mean())
        if i == 0:
            with pytest.raises(DistaccumError) as error:
                accumulator.state_dict()
            told = str(error.value)
    window.step()
    return told


def test_a_state_past_the_shortest_rank_is_refused_on_all(ranks):
    for told in ranks(2).run(past_the_shortest):
        assert "(they have [3, 1])" in told and "take it where window.can_pause" in told


def streams_alone() -> str:
    model, _, accumulator = make("DDP", "last", lookahead=False)
    window = next(accumulator.windows(micro_batches(2, 0)))
    for batch in window:
        window.backward(model(batch["x"]).float().square().mean())
        assert not window.can_pause
        with pytest.raises(DistaccumError) as error:
            accumulator.state_dict()
    window.step()
    return str(error.value)


def test_a_state_of_ranks_that_stream_alone_is_refused(ranks):
    assert all("streaming, what they have is not known" in told for told in ranks(2).run(streams_alone))


def taking_states(name: str, sync: str) -> bool:
    rank = dist.get_rank() if dist.is_initialized() else 0
    ends = []
    for takes in (False, True):
        torch.manual_seed(11 + rank)
        model, _, accumulator = made = make(name, sync)
        for window in accumulator.windows(micro_batches(0, rank)):
            for batch in window:
                window.backward(model(batch["x"].to(next(model.parameters()).dtype)).float().square().mean())
                if takes and window.can_pause:
                    accumulator.state_dict()
                    model.state_dict()
            window.step()
        ends.append(local_weights(made[0]))
    return all(map(torch.equal, *ends))


@pytest.mark.parametrize(("name", "sync", "world"), CASES)
def test_taking_a_state_changes_nothing(ranks, name, sync, world):
    assert all(ranks(world).run(taking_states, name, sync) if world > 1 else [taking_states(name, sync)])


def test_named_losses_a_scaler_and_dropped_micro_batches_go_on():
    from torch.amp import GradScaler

    from distaccum import count_samples, count_tokens

    def make_all() -> Any:
        model = make_net_without_router()
        scaler = GradScaler("cpu", init_scale=64.0)
        optimizer = Adam(model.parameters(), lr=0.01)
        count = {"tokens": count_tokens("labels"), "rows": count_samples}
        reduction = {"tokens": "mean", "rows": "sum"}
        return model, optimizer, Accumulator(model, optimizer, steps=4, count=count, reduction=reduction, scaler=scaler)

    batches = [make_batch(size, seed=size) for size in (2, 3, 1, 4)]
    batches[1]["labels"][:] = -100
    batches.insert(1, make_batch(0, seed=9))  # counts nothing, and is dropped
    ends = []
    for pauses in (False, True):
        model, optimizer, accumulator = make_all()
        window = accumulator.window(batches)
        for at in range(2):
            for batch in window:
                outputs = model(batch["x"])
                labels = batch["labels"].flatten()
                window.backward(
                    tokens=nn.functional.cross_entropy(outputs.flatten(0, 1), labels),
                    rows=outputs.square().mean((1, 2)).sum(),
                )
                if pauses and at == 0 and window.num_done == 2:
                    state = accumulator.state_dict()
                    break
            if not pauses or at:
                break
            accumulator = Accumulator(
                model,
                optimizer,
                steps=4,
                count={"tokens": count_tokens("labels"), "rows": count_samples},
                reduction={"tokens": "mean", "rows": "sum"},
                scaler=GradScaler("cpu", init_scale=2.0),
            )
            accumulator.load_state_dict(state)
            window = accumulator.window(batches)
        update = window.step()
        ends.append([*weights(model).tolist(), *update.losses.values()])
    assert ends[0] == ends[1]
