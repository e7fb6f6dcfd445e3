"""FSDP2: the cost of its policies, and cases that fail silently elsewhere."""

import contextlib
import copy
import re
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD

from distaccum import Accumulator, count_samples
from tests.support.counting import Counting
from tests.support.engines import fully_sharded
from tests.support.oracle import choices_off, everything, gradients_off, own, step_off
from tests.support.problems import (
    Choosing,
    make_batch,
    make_net,
    make_net_without_router,
    micro_batches_of,
    sample_loss,
)
from tests.support.ranks import on_ranks
from tests.support.versions import has, needs
from tests.support.windows import (
    accumulating,
    error,
    gradient,
    gradient_of,
    loss_of,
    refused,
    run_window,
    warned,
    weights,
)

pytestmark = needs("torch", "2.13", "FSDP2")
EVEN = [[2, 1, 3, 2]] * 2
SHARDED = ["last", "every", "gathered"]


def make(sync: str = "last", lr: float = 0.0, **options: Any) -> Any:
    model, optimizer = fully_sharded()(make_net_without_router(), lr)
    return model, optimizer, Accumulator(model, optimizer, sync=sync, **options)


def kind_of(name: str, size: int) -> str:
    """A collective of a few numbers is "small", and so are the rows that we gather."""
    return "small" if size <= 16 or name == "exchange" else re.sub("_base|_single|_$", "", name.removeprefix("_"))


def tally(collectives: list[tuple[str, int]]) -> Counter[str]:
    return Counter(kind_of(name, size) for name, size in collectives)


GATHER, REDUCE, ALL = "allgather", "reduce_scatter", "allreduce"
STEP = {"small": 3}  # the used parameters, the record, and on_nonfinite's flag over all shards
# Three groups: only the root's parameters stay gathered from forward to backward.
COSTS = {
    ("last", 2): [{GATHER: 5}] * 3 + [{GATHER: 5, REDUCE: 3}, STEP],
    ("every", 2): [{GATHER: 5, REDUCE: 3}] * 4 + [STEP],
    ("gathered", 2): [{GATHER: 3}, {}, {}, {REDUCE: 3}, STEP],
    ("last", 4): [{GATHER: 5}] * 3 + [{GATHER: 5, REDUCE: 3, ALL: 3}, STEP],
    ("replicas", 4): [{GATHER: 5, REDUCE: 3}] * 3 + [{GATHER: 5, REDUCE: 3, ALL: 3}, STEP],
}


@pytest.mark.parametrize(("sync", "world"), COSTS)
@on_ranks()
def test_policies_send_the_expected_collectives(sync, world):
    model, optimizer = fully_sharded(shape=(2, 2) if world == 4 else None)(make_net_without_router(), 0.0)
    accumulator = Accumulator(model, optimizer, sync=sync)
    for index in range(3):  # FSDP2 chooses the root module in the first forward
        with Counting() as count:
            window = accumulator.window(micro_batches_of(EVEN * 2, index, dist.get_rank()))
            plan = [name for name, _ in count.take()]
            seen = []
            for batch in window:
                window.backward(loss_of(model, batch))
                seen.append(tally(count.take()))
            window.step()
            seen.append(tally(count.take()))
    assert plan == ["exchange"]
    assert seen == COSTS[sync, world]


# By case and window: the layers that each micro-batch of each rank uses.
USES = {
    "first used in the last micro-step": [[["1", "1", "12"], ["1", "1", "12"]]] * 3,
    "only one rank uses it": [[["1", "12", "1"], ["1", "1", "1"]]] * 3,
    "one rank, in its last micro-step": [[["1", "1", "12"], ["1", "1", "1"]]] * 3,
    "each rank another": [[["1", "1"], ["2", "2"]]] * 3,
    "no rank uses one": [[["2", "2"], ["2", "2"]]] * 3,
    "not in the last micro-step": [[["12", "1"], ["12", "1"]]] * 3,
    "the stand-in of rank 1 in the second window uses both": [[["12", "12"], ["12"]], [["1", "1"], []]],
}


@pytest.mark.parametrize("sync", SHARDED)
@needs("torch", "2.15", "zeros for unused parameters")  # pytorch#196996
@on_ranks(2)
def test_parameters_that_some_or_no_ranks_use_are_exact(sync):
    seen = {}
    for name, turns in USES.items():
        if sync == "gathered" and "stand-in" in name:
            continue
        model, accumulator = accumulating(fully_shard(Choosing()), sync=sync)
        for turn, uses in enumerate(turns):
            seen[name, turn] = choices_off(model, accumulator, uses) <= 1e-10
    assert [case for case, right in seen.items() if not right] == []


@pytest.mark.parametrize("sync", SHARDED)
@on_ranks(2)
def test_other_parameters_on_each_rank_are_refused_where_torch_would_add_them_up(sync):
    """Before torch 2.15 a rank's reduction leaves out what it did not use; those of one size would be mixed."""
    said = {}
    for name in ("each rank another", "no rank uses one", "not in the last micro-step", "told"):
        model, uses = fully_shard(Choosing()), USES.get(name, USES["each rank another"])[0]
        if name == "told":
            model.set_reduce_scatter_unused_params(True)
        before = weights(model)
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), sync=sync)
        with patch("distaccum.engines.private.fsdp2.reduce_unused"):  # as before torch 2.15
            said[name] = refused(choices_off, model, accumulator, uses)
        assert torch.equal(weights(model), before) == (said[name] != "nothing")
    assert "layers.1.weight, layers.1.bias, layers.2.weight" in said.pop("each rank another")
    assert set(said.values()) == {"nothing"}


@on_ranks(2)
def test_scaler_is_refused_where_an_optimizer_holds_sharded_and_plain_parameters():
    net = make_net()
    fully_shard(next(net.children()))
    message = refused(Accumulator, net, SGD(net.parameters(), lr=0.0), scaler=torch.amp.GradScaler("cpu"))
    assert "make an optimizer for each kind and pass both" in message


@on_ranks(2)
def test_optimizer_that_was_made_after_a_forward_is_refused():
    model, _ = fully_sharded()(make_net_without_router(), 0.0)
    loss_of(model, make_batch(2, seed=1))  # the root keeps what it has gathered
    assert "holds gathered copies of the model" in refused(Accumulator, model, SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("sync", SHARDED)
@on_ranks(2)
def test_stand_in_with_a_loss_in_which_nothing_counts_now_adds_nothing(sync):
    count = {"samples": count_samples, "marked": lambda batch: batch["mark"]}
    model, accumulator = accumulating(fully_shard(make_net_without_router()), sync=sync, count=count, steps=1)
    for mark, layout in ((1, EVEN), (0, [[2, 1], []])):
        window = accumulator.window([{**batch, "mark": mark} for batch in own(layout)])
        run_window(window, model, lambda *given: {"samples": (loss := loss_of(*given)), "marked": 0.5 * loss})
        if not mark:
            assert error(gradient(model), gradient_of(make_net_without_router(), everything(layout))) <= 1e-10
        window.step()
        accumulator.contrast(own(EVEN)[0], lambda batch: model(batch["x"]), torch.var)  # its last stands in next


@on_ranks(2)
def test_stand_in_moves_no_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    plain, model = copy.deepcopy(net), fully_shard(net)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), batchnorm="ignore")
    batches = [{"x": torch.randn(4, 3)} for _ in range((3, 1)[dist.get_rank()])]
    run_window(accumulator.window(batches), model).step()
    for batch in batches:
        plain(batch["x"])
    more = int(model[1].num_batches_tracked) - len(batches)
    assert more == 0 and error(model[1].running_var, plain[1].running_var) <= 1e-6


@pytest.mark.parametrize("zeros", [True, False])
@on_ranks(2)
def test_module_used_twice_is_exact_with_sync_gathered(zeros):
    model = make_net_without_router()
    if not zeros:  # FSDP2 then makes no zeros for unused parameters, as before torch 2.15
        for parameter in model.parameters():
            parameter.grad_dtype = None
    accumulator = Accumulator(*fully_sharded()(model, 0.0), sync="gathered")
    layouts = [[[2, 1], [3]], [[1], [2, 2, 1]], [[2, 1], []]]
    loss_fn = lambda model, batch: (model(batch["x"]) - model(-batch["x"])).square().mean()  # noqa: E731
    assert max(gradients_off(model, accumulator, layouts, loss_fn=loss_fn)) <= 1e-10


@on_ranks(2)
def test_models_state_is_refused_while_uneven_ranks_run_forwards_of_their_own():
    model, _, accumulator = make("gathered")
    for batch in (window := accumulator.window(own([[2, 2, 2, 2], [2, 2]]))):
        window.backward(sample_loss(model, batch))
        assert "state_dict() of the model in mid-window with sync='gathered'" in refused(model.state_dict)
        break
    window.discard()
    model.state_dict()


@pytest.mark.parametrize("factors", [[7.0] * 3, [5.0]], ids=["on each module", "on one module"])
@on_ranks(2)
def test_divide_factors_leave_the_gradient_exact(factors):
    model, _, accumulator = make()
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module, factor in zip(modules, factors, strict=False):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    (wrong,) = gradients_off(model, accumulator, [EVEN], loss_fn=sample_loss)
    assert wrong <= 1e-10


BF16 = torch.bfloat16
CASTS_UP = has("torch", "2.15")  # bf16 gradients add up in float32


PRECISIONS = [
    *((BF16, torch.float32, sync, torch.float32, False) for sync in SHARDED),
    (BF16, None, "last", torch.float32, not CASTS_UP),
    (None, None, "last", BF16, True),
]


@pytest.mark.parametrize(("param_dtype", "reduce_dtype", "sync", "dtype", "warns"), PRECISIONS)
@on_ranks(2)
def test_mixed_precision_adds_up_in_reduce_dtype_or_warns_on_rank_0(param_dtype, reduce_dtype, sync, dtype, warns):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    plain = make_net_without_router().to(dtype).double()
    with warned() as texts:
        model, optimizer = fully_sharded(mp_policy=policy)(make_net_without_router().to(dtype), 0.0)
        accumulator = Accumulator(model, optimizer, sync=sync)
    assert ["reduce_dtype=torch.float32" in text for text in texts] == [True] * (warns and dist.get_rank() == 0)
    layout = [[1] * 64] * 2
    run_window(accumulator.window(own(layout, dtype=torch.float32)), lambda x: model(x.to(dtype)).float())
    if not warns:  # the error of bfloat16 gradients; a sum in bfloat16 has several times that
        assert error(gradient(model), gradient_of(plain, everything(layout, dtype=torch.float32))) <= 6e-3
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_reduced_gradient_that_is_changed_and_one_cleared_after_the_loop_are_refused():
    model, _, accumulator = make("every", lr=0.1)
    # No version of a DTensor counts the product.
    for change in (model.zero_grad, lambda: next(model.parameters()).grad.mul_(0.5)):
        window = accumulator.window(own(EVEN))
        said = refused(lambda: [(window.backward(loss_of(model, one)), change()) for one in window])  # noqa: B023
        assert "gradients were cleared or changed in mid-window" in said
    model, optimizer, accumulator = make("gathered", lr=0.1)
    window = run_window(accumulator.window(own([[2, 1, 3], [2, 1]])), model)
    optimizer.zero_grad()
    assert "gradients were cleared between the window's loop and its step()" in refused(window.step)
    model, _ = fully_sharded(shape=(2, 1))(make_net_without_router(), 0.0)
    window, other = [Accumulator(model, sync="replicas").window(own(EVEN)) for _ in range(2)]
    with warned():
        said = refused(lambda: [(window.backward(loss_of(model, one)), other.begin()) for one in window])
    assert "discarded in mid-window, as by another Accumulator's window; step one before" in said


@pytest.mark.parametrize("how", ["reduced", "unsharded", "cleared"])
@on_ranks(2)
def test_callers_gradients_from_before_the_window_are_cleared(how):
    model, optimizer, accumulator = make()
    model.set_requires_gradient_sync(how == "reduced")
    loss_of(model, make_batch(2, seed=1)).backward()
    if how == "cleared":
        optimizer.zero_grad()  # it does not reach unsharded gradients
    model.set_requires_gradient_sync(True)
    with warned() as texts:
        (wrong,) = gradients_off(model, accumulator, [EVEN])
    assert wrong <= 1e-10
    assert sum("gradients that stood before" in text for text in texts) == (dist.get_rank() == 0)


@pytest.mark.parametrize("sync", ["last", "gathered"])
@on_ranks(2)
def test_steps_by_hand_are_those_of_fsdp2_after_windows_that_end_or_are_left(sync):
    """The average of the ranks, reduced once, and parameters that are parts again after each forward."""
    model, _, accumulator = make(sync)
    for index in range(2):
        for batch in (window := accumulator.window(own(EVEN))):
            window.backward(loss_of(model, batch))
            if index:
                break
        window.discard()
        with Counting() as count:
            loss_of(model, own([[2], [2]])[0]).backward()
        assert tally(count.take()) == {GATHER: 5, REDUCE: 3}
        assert error(gradient(model), gradient_of(make_net_without_router(), everything([[2], [2]]))) <= 1e-10
        model.zero_grad()


WAYS = ["evaluation before step()", "kept after backward", "kept after forward", "unshard()", "step() fails", "skipped"]


@pytest.mark.parametrize("how", WAYS)
@on_ranks(4)
def test_weights_gathered_before_a_step_are_not_used_after_it(how):
    """By what happened between a last backward and its step."""
    lr, layout, failed = 0.5, [[2, 1]] * 4, []
    model, optimizer = fully_sharded(reshard_after_forward=2)(make_net_without_router(), lr)
    accumulator = Accumulator(model, optimizer, on_nonfinite="skip")

    def fail(*_: Any) -> None:
        if "fails" in how and not failed:
            failed.append(how)
            raise KeyError(how)

    def evaluate() -> None:
        with torch.no_grad():
            loss_of(model, own(layout)[0])

    optimizer.register_step_post_hook(fail)
    between = {"evaluation before step()": evaluate, "step() fails": evaluate, "unshard()": model.unshard}
    for index in range(3):
        if how == "skipped":
            window = accumulator.window(own(layout, 7))
            run_window(window, model, lambda *given: loss_of(*given) * float("nan")).step()
        window, whole = accumulator.window(own(layout, index)), everything(layout, index)
        if how.startswith("kept"):
            getattr(model, f"set_reshard_after_{how.split()[-1]}")(False)
        looks = {"between": between.get(how, lambda: None), "lr": lr}
        with contextlib.suppress(KeyError):
            assert max(step_off(model, window, make_net_without_router(), whole, **looks)) <= 1e-10
