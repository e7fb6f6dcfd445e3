"""`WideSums` adds up in float32 and rounds once. Gradients here are multiples of 1/16, so sums are known exactly."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator
from distaccum.extensions import WideSums
from tests.support.counting import Counting
from tests.support.engines import FORMS, KINDS
from tests.support.problems import make_net
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, refused, run_window

SIZE, BF16 = 64, torch.bfloat16


class Linear(nn.Module):
    """Each micro-batch uses `always`; micro-batches of more than one row also use `sometimes`, if there is one."""

    def __init__(self, dtype=BF16, alone=False):
        super().__init__()
        self.always = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        self.sometimes = None if alone else nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, rows):
        score = (self.always.float() * rows[0]).sum()
        return score + (self.sometimes.float() * rows[1]).sum() if len(rows) > 1 else score


def data(number, rank=0, rows=lambda i: 1):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(1, 24, (rows(i), SIZE), generator=generator) / 16.0 for i in range(number)]


def two_rows(number):
    return data(number, rows=lambda i: 2)


def summing(model, **options):
    options = {"steps": 4, "reduction": "sum", "extensions": [WideSums(torch.float32)], **options}
    return accumulating(model, 0.25, **options)[1]


def sums(batches):
    """The exact sums for `always` and `sometimes`."""
    others = [rows[1] for rows in batches if len(rows) > 1]
    return [torch.stack(part).double().sum(0) if part else None for part in ([rows[0] for rows in batches], others)]


def assert_rounded_once(model, batches):
    for parameter, exact in zip((model.always, model.sometimes), sums(batches), strict=True):
        if exact is None:
            assert parameter is None or parameter.grad is None
        else:
            assert torch.equal(parameter.grad, exact.to(parameter.dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_float32_sum_is_rounded_once(dtype):
    model, batches = Linear(dtype), data(200, rows=lambda i: 1 + i % 2)
    window = run_window(summing(model).window(batches), model, Linear.forward)
    assert_rounded_once(model, batches)
    before = model.always.detach().clone()
    window.step()
    assert torch.equal(model.always, before - 0.25 * sums(batches)[0].to(dtype))
    assert model.always.grad is None and model.sometimes.grad is None

    naive = Linear(dtype)
    run_window(summing(naive, extensions=[]).window(batches), naive, Linear.forward)
    assert error(naive.always.grad, sums(batches)[0]) > 1e-3, "a naive sum must be wrong, or this test shows nothing"


@pytest.mark.parametrize("uses", [2, 0])
def test_parameter_unused_by_the_last_or_all_micro_batches_keeps_its_sum_or_none(uses):
    model, batches = Linear(), data(5, rows=lambda i: 1 + (i < uses))
    run_window(summing(model).window(batches), model, Linear.forward)
    assert_rounded_once(model, batches)


def test_gradients_are_freed_between_micro_steps_but_those_of_float32():
    model, batches = Linear(), two_rows(4)
    model.sometimes = nn.Parameter(torch.zeros(SIZE))
    window = summing(model).window(batches)
    for rows in window:
        window.backward(model(rows))
        if window.num_done < 4:
            assert model.always.grad is None and model.sometimes.grad.dtype == torch.float32
    assert_rounded_once(model, batches)


@pytest.mark.parametrize("name", ["parts", "heads"])
def test_parts_and_heads_add_up_in_float32(name):
    model, batches = Linear(), two_rows(3)
    window = summing(model).window(batches)
    for rows in window:
        if name == "parts":
            for part in window.parts([0, 1]):
                window.backward((list(model.parameters())[part].float() * rows[part]).sum())
        else:
            for _, given in window.heads(model.always.float() * 1, [0]):
                window.backward((given * rows[0]).sum() + (model.sometimes.float() * rows[1]).sum())
    assert_rounded_once(model, batches)


def test_overflow_of_the_rounded_sum_skips_the_update():
    model = Linear(torch.float16, alone=True)
    window = summing(model, on_nonfinite="skip", max_norm=1.0).window([torch.full((1, SIZE), 60000.0)] * 2)
    update = run_window(window, model, Linear.forward).step()
    assert not update.stepped and "not finite" in update.reason
    assert math.isfinite(update.loss)


def rounded(parts):
    """The average of the ranks' exact sums as DDP forms it, in the parameters' dtype."""
    return sum(part.to(BF16).float() for part in parts).to(BF16)


def count_large(count):
    return sum(size >= SIZE for _, size in count.take())


WINDOWS = [
    *((form, (50, 30), False) for form in ("DDP", "DDP views", "DDP static")),
    *((form, (40, 40), True) for form in ("DDP find", "DDP find, views")),
    *((form, (50, 0), False) for form in ("DDP views", "DDP find")),
]


@pytest.mark.parametrize(("form", "lengths", "with_unused"), WINDOWS)
@on_ranks(2)
def test_ddp_reduces_the_rounded_sum_once(form, lengths, with_unused):
    rank, model = dist.get_rank(), Linear(alone=not with_unused)
    ddp = DistributedDataParallel(model, **FORMS[form])
    accumulator = summing(ddp)
    for index in range(3):
        # The last micro-batches do not use `sometimes`, and rank 1 never uses it.
        everyone = [
            data(n, rank=10 * index + r, rows=lambda i, r=r: 1 + (with_unused and i < 2 and r == 0))
            for r, n in enumerate(lengths)
        ]
        with Counting() as count:
            window, large = accumulator.window(everyone[rank]), []
            count.take()
            for rows in window:
                window.backward(ddp(rows))
                large.append(count_large(count))
            large.append(count_large(count))
        exact = [[torch.zeros(SIZE).double() if one is None else one for one in sums(mine)] for mine in everyone]
        parts = zip(*exact, strict=True)
        right = [torch.equal(p.grad, rounded(both)) for p, both in zip(model.parameters(), parts, strict=False)]
        # A static graph's first backward is reduced and rounded alone.
        assert all(right) or (form == "DDP static" and index == 0)
        assert index == 0 or 0 in lengths or large == [0] * lengths[rank] + [1], "after the last backward"
        assert window.step().stepped


@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "ZeRO 1"])
@on_ranks(2)
def test_engine_that_adds_up_by_itself_says_where_its_dtype_is_set(kind):
    model, _ = KINDS[kind].wrap(make_net(torch.float32), 0.1)
    message = refused(Accumulator, model, extensions=[WideSums(torch.float32)])
    assert "which adds gradients up by itself" in message and "reduce_dtype=torch.float32" in message
