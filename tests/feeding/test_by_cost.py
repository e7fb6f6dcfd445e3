"""Micro-batches by cost: grouped rows, trimmed padding, sizes learned in tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from distaccum import Accumulator, ByCost, count_samples, count_tokens
from distaccum.feeding import trim_padding
from tests.runs.test_update import Limited
from tests.support.problems import IGNORED, make_net_without_router
from tests.support.windows import error, gradient, gradient_of, run_window, warned

COST = count_tokens("mask", ignore_index=0)
WIDTH = 12


def make_text(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Rows of these lengths, padded to one width, with a label for each token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    x = torch.randn(len(lengths), WIDTH, 5, generator=generator, dtype=torch.float64) * mask[..., None]
    labels = torch.randint(0, 4, mask.shape, generator=generator).masked_fill(mask == 0, IGNORED)
    return {"x": x, "mask": mask, "labels": labels}


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch["x"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def exact(batch: Any) -> Tensor:
    return gradient_of(make_net_without_router(), batch, loss_of)


LENGTHS = [3, 12, 1, 5, 2, 2, 7, 1, 4]


def make_accumulator(net: nn.Module, **options: Any) -> Accumulator:
    of_cost = {name: options.pop(name) for name in ("most", "cost", "trim") & options.keys()}
    by_cost = ByCost(**{"most": 12, "cost": COST, **of_cost})
    options = {"micro_batch_size": by_cost, "count": count_tokens("labels"), **options}
    return Accumulator(net, SGD(net.parameters(), lr=0.0), **options)


@pytest.mark.parametrize("trim", [None, trim_padding("mask"), trim_padding("mask", multiple_of=4)])
def test_split_by_cost_is_exact(trim):
    batch, net = make_text(LENGTHS), make_net_without_router()
    window = make_accumulator(net, trim=trim).split(batch)
    shapes = []
    for one in window:
        shapes.append((len(one["x"]), one["x"].shape[1]))
        window.backward(loss_of(net, one))
    assert error(gradient(net), exact(batch)) <= 1e-12
    assert window.step().counts == {"tokens": sum(LENGTHS)}
    assert [rows for rows, _ in shapes] == [1, 1, 2, 1, 4]
    if trim is None:
        assert {width for _, width in shapes} == {WIDTH}
    else:
        assert all(rows * width <= 16 for rows, width in shapes)


def test_each_batch_of_a_loader_is_an_update_and_is_cut():
    """One without rows is a window without micro-batches, and does not end the epoch."""
    net, batches = make_net_without_router(), [make_text(rows, seed=1) for rows in (LENGTHS, [], [2, 2])]
    accumulator, numbers = make_accumulator(net), []
    for window, batch in zip(accumulator.windows(batches), batches, strict=True):
        run_window(window, net, loss_of)
        assert not len(window) or error(gradient(net), exact(batch)) <= 1e-12
        numbers.append(window.step().micro_batches)
    assert numbers == [5, 0, 1]


def test_cost_may_be_a_number_for_each_row_or_of_each():
    for read in (lambda mask: mask.sum(1), lambda mask: int(mask.sum()), torch.sum):
        cost = lambda batch, read=read: read(batch["mask"])  # noqa: E731
        window = make_accumulator(make_net_without_router(), cost=cost).split(make_text(LENGTHS))
        assert len(window) == 5
        window.discard()


def test_row_over_the_limit_is_alone_with_one_warning():
    net = make_net_without_router()
    accumulator = make_accumulator(net, most=6)
    with warned() as texts:
        for _ in range(2):
            window = accumulator.split(make_text(LENGTHS))
            for one in window:
                assert COST(one) <= 6 or len(one["x"]) == 1
                window.backward(loss_of(net, one))
            window.step()
    assert ["a row costs 12, more than the 6 of ByCost" in text for text in texts] == [True]


def test_auto_learns_in_cost_and_ends_at_one_row():
    net = make_net_without_router()

    def loss_fn(batch: Any) -> Tensor:
        if batch["x"].shape[0] * batch["x"].shape[1] > 24:
            raise torch.OutOfMemoryError("none left")
        return loss_of(net, batch)

    accumulator = make_accumulator(net, most="auto", trim=trim_padding("mask"))
    update = accumulator.update(make_text(LENGTHS), loss_fn)
    assert update.micro_batches == 3  # 108 in whole, then 54, 27, and 14 where rows of 27 did not fit
    again = accumulator.update(make_text([2] * 6), loss_fn)
    assert again.micro_batches == 1
    with pytest.raises(Exception, match="does not fit into the memory"):
        make_accumulator(net, most="auto").update(make_text([9, 12]), Limited(net, 0))


def test_contrast_keeps_the_order_of_rows():
    net = make_net_without_router()
    batch = make_text(LENGTHS)
    seen: list[Tensor] = []

    def loss_fn(found: Tensor) -> Tensor:
        seen.append(found.detach())
        return (found @ found.T).square().mean()

    encode = lambda one: net(one["x"]).mean(1)  # noqa: E731
    update = make_accumulator(net, count=count_samples).contrast(batch, encode, loss_fn)
    assert torch.allclose(seen[0], encode(batch).detach(), atol=1e-12) and update.micro_batches > 4


def test_two_sizes_and_costs_that_are_none_are_refused():
    net = make_net_without_router()
    for options, said in (({"batch_size": 4}, "leave batch_size out"), ({"steps": 4}, "give one or the other")):
        with pytest.raises(ValueError, match=said):
            make_accumulator(net, **options)
    for options in ({"cost": None}, {"trim": "mask"}, {"most": 2.5}, {"most": None}):
        with pytest.raises(TypeError):
            make_accumulator(net, **options)
    for cost in (lambda batch: [1.5] * len(batch["x"]), lambda batch: [1, 2], lambda batch: [-1] * len(batch["x"])):
        with pytest.raises(ValueError, match="cost gave"):
            make_accumulator(net, cost=cost).split(make_text(LENGTHS))


def test_padding_is_trimmed_without_a_copy():
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]])
    texts = {"input_ids": mask * 7, "mask": mask, "text": ["a", "b"]}
    batch = {**texts, "weights": torch.ones(2), "wide": torch.ones(2, 6, 3)}
    trimmed = trim_padding("mask")(batch)
    assert trimmed["input_ids"].tolist() == [[0, 0, 7, 7], [0, 7, 7, 0]] and trimmed["wide"].shape == (2, 4, 3)
    assert trimmed["text"] == ["a", "b"] and trimmed["weights"].shape == (2,)
    assert trimmed["input_ids"].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()
    for multiple, width in ((3, 6), (4, 4), (8, 6)):
        assert trim_padding("mask", multiple_of=multiple)(batch)["mask"].shape == (2, width)
    with pytest.raises(TypeError, match="name it"):
        trim_padding()(batch)
