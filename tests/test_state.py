"""state_dict() in mid-window resumes bit for bit, in a new process group of the same size."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import FSDP2_RUNS_ON_CPU, KINDS, fully_sharded
from inside import fit_of
from problems import error, gradient, make_batch, make_net_without_router, trunk, weights
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from distaccum import Accumulator, DistaccumError


class Noisy(nn.Module):
    """Has dropout, so that random numbers must resume too."""

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
    """Runs the remaining updates; at a pause it returns the saved state."""
    model, optimizer, accumulator = made
    losses = []
    for window in accumulator.windows(loader):
        for batch in window:
            i = window.num_done
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
    """From state_dict(), which gives shards even while parameters are gathered."""
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
def test_resumed_window_continues_bit_for_bit(ranks, name, sync, world, pause):
    seen = ranks(world).run(paused, name, sync, pause) if world > 1 else [paused(name, sync, pause)]
    for same, expected, losses in seen:
        assert same and losses == expected


# Uses of a state


def half_a_window() -> Any:
    made = make("plain", "last")
    return made, run(made, micro_batches(0, 0), (1, 1))


def test_resumed_window_with_other_data_is_refused():
    _, saved = half_a_window()
    resumed = make("plain", "last")
    load(resumed, saved)
    with pytest.raises(DistaccumError, match=r"the middle of update 1 and.* not that one on rank 0 .*first micro-b"):
        next(resumed[2].windows(micro_batches(1, 0)[1:]))
    losses = run(resumed, micro_batches(1, 0))  # the refusal lost nothing
    assert len(losses) == 2


def test_number_of_ranks_may_change_only_between_windows(ranks):
    _, saved = half_a_window()
    messages = ranks(2).run(loads_on_two, saved)
    assert all("mid-window on 1 ranks and this job has 2, expected the same number" in message for message in messages)
    made = make("plain", "last")
    run(made, micro_batches(2, 0))
    assert ranks(2).run(indices, made[2].state_dict()) == [1, 1]


def loads_on_two(saved: bytes) -> str:
    with pytest.raises(DistaccumError) as caught:
        load(make("DDP", "last"), saved)
    return str(caught.value)


def indices(state: Any) -> int:
    _, _, accumulator = make("DDP", "last")
    accumulator.load_state_dict(state)
    return accumulator.index


def test_state_without_this_ranks_part_is_refused():
    _, saved = half_a_window()
    state = torch.load(io.BytesIO(saved), weights_only=False)["accumulator"]
    del state["rank 0"]
    with pytest.raises(DistaccumError, match="no part for rank 0; save and load the state_dict"):
        make("plain", "last")[2].load_state_dict(state)


def test_state_is_loaded_without_running_code():
    _, saved = half_a_window()
    in_window = torch.load(io.BytesIO(saved), weights_only=False)["accumulator"]
    for state in (in_window, make("plain", "last")[2].state_dict()):
        box = io.BytesIO()
        torch.save(state, box)
        box.seek(0)
        assert torch.load(box, weights_only=True)["rank 0"] == state["rank 0"]


class RunsCode:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of the state ran')",)


def a_state(**change: Any) -> dict[str, Any]:
    _, _, accumulator = measured()
    state = {
        **accumulator.state_dict(),
        "fit": {"size": 32, "good": 0, "too_large": 64, "since": 0, "wait": 16},  # 64 samples ran out of memory
        "index": 7,
        "skipped": 3,
        "noise": [1.0, 2.0, 3.0],
        **change,
    }
    return {name: value for name, value in state.items() if value is not KeyError}


def packed(window: Any, loader: Any = None) -> bytes:
    box = io.BytesIO()
    torch.save({"window": window, "loader": loader}, box)
    return box.getvalue()


def measured() -> Any:
    options = {"measure_noise": True, "micro_batch_size": "auto", "scaler": GradScaler("cpu", init_scale=8.0)}
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.01)
    return model, optimizer, Accumulator(model, optimizer, **options)


FIT = {"size": 4, "good": 2, "too_large": 8, "since": 0, "wait": 16}
SCALER = GradScaler("cpu", init_scale=2.0).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skipped": KeyError}, "has no skipped; give what"),
        ({"index": float("nan")}, "index=nan, expected a whole number of at least 0"),
        ({"index": -5}, "index=-5, expected a whole number of at least 0"),
        ({"index": "3"}, "index='3', expected a whole number"),
        ({"index": True}, "index=True, expected a whole number"),
        ({"skipped": -1}, "skipped=-1, expected"),
        ({"ranks": None}, "ranks=None, expected"),
        ({"fit": None}, "fit=None, expected a dict"),
        ({"fit": {"too_large": None, "is_proven": 3, "__class__": 1}}, "good=None, expected a whole number"),
        ({"fit": {**FIT, "size": 0}}, "size=0, expected a whole number of at least 1"),
        ({"fit": {**FIT, "wait": 1.5}}, "wait=1.5, expected a whole number of at least 1"),
        ({"fit": {name: value for name, value in FIT.items() if name != "too_large"}}, "too_large=None, expected"),
        ({"noise": [1.0, 2.0]}, "expected three numbers"),
        ({"noise": "abc"}, "expected three numbers"),
        ({"scaler": {}}, "the state's scaler has scale=None"),
        (
            {"scaler": {**SCALER, "_growth_tracker": "x"}},
            "the state's scaler has _growth_tracker='x', expected numbers",
        ),
        ({"scaler": [1]}, "expected a dict"),
        ({"rank 0": b"garbage"}, "cannot be read .UnpicklingError.: it is cut off, or of another"),
        ({"rank 0": packed(None)[:-40]}, "cannot be read"),
        ({"rank 0": packed(RunsCode())}, "cannot be read"),
        ({"rank 0": packed({"done": 1})}, "cannot be read"),
        ({"rank 0": 3}, "cannot be read"),
        (
            {"rank 0": packed({**dict.fromkeys(["index", "counts", "losses", "partial", "random"]), "done": -1})},
            "done=-1",
        ),
    ],
    ids=str,
)
def test_broken_state_is_refused_and_nothing_is_loaded(change, message):
    _, _, accumulator = measured()
    before = accumulator.state_dict(), vars(fit_of(accumulator)).copy()
    with pytest.raises(ValueError, match=message) as caught:
        accumulator.load_state_dict(a_state(**change))
    assert len(str(caught.value)) < 300 and "weights_only" not in str(caught.value)
    assert (accumulator.state_dict(), vars(fit_of(accumulator))) == before


def test_state_sets_no_unknown_attribute():
    _, _, accumulator = measured()
    accumulator.load_state_dict(a_state(fit={**FIT, "is_proven": 3, "most": 1}, foreign=1))
    fit = fit_of(accumulator)
    assert accumulator.index == 7 and fit.most is None and callable(fit.is_proven)
    assert accumulator.state_dict()["fit"] == FIT and accumulator.state_dict()["noise"] == [1.0, 2.0, 3.0]
    for foreign in (None, [1], "state"):
        with pytest.raises(TypeError, match=r"expected what state_dict\(\) gave"):
            accumulator.load_state_dict(foreign)


class Stateful:
    def __init__(self, held: Any) -> None:
        self.held, self.i = held, 0

    def state_dict(self) -> Any:
        return {"i": self.i, "held": self.held}

    def load_state_dict(self, state: Any) -> None:
        self.i = state["i"]

    def __iter__(self) -> Any:
        while self.i < 8:
            self.i += 1
            yield torch.full((2, 3), float(self.i))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (numpy.arange(3), r"the loader's state_dict\(\) holds numpy\.\S+, and a state is loaded without.*tolist\(\)"),
        (RunsCode(), r"the loader's state_dict\(\) holds exec,"),
        (lambda: 1, r"the loader's state_dict\(\) cannot be saved"),
    ],
    ids=["numpy", "code", "lambda"],
)
def test_loader_state_that_cannot_be_loaded_is_refused_on_saving(held, message):
    model = nn.Linear(3, 1)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.01), steps=2)
    for window in accumulator.windows(Stateful(held)):
        for x in window:
            window.backward(model(x).square().mean())
            with pytest.raises(DistaccumError, match=message) as caught:
                accumulator.state_dict()
            assert "\n" not in str(caught.value)
            break
        break


def test_state_is_not_taken_before_a_step_nor_loaded_in_a_loop():
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


@pytest.mark.parametrize("wide", [None, torch.float64])
def test_deep_copy_is_whole_between_windows_and_refused_within(wide):
    model = nn.Linear(3, 1)
    sgd = SGD(model.parameters(), lr=0.1)
    made = model, sgd, Accumulator(model, sgd, steps=2, accumulate_dtype=wide)
    batches = [torch.randn(2, 3) for _ in range(3)]
    for x in (window := made[2].window(batches)):
        with pytest.raises(
            DistaccumError, match="copying or pickling an Accumulator with a window that is in its loop"
        ):
            copy.deepcopy(made)
        window.backward(model(x).square().mean())
    with pytest.raises(DistaccumError, match="a window that is complete but not stepped"):
        copy.deepcopy(made)
    assert window.step().stepped
    before = copy.deepcopy(model)
    before(torch.cat(batches)).square().mean().backward()

    twin, optimizer, other = copy.deepcopy(made)
    assert other.index == 1
    for x in (window := other.window(batches)):
        window.backward(twin(x).square().mean())
        with pytest.raises(DistaccumError, match="before the window's own"):
            optimizer.step()
    assert error(gradient(twin), gradient(before)) <= 1e-6
    window.step()
    assert torch.equal(model.weight, before.weight) and not torch.equal(twin.weight, before.weight)


def test_can_pause_is_true_while_every_rank_has_more(ranks):
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
def test_engines_that_hide_their_sums_refuse_a_state_in_mid_window(ranks, name):
    (message, _) = ranks(2).run(cannot, name)
    assert "hides the gradients of an open window; call it between two windows" in message


def cannot(name: str) -> str:
    kind = KINDS[name]
    model, optimizer = kind.wrap(make_net_without_router().to(kind.dtype), 0.1)
    accumulator = Accumulator(model, optimizer, steps=2)
    message = ""
    for window in accumulator.windows([make_batch(2, seed=i, dtype=kind.dtype) for i in range(2)]):
        for batch in window:
            window.backward(model(batch["x"]).square().mean())
            assert not window.can_pause
            if not message:
                try:
                    accumulator.state_dict()
                except DistaccumError as error:
                    message = str(error)
        window.step()
    accumulator.state_dict()
    return message


# Distributed checkpoints


@pytest.mark.parametrize("name", ["DDP", *(["FSDP2"] if FSDP2_RUNS_ON_CPU else [])])
def test_distributed_checkpoint_holds_a_window(ranks, tmp_path, name):
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


# Tensor-parallel ranks


class Parallel(nn.Module):
    """Some gradients are placed like their parameters (a, b), others differ (embedding, norm: partial sums)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, tokens, part=slice(None)):
        return self.b(torch.tanh(self.a(self.norm(self.embedding(tokens)[:, part]))))


def merged_beside_tensor_parallel_ranks(sync: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
    part = slice(2 * tensor, 2 * tensor + 2)  # this rank's part of the sequence, for its norm

    def make() -> Any:
        model = parallelize_module(
            Parallel(),
            mesh["tensor"],
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
                "norm": SequenceParallel(),
                "a": ColwiseParallel(input_layouts=Shard(1)),
                "b": RowwiseParallel(),
            },
        )
        fully_shard(model, mesh=mesh["data"])
        return model, Accumulator(model, SGD(model.parameters(), lr=0.1, foreach=False), sync=sync)

    def run_on(made: Any, stop: bool) -> Any:
        model, accumulator = made
        generator = torch.Generator().manual_seed(data)
        tokens = [torch.randint(0, 8, (2, 4), generator=generator) for _ in range(3)]
        window = accumulator.window(tokens)
        for i, one in enumerate(window):
            window.backward(model(one, part).square().mean())
            if stop and i == 1:
                return accumulator.state_dict()
        return [p.grad.to_local().clone() for p in model.parameters()]

    expected = run_on(make(), stop=False)
    state = run_on(make(), stop=True)
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, state)
    resumed = make()
    resumed[1].load_state_dict({key: value for one in states for key, value in one.items()})
    return [key for key in state if key.startswith("rank ")], all(map(torch.equal, expected, run_on(resumed, False)))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on CPU in torch 2.6")
def test_states_of_tensor_parallel_ranks_in_one_dict_resume_bit_for_bit(ranks, sync):
    seen = ranks(4).run(merged_beside_tensor_parallel_ranks, sync)
    assert seen == [([f"rank {rank}"], True) for rank in range(4)]


# Stateful loaders


def stateful_loader(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(21)
    return StatefulDataLoader([make_batch(2, seed=i)["x"][0] for i in range(30)], 2, shuffle=True, num_workers=workers)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", ["in the window", "at its edge"])
def test_stateful_loader_resumes_at_its_position(workers, at):
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


class Standing:
    """A stateful loader; each iter() restarts it unless a state was loaded."""

    def __init__(self, length: int = 8) -> None:
        self.place, self.length, self.loaded = 0, length, False

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.loaded = state["place"], True

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.place, self.loaded = self.place if self.loaded else 0, False
        while self.place < self.length:
            self.place += 1
            yield torch.full((1, 1), float(self.place))


def one_weight() -> tuple[nn.Module, Accumulator]:
    model = nn.Linear(1, 1, bias=False)
    return model, Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)


def first_after(state: dict[str, Any]) -> float:
    """The first sample in a new process that has loaded `state`."""
    _, accumulator = one_weight()
    accumulator.load_state_dict(state)
    assert accumulator.state_dict() == state
    return float(next(iter(next(accumulator.windows(Standing())))))


@pytest.mark.parametrize("leave", ["at its edge", "before its step", "in the window", "by an error", "not begun"])
def test_state_after_a_left_loop_has_the_loaders_position(leave: str) -> None:
    model, accumulator = one_weight()
    loader, left = Standing(), None
    with contextlib.suppress(KeyError):
        for window in accumulator.windows(loader):
            left = window if leave in ("before its step", "not begun") else None
            if leave == "not begun" and accumulator.index == 1:
                break
            for i, x in enumerate(window):
                window.backward(model(x).mean())
                if leave in ("in the window", "by an error") and (accumulator.index, i) == (1, 1):
                    break
            if leave == "by an error" and accumulator.index == 1:
                raise KeyError
            if leave in ("in the window", "before its step") and accumulator.index == 1:
                break
            window.step()
            if leave == "at its edge" and accumulator.index == 2:
                break
    if left is not None and leave == "before its step":
        left.step()
    next(iter(loader))  # moves the loader, not the saved position
    assert first_after(accumulator.state_dict()) == (3 if leave == "not begun" else 5)
    for window in accumulator.windows(Standing(3)):  # another epoch starts at its beginning and ends
        assert float(next(iter(window))) in (1, 3)
        window.discard()
    model, accumulator = one_weight()
    for window in accumulator.windows(Standing(3)):
        for x in window:
            window.backward(model(x).mean())
        window.step()
    assert first_after(accumulator.state_dict()) == 1  # the next epoch starts at its beginning


def test_loader_that_cannot_take_the_state_raises_a_warning():
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
    with pytest.warns(UserWarning, match="which a list cannot load"):
        next(accumulator.windows([make_batch(2, seed=0)]))


class Counted:
    """A stateful loader of numbered micro-batches."""

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


def test_state_before_a_window_begins_keeps_the_windows_data():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    windows = accumulator.windows(Counted())
    window = next(windows)
    for batch in window:
        window.backward(model(batch["x"]).square().mean())
    window.step()
    window = next(windows)  # drawn but not begun
    state = accumulator.state_dict()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2)
    accumulator.load_state_dict(state)
    assert consumed(accumulator, model, Counted()) == [2, 3, 4, 5]


def test_loaded_state_can_be_saved_again_at_once():
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
    message = ""
    for i, batch in enumerate(window):
        window.backward(model(batch["x"]).float().square().mean())
        if i == 0:
            with pytest.raises(DistaccumError) as error:
                accumulator.state_dict()
            message = str(error.value)
    window.step()
    return message


def test_state_past_the_shortest_rank_is_refused_on_all_ranks(ranks):
    for message in ranks(2).run(past_the_shortest):
        assert "(they have [3, 1])" in message and "take it where window.can_pause" in message


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
def test_state_dict_changes_nothing(ranks, name, sync, world):
    assert all(ranks(world).run(taking_states, name, sync) if world > 1 else [taking_states(name, sync)])


def test_named_losses_and_dropped_micro_batches_resume_bit_for_bit():
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
    batches.insert(1, make_batch(0, seed=9))  # counts nothing, so it is dropped
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
