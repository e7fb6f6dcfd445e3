"""FSDP2: the cost of its policies, and cases that fail silently elsewhere."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import full, full_gradient, full_weights, fully_sharded
from problems import (
    error,
    gradient,
    join,
    loss_of,
    make_batch,
    make_net,
    make_net_without_router,
    micro_batches_of,
    sample_loss,
    token_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens
from distaccum.engines.private.fsdp2 import reduce_unused

EVEN = [[2, 1, 3, 2]] * 4


def everything(layout: Any, index: int) -> Any:
    return join([b for r in range(dist.get_world_size()) for b in micro_batches_of(layout, index, r)])


def collectives_by_micro_step(sync: str, shape: tuple[int, ...] | None) -> Any:
    model, optimizer = fully_sharded(shape=shape)(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer, sync=sync)
    for index in range(3):  # FSDP2 chooses the root module in the first forward
        batches = micro_batches_of(EVEN, index, dist.get_rank())
        with Counting() as count:
            window = accumulator.window(batches)
            plan = [name for name, _ in count.take()]
            seen = []
            for batch in window:
                window.backward(loss_of(model, batch))
                seen.append(tally(count.take()))
            window.step()
            seen.append(tally(count.take()))
    return plan, seen


def tally(collectives: list[tuple[str, int]]) -> dict[str, int]:
    """Counts by kind; a collective of a few numbers is "small"."""
    kinds: dict[str, int] = {}
    for name, size in collectives:
        kind = "small" if size <= 16 else name.strip("_").replace("_base", "").replace("_single", "")
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


GATHER, REDUCE, ALL = "allgather", "reduce_scatter", "allreduce"
STEP = {"small": 3}  # the used parameters, the record, and on_nonfinite's flag over all shards
# Three groups: only the root's parameters stay gathered from forward to backward.
COSTS = {
    ("last", None): [{GATHER: 5}] * 3 + [{GATHER: 5, REDUCE: 3}, STEP],
    ("every", None): [{GATHER: 5, REDUCE: 3}] * 4 + [STEP],
    ("gathered", None): [{GATHER: 3}, {}, {}, {REDUCE: 3}, STEP],
    ("last", (2, 2)): [{GATHER: 5}] * 3 + [{GATHER: 5, REDUCE: 3, ALL: 3}, STEP],
    ("replicas", (2, 2)): [{GATHER: 5, REDUCE: 3}] * 3 + [{GATHER: 5, REDUCE: 3, ALL: 3}, STEP],
}


@pytest.mark.parametrize(("sync", "shape"), COSTS, ids=[f"{sync} on {shape or 2}" for sync, shape in COSTS])
def test_policies_send_the_expected_collectives(ranks, sync, shape):
    for plan, seen in ranks(4 if shape else 2).run(collectives_by_micro_step, sync, shape):
        assert plan == ["allgather_"]
        assert seen[:-1] == COSTS[sync, shape][:-1]
        assert seen[-1] == COSTS[sync, shape][-1]


class Choosing(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.never, self.head = (nn.Linear(5, 5).double() for _ in range(4))

    def forward(self, x, which):
        return self.head(
            self.one(x) * ("1" in which) if "2" not in which else self.two(x) + ("1" in which) * self.one(x)
        )


def chosen(turns: list[list[list[str]]], sync: str) -> Any:
    """`turns` names the layers that each micro-batch uses, by window and rank."""
    rank = dist.get_rank()
    model = fully_shard(Choosing())
    accumulator = Accumulator(model, AdamW(model.parameters(), lr=0.0), sync=sync)
    seen = []
    for turn, uses in enumerate(turns):
        plain = Choosing()
        window = accumulator.window(list(zip(micro_batches_of(EVEN, turn, rank), uses[rank], strict=False)))
        for batch, which in window:
            window.backward(model(batch["x"], which).square().mean())
        total = window.counts["samples"]
        for r in range(2):
            for batch, which in zip(micro_batches_of(EVEN, turn, r), uses[r], strict=False):
                (plain(batch["x"], which).square().mean() * len(batch["x"]) / total).backward()
        nones = [name for name, p in model.named_parameters() if p.grad is None]
        expected = [name for name, p in plain.named_parameters() if p.grad is None]
        seen.append((error(full_gradient(model), gradient(plain)), nones == expected))
        window.step()
    return seen


USES = {
    "first used in the last micro-step": [["1", "1", "12"], ["1", "1", "12"]],
    "only one rank uses it": [["1", "12", "1"], ["1", "1", "1"]],
    "one rank, in its last micro-step": [["1", "1", "12"], ["1", "1", "1"]],
    "each rank another": [["1", "1"], ["2", "2"]],
    "no rank uses one": [["2", "2"], ["2", "2"]],
    "not in the last micro-step": [["12", "1"], ["12", "1"]],
}


@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
@pytest.mark.skipif(
    not hasattr(FSDPParamGroup, "_validate_unused_param_grad_dtypes"),
    reason="from torch 2.15 on the library may ask FSDP2 for zeros (pytorch#196996)",
)
def test_parameters_that_some_or_no_ranks_use_are_exact(ranks, uses, sync):
    for seen in ranks(2).run(chosen, [uses] * 3, sync):
        for wrong, nones_are_right in seen:
            assert wrong <= 1e-10
            assert nones_are_right, "None where no rank used it, as without sharding"


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.skipif(
    not hasattr(FSDPParamGroup, "_validate_unused_param_grad_dtypes"),
    reason="from torch 2.15 on the library may ask FSDP2 for zeros (pytorch#196996)",
)
def test_stand_in_of_an_earlier_window_makes_no_parameter_used(ranks, sync):
    turns = [[["12", "12"], ["12"]], [["1", "1"], []]]  # the stand-in of rank 1 in the second uses both layers
    for seen in ranks(2).run(chosen, turns, sync):
        assert all(wrong <= 1e-10 and same_nones for wrong, same_nones in seen)


def statistics_beside_a_longer_rank() -> tuple[int, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    plain, model = copy.deepcopy(net), fully_shard(net)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), batchnorm="ignore")
    batches = [torch.randn(4, 3) for _ in range((3, 1)[dist.get_rank()])]
    window = accumulator.window(batches)
    for batch in window:
        window.backward(model(batch).square().mean())
    window.step()
    for batch in batches:
        plain(batch)
    return int(model[1].num_batches_tracked) - len(batches), error(model[1].running_var, plain[1].running_var)


def test_stand_in_moves_no_running_statistics(ranks):
    for more, wrong in ranks(2).run(statistics_beside_a_longer_rank):
        assert more == 0 and wrong <= 1e-6


def clipped_beyond_float32() -> tuple[float, float]:
    """The squares of the gradients overflow, and one rank has the largest."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False))  # two rows on each rank
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), max_norm=1.0)
    factors, before = torch.tensor([1e22, 1e22, 3e25, 3e25]), full_weights(model)
    window = accumulator.window([torch.ones(2, 4), torch.ones(1, 4)])
    for x in window:
        window.backward((model(x) * factors).mean())
    update = window.step()
    exact = float((factors.double() / 4).norm()) * 2  # a row has four equal elements
    return update.grad_norm / exact - 1, float((full_weights(model) - before).norm())


def test_norm_is_exact_where_its_square_overflows_on_one_rank(ranks):
    for off, moved in ranks(2).run(clipped_beyond_float32):
        assert abs(off) <= 1e-5 and moved == pytest.approx(1.0, rel=1e-4)


def divided_by(factors: list[float]) -> Any:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.0)
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module, factor in zip(modules, factors, strict=False):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    accumulator = Accumulator(model, optimizer)
    window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank()))
    for batch in window:
        window.backward(sample_loss(model, batch))
    plain = make_net_without_router()
    sample_loss(plain, everything(EVEN, 0)).backward()
    wrong = error(full_gradient(model), gradient(plain))
    return wrong, abs(window.step().loss - sample_loss(plain, everything(EVEN, 0)).item())


@pytest.mark.parametrize("factors", [[7.0] * 3, [5.0]], ids=["on each module", "on one module"])
def test_divide_factors_leave_the_gradient_exact(ranks, factors):
    for wrong, loss in ranks(2).run(divided_by, factors):
        assert wrong <= 1e-10
        assert loss <= 1e-10


def refused(function, *args) -> str:
    try:
        function(*args)
    except (DistaccumError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def with_policy(param_dtype: str | None, reduce_dtype: str | None, sync: str, dtype: str = "float32") -> Any:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, param_dtype) if param_dtype else None,
        reduce_dtype=getattr(torch, reduce_dtype) if reduce_dtype else None,
    )
    net = make_net_without_router().to(getattr(torch, dtype))
    plain = make_net_without_router().to(getattr(torch, dtype)).double()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, optimizer = fully_sharded(mp_policy=policy)(net, 0.0)
        accumulator = Accumulator(model, optimizer, sync=sync)
    layout = [[1] * 64] * 2
    window = accumulator.window(micro_batches_of(layout, 0, dist.get_rank(), torch.float32))
    for batch in window:
        window.backward(model(batch["x"].to(getattr(torch, dtype))).float().square().mean())
    batches = [b for r in range(2) for b in micro_batches_of(layout, 0, r, torch.float32)]
    loss_of(plain, {"x": join(batches)["x"].double()}).backward()
    dtypes = {p.grad.dtype for p in model.parameters()}
    return error(full_gradient(model), gradient(plain)), [str(w.message) for w in warned], dtypes


CASTS_UP = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")  # from torch 2.15: bf16 gradients add up in float32


@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_mixed_precision_adds_up_in_reduce_dtype(ranks, sync):
    for wrong, warned, dtypes in ranks(2).run(with_policy, "bfloat16", "float32", sync):
        assert wrong <= 6e-3  # the error of bfloat16 gradients; a sum in bfloat16 has several times that
        assert warned == []
        assert dtypes == {torch.float32}


def test_sum_in_half_precision_raises_a_warning(ranks):
    for arguments, warns in {
        ("bfloat16", None, "last"): not CASTS_UP,
        (None, None, "last", "bfloat16"): True,
    }.items():
        (wrong, warned, _), (_, elsewhere, _) = ranks(2).run(with_policy, *arguments)
        assert elsewhere == []
        if warns:
            assert "add up in half precision" in warned[0] and "reduce_dtype=torch.float32" in warned[0]
        else:
            assert warned == [] and wrong <= 6e-3


def tensor_parallel(max_norm: float) -> Any:
    """Two data-parallel ranks of two tensor-parallel ranks each; the router is on no mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = make_net()
    parallelize_module(net.body, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net.body[0], net.body[2], net.head):
        fully_shard(layer, mesh=mesh["data"])
    data_rank = mesh["data"].get_local_rank()
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), max_norm=max_norm)
    layouts = [[[3, 1], [2, 4]], [[1, 2, 3], [2]], [[], [3, 1]]]

    def loss_fn(model, batch):
        hidden = model.body(batch["x"])
        return model.head(hidden).square().mean() + model.router(hidden).square().mean()

    seen = []
    for index, layout in enumerate(layouts):
        before = [full(p).detach().clone() for p in net.parameters()]
        window = accumulator.window(micro_batches_of(layout, index, data_rank))
        for batch in window:
            window.backward(loss_fn(net, batch))
        update = window.step()
        plain = make_net()
        nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in before]), plain.parameters())
        loss = loss_fn(plain, join([b for r in range(2) for b in micro_batches_of(layout, index, r)]))
        loss.backward()
        norm = gradient(plain).norm().item()
        moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, net.parameters(), strict=True)])
        exact = gradient(plain) * min(1.0, max_norm / norm)
        seen.append((error(moved, exact), abs(update.grad_norm - norm) / norm, abs(update.loss - loss.item())))
    return seen


@pytest.mark.parametrize("max_norm", [100.0, 0.05])
def test_window_beside_tensor_parallel_ranks_is_exact(ranks, max_norm):
    for seen in ranks(4).run(tensor_parallel, max_norm):
        for moved, norm, loss in seen:
            assert moved <= (1e-10 if max_norm > 1 else 1e-4)
            assert norm <= 1e-10
            assert loss <= 1e-10


def leaves_out_a_name(wrap: str, sync: str, empty: int) -> Any:
    """Micro-batch `empty` of rank 0 has no tokens."""
    rank = dist.get_rank()
    model = make_net()
    if wrap == "layers":
        for layer in (model.body[0], model.body[2], model.head):
            fully_shard(layer)
    optimizer = SGD(fully_shard(model).parameters(), lr=0.0)
    accumulator = Accumulator(
        model, optimizer, sync=sync, count={"tokens": count_tokens("labels"), "samples": count_samples}
    )
    kept = {r: [0.0 if (r, i) == (0, empty) else 0.6 for i in range(3)] for r in range(2)}
    batches = {r: [make_batch(2, seed=10 * r + i, kept=kept[r][i]) for i in range(3)] for r in range(2)}
    window = accumulator.window(batches[rank])
    for batch in window:
        window.backward(tokens=token_loss(model, batch), samples=0.1 * sample_loss(model, batch))
    plain = make_net()
    joined = join(batches[0] + batches[1])
    (token_loss(plain, joined) + 0.1 * sample_loss(plain, joined)).backward()
    wrong = error(full_gradient(model), gradient(plain))
    window.step()
    return wrong


def test_term_without_a_count_is_left_out_with_one_group_or_gathered(ranks):
    for wrong in ranks(2).run(leaves_out_a_name, "root", "last", 2):
        assert wrong <= 1e-10
    for empty in (1, 2):
        for wrong in ranks(2).run(leaves_out_a_name, "layers", "gathered", empty):
            assert wrong <= 1e-10


def test_term_without_a_count_is_refused_with_several_groups(ranks):
    for message in ranks(2).run(refused, leaves_out_a_name, "layers", "last", 1):
        assert "count of 0 for one of ['tokens', 'samples']" in message
        assert "sync='gathered'" in message


def dry_from_the_start() -> Any:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer)
    message = refused(accumulator.window, micro_batches_of([[2], []], 0, dist.get_rank()))
    window = accumulator.window(micro_batches_of([[2], [1]], 0, dist.get_rank()))
    for batch in window:
        window.backward(sample_loss(model, batch))
    return message, window.step().stepped


def test_rank_that_never_had_a_micro_batch_cannot_stand_in(ranks):
    for message, stepped in ranks(2).run(dry_from_the_start):
        assert "rank 1 has none from an earlier window to stand in" in message
        assert stepped


def flags_of(model: nn.Module) -> Any:
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in groups_of(m)]
    return [
        (g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward, g.post_forward_mesh_info is None) for g in groups
    ]


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    return list(getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])


def flags_put_back(sync: str) -> Any:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer, sync=sync)
    seen = []
    for index in range(2):
        window = accumulator.window(micro_batches_of(EVEN, index, dist.get_rank()))
        for batch in window:
            window.backward(loss_of(model, batch))
        window.step()
        seen.append(flags_of(model))
    batch = make_batch(2, seed=dist.get_rank())
    with Counting() as count:
        loss_of(model, batch).backward()  # by the caller, outside of windows
    return seen, tally(count.take())


@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_flags_of_fsdp2_are_restored(ranks, sync):
    ours = [(True, True, True, True), (True, True, True, False), (True, True, True, False)]
    for seen, after in ranks(2).run(flags_put_back, sync):
        assert seen == [ours, ours]  # by default FSDP2 keeps the root gathered after forward
        assert after == {GATHER: 5, REDUCE: 3}


def stale(how: str) -> Any:
    """Before the window the caller's gradients exist, reduced or kept unsharded."""
    model, optimizer = fully_sharded()(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer)
    model.set_requires_gradient_sync(how == "reduced")
    loss_of(model, make_batch(2, seed=1)).backward()
    if how == "cleared":
        optimizer.zero_grad()  # it does not reach unsharded gradients
    model.set_requires_gradient_sync(True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank()))
        for batch in window:
            window.backward(loss_of(model, batch))
    plain = make_net_without_router()
    loss_of(plain, everything(EVEN, 0)).backward()
    return error(full_gradient(model), gradient(plain)), [str(w.message) for w in warned]


@pytest.mark.parametrize("how", ["reduced", "unsharded", "cleared"])
def test_gradients_from_before_the_window_are_cleared(ranks, how):
    (wrong, warned), (other, _) = ranks(2).run(stale, how)
    assert wrong <= 1e-10 and other <= 1e-10
    assert len(warned) == 1 and "gradients that stood before the window" in warned[0]


WAYS = [
    "evaluation in the loop",
    "evaluation before step()",
    "part of an evaluation, which prefetches",
    "kept after backward",
    "kept after forward",
    "unshard()",
    "unshard(async_op=True)",
    "step() fails",
    "the caller's step fails, a new Accumulator",
    "skipped",
]


def replicated(module: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def weights_left_gathered(wrap: Any, ways: list[str]) -> dict[str, float]:
    """By what happened between a last backward and its step: how far three updates are from those of a plain net."""
    return {how: moved_after(wrap, how) for how in ways}


def moved_after(wrap: Any, how: str) -> float:
    rank, world, lr = dist.get_rank(), dist.get_world_size(), 0.5
    model, plain, failed = make_net_without_router(), make_net_without_router(), []
    for layer in (model.body[0], model.body[2]):
        wrap(layer)
    optimizer = SGD(wrap(model).parameters(), lr=lr)

    def fail(*_: Any) -> None:
        if "fails" in how and not failed:
            failed.append(how)
            raise KeyError(how)

    optimizer.register_step_post_hook(fail)
    options = {"on_nonfinite": "skip"} if how == "skipped" else {}
    accumulator = Accumulator(model, None if "caller" in how else optimizer, **options)
    for index in range(3):
        window = accumulator.window(micro_batches_of([[2, 1]] * world, index, rank))
        if how.startswith("kept"):
            getattr(model, f"set_reshard_after_{how.split()[-1]}")(False)
        if "prefetches" in how and index:  # whose root has run once
            model.body[0].set_modules_to_forward_prefetch([model.body[2]])
        for i, batch in enumerate(window):
            loss = loss_of(model, batch)
            window.backward(loss * float("nan") if how == "skipped" and index == 1 and i == 1 else loss)
            if how == "evaluation in the loop":
                with torch.no_grad():
                    loss_of(model, batch)
        with torch.no_grad():
            if how == "evaluation before step()" or "fails" in how:
                loss_of(model, batch)
            elif "prefetches" in how:
                model.body[0](batch["x"])
        if how.startswith("unshard"):
            for module in (model, model.body[0], model.body[2]):
                module.unshard(async_op="async" in how)
        stepped = True
        try:
            if "caller" in how:
                optimizer.step()
            stepped = window.step().stepped or "caller" in how
        except KeyError:
            if "new" in how:
                optimizer.zero_grad()
                accumulator = Accumulator(model)
        if stepped:
            every = [b for r in range(world) for b in micro_batches_of([[2, 1]] * world, index, r)]
            loss_of(plain, join(every)).backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= lr * parameter.grad
                    parameter.grad = None
    return error(full_weights(model), torch.cat([p.detach().flatten() for p in plain.parameters()]))


@pytest.mark.parametrize("kind", ["kept over two of four ranks after forward", "replicated"])
def test_weights_gathered_before_a_step_are_not_used_after_it(ranks, kind):
    if kind != "replicated":
        world, wrap, ways = 4, partial(fully_shard, reshard_after_forward=2), WAYS
    elif hasattr(FSDPParamGroup, "_reset_iter_state"):
        world, wrap, ways = 2, replicated, [how for how in WAYS if how != "kept after forward"]  # as copies are anyway
    else:
        pytest.skip("replicate() of this torch is fully_shard on a hybrid mesh")
    for seen in ranks(world).run(weights_left_gathered, wrap, ways, seconds=60):
        assert seen == {how: pytest.approx(0, abs=1e-10) for how in ways}


UNEVEN = [[2, 2, 2, 2], [2, 2]]


def beside_a_teacher() -> tuple[list[float], str, int]:
    """Errors of two updates on uneven ranks, and what state_dict() in mid-window says; and hooks that it leaves."""
    student, optimizer = fully_sharded()(make_net_without_router(), 1.0)
    teacher, _ = fully_sharded()(make_net_without_router(), 0.0)
    teacher.requires_grad_(False)

    def loss_fn(batch: Any) -> Any:
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        with torch.no_grad():
            wanted = teacher(batch["x"]) + 1
        return (student(batch["x"]) - wanted).square().mean()

    mine, plain, errors = micro_batches_of(UNEVEN, 0, dist.get_rank()), make_net_without_router(), []
    hooks = len(student._state_dict_pre_hooks)
    for turn in range(2):
        before = full_weights(student)
        if turn:
            Accumulator([student, teacher], optimizer, micro_batch_size="auto").update(join(mine), loss_fn)
        else:
            accumulator = Accumulator([student, teacher], optimizer, sync="gathered")
            window = accumulator.window(mine)
            for batch in window:
                window.backward(loss_fn(batch))
            student.state_dict()  # after the loop
            window.step()
        nn.utils.vector_to_parameters(before.clone(), plain.parameters())
        plain.zero_grad()
        x = everything(UNEVEN, 0)["x"]
        (plain(x) - make_net_without_router()(x).detach() - 1).square().mean().backward()
        errors.append(error(before - full_weights(student), gradient(plain)))
    window = accumulator.window(mine)

    def loop() -> None:
        for batch in window:
            window.backward(loss_fn(batch))
            student.state_dict()

    return errors, refused(loop), len(student._state_dict_pre_hooks) - hooks


def test_frozen_teacher_that_is_given_too_keeps_gathered_ranks_in_step(ranks):
    for errors, said, hooks in ranks(2).run(beside_a_teacher):
        assert max(errors) <= 1e-10
        assert "state_dict() of the model in mid-window with sync='gathered' and [4, 2] micro-batches" in said
        assert hooks <= 1  # FSDP2's own, which its first forward makes


def torn(where: str, sync: str) -> Any:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer, sync=sync)

    def fail(*_: Any) -> None:
        raise KeyError(where)

    for turn in (1, 3):  # a middle and the last micro-step
        window = accumulator.window(micro_batches_of(EVEN, turn, dist.get_rank()))
        try:
            for i, batch in enumerate(window):
                if i == turn and where == "forward":
                    handle = model.body[2].register_forward_hook(fail)
                loss = loss_of(model, batch)
                if i == turn and where == "backward":
                    hidden = model.body[1](model.body[0](batch["x"]))
                    hidden.register_hook(fail)
                    loss = model.head(model.body[3](model.body[2](hidden))).square().mean()
                window.backward(loss)
        except KeyError:
            pass
        if where == "forward":
            handle.remove()
        window = accumulator.window(micro_batches_of(EVEN, 9, dist.get_rank()))
        for batch in window:
            window.backward(loss_of(model, batch))
        plain = make_net_without_router()
        loss_of(plain, everything(EVEN, 9)).backward()
        wrong = error(full_gradient(model), gradient(plain))
        window.step()
        assert wrong <= 1e-10, (turn, wrong)
    return True


@pytest.mark.parametrize("sync", ["last", "gathered"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_error_in_forward_or_backward_leaves_nothing_behind(ranks, where, sync):
    assert ranks(2).run(torn, where, sync) == [True, True]


def scaled(root: bool, overflow: bool) -> Any:
    model, optimizer = fully_sharded(root=root)(make_net_without_router().float(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if not root:
        message = refused(lambda: Accumulator(model, optimizer, scaler=scaler))
        assert "sharded and plain parameters" in message and "an optimizer for each kind" in message
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        plain_ones = [p for p in model.parameters() if not isinstance(p, DTensor)]
        optimizer = [SGD(sharded, lr=1.0), SGD(plain_ones, lr=1.0)]
    accumulator = Accumulator(model, optimizer, scaler=scaler)
    before = torch.cat([full(p).detach().flatten() for p in model.parameters()])
    window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank(), torch.float32))
    for batch in window:
        loss = loss_of(model, batch)
        if overflow and dist.get_rank() == 1:
            loss.register_hook(lambda g: g * float("inf"))
        window.backward(loss)
    update = window.step()
    moved = before - torch.cat([full(p).detach().flatten() for p in model.parameters()])
    plain = make_net_without_router()
    loss_of(plain, everything(EVEN, 0)).backward()
    return update.stepped, update.reason, scaler.get_scale(), error(moved, gradient(plain))


@pytest.mark.parametrize("root", [True, False], ids=["root", "parts"])
def test_scaler_overflows_on_all_ranks_together(ranks, root):
    for stepped, _, scale, wrong in ranks(2).run(scaled, root, False):
        assert stepped and scale == 8.0
        assert wrong <= 1e-5
    for stepped, reason, scale, wrong in ranks(2).run(scaled, root, True):
        assert not stepped and "overflow" in reason
        assert scale == 4.0
        assert wrong == 1.0  # the weights have not moved


def few_rows(on_nonfinite: str) -> Any:
    """A head of one row: rank 1's shard of it is empty."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = fully_shard(net)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), on_nonfinite=on_nonfinite)
    window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank()))
    for i, batch in enumerate(window):
        loss = loss_of(model, batch)
        window.backward(loss * float("nan") if i == 1 and on_nonfinite == "skip" and dist.get_rank() == 1 else loss)
    return window.step().stepped


def test_ranks_step_or_skip_together_with_an_empty_shard(ranks):
    assert ranks(2).run(few_rows, "raise") == [True, True]
    assert ranks(2).run(few_rows, "skip") == [False, False]


def a_model_not_in_the_last_part(sync: str) -> Any:
    models = [fully_shard(make_net_without_router()) for _ in range(2)]
    accumulator = Accumulator(models, [SGD(model.parameters(), lr=0.0) for model in models], sync=sync)
    window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank()))
    for batch in window:
        for model in window.parts(models):
            window.backward(loss_of(model, batch))
    plain = make_net_without_router()
    loss_of(plain, everything(EVEN, 0)).backward()
    return [error(full_gradient(model), gradient(plain)) for model in models]


@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_model_absent_from_the_last_part_is_reduced(ranks, sync):
    for wrongs in ranks(2).run(a_model_not_in_the_last_part, sync):
        assert max(wrongs) <= 1e-10


def the_last_part_has_no_count(sync: str, world: int) -> float:
    rank = dist.get_rank()
    model = fully_shard(make_net())
    accumulator = Accumulator(
        model,
        SGD(model.parameters(), lr=0.0),
        sync=sync,
        count={"samples": count_samples, "tokens": count_tokens("labels")},
    )
    for turn in range(2):  # parameters that a skipped backward leaves gathered would show in the next window
        kept = {r: [0.0 if (r, i) == (0, 1) else 0.6 for i in range(2)] for r in range(world)}
        batches = {r: [make_batch(2, seed=10 * r + i, kept=kept[r][i]) for i in range(2)] for r in range(world)}
        window = accumulator.window(batches[rank])
        for batch in window:
            for name in window.parts(["samples", "tokens"]):
                window.backward(**{name: (token_loss if name == "tokens" else sample_loss)(model, batch)})
        plain = make_net()
        joined = join([batch for mine in batches.values() for batch in mine])
        (token_loss(plain, joined) + sample_loss(plain, joined)).backward()
        wrong = error(full_gradient(model), gradient(plain))
        assert wrong <= 1e-10, (turn, wrong)
        window.step()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_last_part_without_a_count_still_reduces(ranks, sync, world):
    assert max(ranks(world).run(the_last_part_has_no_count, sync, world)) <= 1e-10


def tampered(how: str, sync: str) -> str:
    model, optimizer = fully_sharded()(make_net_without_router(), 0.1)
    accumulator = Accumulator(model, optimizer, sync=sync)
    layout = [[2, 1, 3], [2, 1]] if how == "zero_grad after the loop" else EVEN
    window = accumulator.window(micro_batches_of(layout, 0, dist.get_rank()))

    def loop() -> None:
        for batch in window:
            window.backward(loss_of(model, batch))
            if how == "zero_grad":
                model.zero_grad()
            elif how == "halved":
                next(model.parameters()).grad.mul_(0.5)  # foreach functions on DTensors change no version counter

        optimizer.zero_grad()
        window.step()

    return refused(loop)


@pytest.mark.parametrize(
    ("how", "sync", "expected"),
    [
        ("zero_grad", "gathered", "cleared or changed in mid-window"),
        ("zero_grad", "every", "cleared or changed in mid-window"),
        ("halved", "every", "cleared or changed in mid-window"),
        ("zero_grad after the loop", "gathered", "cleared between the window's loop and its step()"),
    ],
)
def test_change_of_gradients_is_refused(ranks, how, sync, expected):
    for message in ranks(2).run(tampered, how, sync):
        assert f"gradients were {expected}" in message


def unused_first(sync: str) -> float:
    net = make_net_without_router()
    first = nn.Module()
    first.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))  # the optimizer's first parameter
    first.body, first.head = net.body, net.head
    first.forward = lambda x: first.head(first.body(x))  # type: ignore[method-assign]
    model, optimizer = fully_sharded()(first, 1.0)
    accumulator = Accumulator(model, optimizer, sync=sync)
    for index in range(2):
        window = accumulator.window(micro_batches_of(EVEN, index, dist.get_rank()))
        for batch in window:
            window.backward(loss_of(model, batch))
        if index:
            seen = torch.cat([full(p.grad).flatten() for p in model.parameters() if p.grad is not None])
        window.step()
    plain = make_net_without_router()
    loss_of(plain, everything(EVEN, 0)).backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= parameter.grad
            parameter.grad = None
    loss_of(plain, everything(EVEN, 1)).backward()
    return error(seen, torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]))


@pytest.mark.parametrize("sync", ["last", "every", "gathered"])
def test_unused_first_parameter_is_not_taken_for_a_cleared_gradient(ranks, sync):
    assert max(ranks(2).run(unused_first, sync)) <= 1e-10


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))

    def loss(self, batch):
        return (self(batch["x"]) - self(-batch["x"])).square().mean()


def entered_twice(kind: str) -> Any:
    model = Twice()
    if kind == "no zeros":  # FSDP2 then makes no zeros for unused parameters, as before torch 2.15
        for parameter in model.parameters():
            parameter.grad_dtype = None
    for layer in (model.one, model.two):
        fully_shard(layer)
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.0)
    accumulator = Accumulator(model, optimizer, sync="gathered", steps=3)
    seen = []
    for index, layout in enumerate([[[2, 1], [3]], [[1], [2, 2, 1]], [[2, 1], []]]):
        batches = micro_batches_of(layout, index, dist.get_rank())
        window = accumulator.window(batches)
        for batch in window:
            window.backward(Twice.loss(model, batch))
        plain = Twice()
        plain.loss(join([b for r in range(2) for b in micro_batches_of(layout, index, r)])).backward()
        seen.append(error(full_gradient(model), gradient(plain)))
        window.step()
    return max(seen)


@pytest.mark.parametrize("kind", ["zeros", "no zeros"])
def test_module_used_twice_is_exact_with_sync_gathered(ranks, kind):
    for wrong in ranks(2).run(entered_twice, kind, seconds=30):
        assert wrong <= 1e-10


def nan_in_a_shard(rank: int, on_nonfinite: str) -> Any:
    """Only this rank's part of the gradient has a NaN."""
    model, optimizer = fully_sharded()(make_net_without_router(), 1.0)
    accumulator = Accumulator(model, optimizer, on_nonfinite=on_nonfinite)
    before = full_weights(model)
    window = accumulator.window(micro_batches_of(EVEN, 0, dist.get_rank()))
    for batch in window:
        window.backward(loss_of(model, batch))
    if dist.get_rank() == rank:
        next(model.parameters()).grad.to_local()[0] = float("nan")
    try:
        said = str(window.step().reason)
    except DistaccumError as raised:
        said = str(raised)
    return said, torch.equal(before, full_weights(model))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_nan_in_the_shard_of_any_one_rank_is_refused(ranks, rank, on_nonfinite):
    for said, stayed in ranks(2).run(nan_in_a_shard, rank, on_nonfinite):
        assert "is not finite" in said and stayed


def test_torch_without_dtypes_of_gradients_leaves_unused_parameters_to_the_user():
    class Parameter:  # as in torch 2.9
        mp_policy = MixedPrecisionPolicy()
        sharded_param = object()

    class Group:
        fsdp_params = (Parameter(),)

    group = Group()
    reduce_unused(group)
    assert not hasattr(group, "reduce_scatter_unused_params")
