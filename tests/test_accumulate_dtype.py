"""`WideSums`: low-precision gradients are summed in float32 and rounded once.

The gradients are the data themselves: multiples of 1/16 that bfloat16 and float16 represent. Their float32 sum has no
rounding, so the expected result is known to the last bit.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import KINDS
from problems import CASES, big_batch, error, gradient, make_net, micro_batches_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from distaccum import Accumulator, DistaccumError
from distaccum.extensions import WideSums

SIZE = 64
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


class Linear(nn.Module):
    """Each micro-batch uses `always`; micro-batches of more than one row also use `sometimes`."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.always = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        self.sometimes = nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, rows):
        score = (self.always.float() * rows[0]).sum()
        return score + (self.sometimes.float() * rows[1]).sum() if len(rows) > 1 else score


class Alone(nn.Module):
    """One weight, which every micro-batch uses."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.always = nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, rows):
        return (self.always.float() * rows[0]).sum()


def data(number, rank=0, rows=lambda i: 1):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(1, 24, (rows(i), SIZE), generator=generator) / 16.0 for i in range(number)]


def accumulate(model, batches, **options):
    accumulator = Accumulator(
        model,
        SGD(model.parameters(), lr=0.25),
        reduction="sum",
        extensions=[WideSums(torch.float32)],
        **{"steps": 4, **options},
    )
    return accumulator, accumulator.window(batches)


def run(window, model):
    for rows in window:
        window.backward(model(rows))
    return window


def sums(batches):
    """The exact sums for `always` and `sometimes`."""
    first = torch.stack([rows[0] for rows in batches]).double().sum(0)
    others = [rows[1] for rows in batches if len(rows) > 1]
    return first, torch.stack(others).double().sum(0) if others else None


@LOW
def test_float32_sum_is_rounded_once(dtype):
    model, batches = Linear(dtype), data(200, rows=lambda i: 1 + i % 2)
    _, window = accumulate(model, batches)
    run(window, model)
    for parameter, exact in zip((model.always, model.sometimes), sums(batches), strict=True):
        assert parameter.grad.dtype == dtype
        assert torch.equal(parameter.grad, exact.to(dtype))
    before = model.always.detach().clone()
    window.step()
    assert torch.equal(model.always, before - 0.25 * sums(batches)[0].to(dtype))
    assert model.always.grad is None and model.sometimes.grad is None

    naive = Linear(dtype)
    for rows in batches:
        naive(rows).backward()
    assert error(naive.always.grad, sums(batches)[0]) > 1e-3, "a naive sum must be wrong, or this test shows nothing"


def test_gradients_add_up_in_the_parameters_dtype_by_default():
    model, batches = Linear(), data(200)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.25), reduction="sum", steps=1)
    run(accumulator.window(batches), model)
    assert error(model.always.grad, sums(batches)[0]) > 1e-3


def test_parameter_unused_by_the_last_micro_batch_keeps_its_sum():
    model, batches = Linear(), data(5, rows=lambda i: 1 + (i < 2))
    _, window = accumulate(model, batches)
    run(window, model)
    assert torch.equal(model.sometimes.grad, sums(batches)[1].to(torch.bfloat16))


def test_parameter_unused_by_all_micro_batches_has_no_gradient():
    model = Linear()
    _, window = accumulate(model, data(3))
    run(window, model)
    assert model.sometimes.grad is None


def test_gradients_are_freed_between_micro_steps():
    model = Linear()
    _, window = accumulate(model, data(3, rows=lambda i: 2))
    for rows in window:
        window.backward(model(rows))
        assert model.always.grad is None
    assert model.always.grad is not None


def test_abandoned_window_leaves_no_sum_behind():
    model, batches = Linear(), data(6, rows=lambda i: 2)
    accumulator, window = accumulate(model, batches)
    for i, rows in enumerate(window):
        window.backward(model(rows))
        if i == 3:
            break
    window = run(accumulator.window(batches[:3]), model)
    assert torch.equal(model.always.grad, sums(batches[:3])[0].to(torch.bfloat16))


def test_backward_outside_of_windows_gives_plain_gradients():
    model, batches = Linear(), data(3)
    accumulator, window = accumulate(model, batches)
    model(batches[0]).backward()
    assert torch.equal(model.always.grad, batches[0][0].bfloat16())
    model.zero_grad()
    run(window, model).step()
    model(batches[0]).backward()
    assert torch.equal(model.always.grad, batches[0][0].bfloat16())
    del accumulator, window
    model(batches[0]).backward()
    assert torch.equal(model.always.grad, 2 * batches[0][0].bfloat16())


def test_zero_grad_in_mid_window_loses_nothing():
    """Between micro-steps there are no gradients to clear."""
    model, batches = Linear(), data(4)
    _, window = accumulate(model, batches)
    for rows in window:
        window.backward(model(rows))
        if len(rows) and window.num_done < 4:
            model.zero_grad()
    assert torch.equal(model.always.grad, sums(batches)[0].to(torch.bfloat16))


def test_backward_by_the_caller_in_mid_window_is_refused():
    model, batches = Linear(), data(4)
    _, window = accumulate(model, batches)
    with pytest.raises(DistaccumError, match="changed in mid-window"):
        for rows in window:
            window.backward(model(rows))
            model(rows).backward()


def test_parts_and_heads_add_up_in_float32():
    for name in ("parts", "heads"):
        model, batches = Linear(), data(3, rows=lambda i: 2)
        _, window = accumulate(model, batches)
        for rows in window:
            if name == "parts":
                for part in window.parts([0, 1]):
                    window.backward((list(model.parameters())[part].float() * rows[part]).sum())
            else:
                features = model.always.float() * 1
                for _, given in window.heads(features, [0]):
                    window.backward((given * rows[0]).sum() + (model.sometimes.float() * rows[1]).sum())
        for parameter, exact in zip(model.parameters(), sums(batches), strict=True):
            assert torch.equal(parameter.grad, exact.to(torch.bfloat16)), name


def test_sparse_gradients_add_up_in_float32():
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 4, sparse=True, dtype=torch.bfloat16)
    weights = data(100)
    accumulator = Accumulator(
        embedding, SGD(embedding.parameters(), lr=1.0), reduction="sum", steps=1, extensions=[WideSums(torch.float32)]
    )
    window = accumulator.window([w[0, :3] for w in weights])
    for factors in window:
        window.backward((embedding(torch.tensor([1, 1, 5])).float().sum(1) * factors).sum())
    exact = torch.zeros(8, dtype=torch.double)
    for w in weights:
        exact[1] += w[0, :2].double().sum()
        exact[5] += w[0, 2].double()
    assert embedding.weight.grad.is_sparse and embedding.weight.grad.dtype == torch.bfloat16
    assert torch.equal(embedding.weight.grad.to_dense()[:, 0], exact.to(torch.bfloat16))


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(first):
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    accumulator = Accumulator(embedding, SGD(embedding.parameters(), lr=1.0), extensions=[WideSums(torch.float32)])
    x = torch.tensor([[0, 1]])
    window = accumulator.window([x, x])
    for i, _ in enumerate(window):
        rows = embedding(x).float()
        dense = (i == 0) == (first == "dense")
        window.backward((rows @ embedding.weight.t().float()).mean() if dense else rows.mean())
    exact = copy.deepcopy(embedding).double()
    exact.weight = nn.Parameter(exact.weight.detach())
    rows = nn.functional.embedding(x, exact.weight)
    ((rows @ exact.weight.t()).mean() / 2 + rows.mean() / 2).backward()
    assert error(embedding.weight.grad, exact.weight.grad) <= 0.01


def test_window_of_a_second_accumulator_in_mid_window_takes_nothing():
    model, batches = Linear(), data(3)
    _, one = accumulate(model, batches)
    for rows in one:
        one.backward(model(rows))
        _, other = accumulate(model, batches)
        assert torch.equal(run(other, model).counts and model.always.grad, sums(batches)[0].to(torch.bfloat16))
        other.discard()
    assert torch.equal(model.always.grad, sums(batches)[0].to(torch.bfloat16))


def test_weight_in_many_reentrant_checkpoints_is_rounded_once():
    from torch.utils.checkpoint import checkpoint

    model = Alone()
    _, window = accumulate(model, [10.0, 0.1], count=lambda _: 1)
    for value in window:
        parts = [
            checkpoint(lambda x, value=value: (model.always.float() * value * x).sum(), x, use_reentrant=True)
            for x in [torch.ones(SIZE, requires_grad=True) for _ in range(100)]
        ]
        window.backward(torch.stack(parts).sum())
    assert model.always.grad[0].item() == pytest.approx(1010, rel=2**-8)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_optimizer_clips_and_steps_after_sums_in_float32(optimizer):
    model, batches = Linear(), data(8, rows=lambda i: 2)
    accumulator = Accumulator(
        model, optimizer(model.parameters(), lr=0.25), steps=8, max_norm=1.0, extensions=[WideSums(torch.float32)]
    )
    for window in accumulator.windows(batches):
        assert run(window, model).step().grad_norm > 0


def test_float32_parameter_beside_a_bfloat16_one_keeps_its_gradient():
    model = Linear()
    model.sometimes = nn.Parameter(torch.zeros(SIZE))
    _, window = accumulate(model, data(3, rows=lambda i: 2))
    for rows in window:
        window.backward(model(rows))
        assert model.sometimes.grad is not None and model.sometimes.grad.dtype == torch.float32


def test_parameter_unfrozen_later_adds_up_in_float32():
    model, batches = Linear(), data(200, rows=lambda i: 2)
    model.sometimes.requires_grad_(False)
    accumulator, window = accumulate(model, batches)
    run(window, model).step()
    model.sometimes.requires_grad_(True)
    run(accumulator.window(batches), model)
    for parameter, exact in zip(model.parameters(), sums(batches), strict=True):
        assert torch.equal(parameter.grad, exact.to(torch.bfloat16))


def test_update_and_check_run_with_wide_sums():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto", extensions=[WideSums(torch.float32)]
    )
    batch = torch.randn(16, 4, dtype=torch.bfloat16)
    sizes = []

    def loss_fn(x):
        sizes.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(x).float().square().mean()

    accumulator.update(batch, loss_fn)
    assert sizes == [16, 8, 4, 4, 4, 4]
    assert accumulator.check(batch[:4], lambda x: model(x).float().square().mean()).equivalent


@pytest.mark.parametrize("value", [torch.bfloat16, torch.int32, "float32"])
def test_dtype_other_than_float32_or_float64_is_refused(value):
    model = Linear()
    with pytest.raises(ValueError, match=r"WideSums\(.*expected torch.float32 or torch.float64"):
        Accumulator(model, steps=1, extensions=[WideSums(value)])


def test_float32_parameters_can_add_up_in_float64():
    model = Alone(torch.float32)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=1.0), reduction="sum", steps=1, extensions=[WideSums(torch.float64)]
    )
    batches = [torch.full((1, SIZE), value) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    run(accumulator.window(batches), model)
    assert torch.equal(model.always.grad, torch.full((SIZE,), 1 + 3 * 2.0**-24, dtype=torch.float64).float())


# Ranks

FORMS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


def rounded(parts):
    """The average of the ranks' exact sums as DDP forms it, in the parameters' dtype."""
    return sum(part.to(torch.bfloat16).float() for part in parts).to(torch.bfloat16)


def ddp_windows(form, lengths, windows, with_unused):
    """For each window on this rank: whether the gradient is right, the number of reductions, and its dtype."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Linear() if with_unused else Alone()
    ddp = DistributedDataParallel(model, **FORMS[form])
    accumulator, _ = accumulate(ddp, [])
    seen = []
    for index in range(windows):
        # The last micro-batches do not use `sometimes`, and rank 1 never uses it.
        rows = (lambda r: lambda i: 1 + (i < 2 and r == 0)) if with_unused else (lambda r: lambda i: 1)
        everyone = [data(lengths[r], rank=10 * index + r, rows=rows(r)) for r in range(world)]
        with Counting() as count:
            window = run(accumulator.window(everyone[rank]), ddp)
            large = [size for _, size in count.take() if size >= SIZE]
        exact = [sums(one) if one else (torch.zeros(SIZE), None) for one in everyone]
        firsts = rounded([first.double() for first, _ in exact])
        right = torch.equal(model.always.grad, firsts)
        if with_unused:
            others = [torch.zeros(SIZE).double() if other is None else other for _, other in exact]
            right &= torch.equal(model.sometimes.grad, rounded(others))
        seen.append((right, len(large), model.always.grad.dtype))
        assert window.step().stepped
    return seen


@pytest.mark.parametrize("form", [form for form in FORMS if "unused" not in form])
@pytest.mark.parametrize("lengths", [(50, 50), (50, 30)], ids=["even", "uneven"])
def test_ddp_reduces_the_rounded_sum_once(ranks, form, lengths):
    for seen in ranks(2).run(ddp_windows, form, lengths, 3, False):
        first = 1 if form == "static" else 0  # a static graph's first backward is reduced and rounded alone
        assert [right for right, *_ in seen[first:]] == [True] * (3 - first)
        assert [large for _, large, _ in seen[1:]] == [1, 1]
        assert seen[0][2] == torch.bfloat16


def reductions_of_each_backward(form):
    """The reductions of each backward of the second window, and of its end."""
    ddp = DistributedDataParallel(Alone(), **FORMS[form])
    accumulator, _ = accumulate(ddp, [])
    run(accumulator.window(data(3)), ddp).step()
    large = []
    with Counting() as count:
        for batch in (window := accumulator.window(data(3))):
            count.take()
            window.backward(ddp(batch).sum())
            large.append(sum(size >= SIZE for _, size in count.take()))
        return [*large, sum(size >= SIZE for _, size in count.take())]


@pytest.mark.parametrize("form", FORMS)
def test_ddp_reduces_the_sum_after_the_last_backward(ranks, form):
    for large in ranks(2).run(reductions_of_each_backward, form):
        assert large == [0, 0, 0, 1]


@pytest.mark.parametrize("form", ["unused", "unused, views"])
def test_parameter_used_by_one_rank_adds_up_in_float32(ranks, form):
    for seen in ranks(2).run(ddp_windows, form, (40, 40), 3, True):
        assert [right for right, *_ in seen] == [True] * 3


@pytest.mark.parametrize("form", ["plain", "views", "unused"])
def test_window_with_a_dry_rank_averages_the_sums(ranks, form):
    for seen in ranks(2).run(ddp_windows, form, (50, 0), 2, False):
        assert [right for right, *_ in seen] == [True] * 2


class GivesNone(torch.autograd.Function):
    """A custom backward that returns no gradient for a weight that took part."""

    @staticmethod
    def forward(ctx, weight, row, gives):
        ctx.row = row if gives else None
        return (weight.float() * row).sum() if gives else row.new_zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, gradient):
        return None if ctx.row is None else (gradient * ctx.row).to(torch.bfloat16), None, None


class Undefined(Linear):
    def forward(self, rows, gives):
        return GivesNone.apply(self.always, rows[0], gives) + (self.sometimes.float() * rows[0]).sum()


def without_gradients(form, silent, sync):
    """Runs windows in which `always` gets no gradient in the last backward of the ranks in `silent`."""
    rank = dist.get_rank()
    model = Undefined()
    ddp = DistributedDataParallel(model, **FORMS[form])
    accumulator, _ = accumulate(ddp, [], sync=sync)
    right = []
    for _ in range(3):
        # Small whole numbers: their sums are exact in bfloat16.
        everyone = [[torch.full((1, SIZE), float(n)) for n in numbers] for numbers in ((1, 2, 4), (8, 3, 5))]
        for i, rows in enumerate(window := accumulator.window(everyone[rank])):
            window.backward(ddp(rows, gives=i < 2 or rank not in silent))
        left_out = sum(float(everyone[r][-1][0, 0]) for r in silent)
        right.append(torch.equal(model.always.grad, torch.full_like(model.always, 23.0 - left_out)))
        right.append(torch.equal(model.sometimes.grad, torch.full_like(model.sometimes, 23.0)))
        window.step()
    return right


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("form", FORMS)
def test_weight_without_a_gradient_in_the_last_backward_is_reduced(ranks, form, sync):
    for silent in [(0,), (0, 1)]:
        assert ranks(2).run(without_gradients, form, silent, sync) == [[True] * 6] * 2, silent


LAYOUTS = [
    [[[3, 3, 3]] * 2, [[2, 2]] * 2],
    [[[1, 6, 2], [5, 1, 3]], [[7, 1], [3, 3]]],
    [[[3, 3, 2], [4, 1]], [[2], [1, 2, 3, 4]]],
    [[[2, 3], [4, 1]], [[3, 2, 1, 1], []], [[], [5]]],
]


def law(form, case, layouts, sync):
    """Error of each window's gradient: float32 gradients summed in float64."""
    loss_fn, how, reduction, count = CASES[case]
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(make_net(torch.float32), find_unused_parameters=True, **FORMS[form])
    accumulator = Accumulator(
        ddp,
        SGD(ddp.parameters(), lr=0.0),
        reduction=reduction,
        count=count,
        extensions=[WideSums(torch.float64)],
        sync=sync,
    )
    errors = []
    for index, layout in enumerate(layouts):
        window = accumulator.window(micro_batches_of(layout, index, rank, torch.float32))
        for micro_batch in window:
            window.backward(loss_fn(ddp, micro_batch, how))
        everything = [b for r in range(world) for b in micro_batches_of(layout, index, r, torch.float32)]
        errors.append(error(gradient(ddp), big_batch(case, everything)[1]))
        window.step()
    return errors


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("case", ["samples mean", "tokens sum_to_mean"])
@pytest.mark.parametrize("form", ["plain", "views"])
def test_window_summed_in_float64_equals_one_big_batch(ranks, form, case, sync):
    for layouts in LAYOUTS:
        for errors in ranks(2).run(law, form, case, layouts, sync):
            assert max(errors) <= 1e-6, layouts


def every(form):
    """Each micro-step's gradient is reduced alone and summed in float32: exact if the ranks' mean is exact."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Alone(), **FORMS[form])
    accumulator, _ = accumulate(ddp, [], sync="every")
    right = []
    for index in range(2):
        everyone = [data(50, rank=7 * index) for r in range(2)]  # equal on both ranks, so reduced without rounding
        window = run(accumulator.window(everyone[rank]), ddp)
        exact = sum(sums(one)[0] for one in everyone)
        right.append(error(ddp.module.always.grad, exact))
        window.step()
    return right


@pytest.mark.parametrize("form", ["plain", "views", "static"])
def test_reductions_of_each_micro_step_add_up_in_float32(ranks, form):
    for errors in ranks(2).run(every, form):
        assert max(errors) <= 2.0**-8


def in_another_order(kind):
    """Error of gradients whose memory format under DDP differs from the parameter's."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).bfloat16()
    if kind == "channels last":
        net = net.to(memory_format=torch.channels_last)
    else:
        net[2].weight = nn.Parameter(net[2].weight.detach().t().contiguous().t())
    exact = copy.deepcopy(net).double()
    ddp = DistributedDataParallel(net)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=3, extensions=[WideSums(torch.float32)])
    generator = torch.Generator().manual_seed(1)
    everyone = [[torch.randn(2, 3, 6, 6, generator=generator).bfloat16() for _ in range(3)] for _ in range(2)]
    window = accumulator.window(everyone[rank])
    for x in window:
        window.backward(ddp(x).float().square().mean())
    exact(torch.cat([x for one in everyone for x in one]).double()).square().mean().backward()
    return error(gradient(net), gradient(exact))


@pytest.mark.parametrize("kind", ["channels last", "transposed"])
def test_parameters_in_another_memory_format_add_up_in_float32(ranks, kind):
    assert max(ranks(2).run(in_another_order, kind)) <= 0.02


def in_float32(_, bucket):
    """A communication hook that averages in float32, as a user may register it."""
    buffer = bucket.buffer()
    wide = buffer.float().div_(dist.get_world_size())
    work = dist.all_reduce(wide, async_op=True)
    return work.get_future().then(lambda _: buffer.copy_(wide))


HOOKS = {"float32": in_float32, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def with_hook(name, dtype, sync):
    """The gradients of windows with 5 micro-batches per rank, and with 3 and 2; the number of reductions of each."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Alone(dtype))
    ddp.register_comm_hook(None, HOOKS[name])
    low = dtype == torch.bfloat16
    accumulator = Accumulator(
        ddp,
        SGD(ddp.parameters(), lr=0.25),
        reduction="sum",
        sync=sync,
        extensions=[WideSums(torch.float32)] if low else [],
    )
    seen = []
    for lengths in ((5, 5), (5, 5), (3, 2)):
        everyone = [data(n, rank=r) for r, n in enumerate(lengths)]
        with Counting() as count:
            run(window := accumulator.window(everyone[rank]), ddp)
            large = sum(size >= SIZE for _, size in count.take())
        parts = [sums(one)[0] for one in everyone]
        seen.append((error(ddp.module.always.grad, sum(parts)), large))
        window.step()
    return seen


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.bfloat16), ("bf16", torch.float32), ("fp16", torch.float32)]
)
def test_communication_hook_reduces_in_its_own_dtype(ranks, name, dtype, sync):
    # Multiples of 1/32 below 16: exact in float16, and exact to 8 bits in bfloat16.
    for seen in ranks(2).run(with_hook, name, dtype, sync):
        assert max(wrong for wrong, _ in seen) <= (0 if name == "fp16" else 2.0**-8)
        is_wide = name == "float32"  # with WideSums, which reduces once after the last backward, whatever `sync`
        assert [large for _, large in seen] == ([1, 1, 1] if sync == "last" or is_wide else [5, 5, 2])


def refused(kind):
    model, _ = KINDS[kind].wrap(make_net(torch.float32), 0.1)
    try:
        Accumulator(model, steps=2, extensions=[WideSums(torch.float32)])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "ZeRO 1"])
def test_engine_that_adds_up_by_itself_says_where_its_dtype_is_set(ranks, kind):
    for message in ranks(2).run(refused, kind):
        assert "which adds gradients up by itself" in message and "reduce_dtype=torch.float32" in message


def test_overflow_of_the_rounded_sum_skips_the_update():
    model = Alone(torch.float16)
    _, window = accumulate(model, [torch.full((1, SIZE), 60000.0)] * 2, on_nonfinite="skip")
    update = run(window, model).step()
    assert not update.stepped and "not finite" in update.reason
    assert math.isfinite(update.loss)
