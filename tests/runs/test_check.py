"""check(): compares the accumulated gradient with the one big batch's on the user's model, and names the causes."""

import copy
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, Report, count_samples, count_tokens
from tests.support.engines import wrapped
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, refused

Batch = dict[str, Tensor]


def make_batch(size: int = 11, seed: int = 1) -> Batch:
    """Rows of 5 tokens; the number of labels that count differs between rows, and a row's first label may count."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (size, 5), generator=generator)
    labels[torch.rand(size, 5, generator=generator) < 0.4] = -100
    labels[:, 4] = 1
    return {
        "x": torch.randn(size, 5, 3, generator=generator),
        "y": torch.randint(0, 4, (size,), generator=generator),
        "labels": labels,
    }


class Centred(nn.Module):
    """Batch normalisation that is no layer of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


class Attending(nn.Module):
    """Attention that drops by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 4, -1)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training)[:, 0]


class Counting(nn.Module):
    """Its output depends on the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.seen


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 8), *layers, nn.Tanh(), nn.Linear(8, 4))


def token_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def of_samples(model: nn.Module, batch: Batch, how: str = "mean") -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"], reduction=how)


def of_tokens(model: nn.Module, batch: Batch, how: str = "mean") -> Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction=how)


def shifted(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch.pop("x"))[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def in_float32(model: nn.Module, batch: Batch) -> Tensor:
    """A loss in float32 for every dtype of the model, as in Hugging Face's language models."""
    return cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["labels"].flatten())


def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
    outputs = normalize(model(batch["x"]), dim=1)
    return cross_entropy(outputs @ outputs.T / 0.2, torch.arange(len(outputs)))


def check(model: nn.Module, loss: Callable[..., Any], batch: Batch | None = None, **options: Any) -> Report:
    _, accumulator = accumulating(model, 1.0, **{"micro_batch_size": 5, **options})
    return accumulator.check(make_batch() if batch is None else batch, partial(loss, model))


def by_weight(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean(1) @ batch["y"].exp() / batch["y"].exp().sum()


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return of_samples(model, batch, "sum")


def two_losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"a": of_samples(model, batch), "b": of_samples(model, batch, "sum")}


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    return of_samples(model, batch) * (1 + torch.rand(()))


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    by_row = 1.0 + batch["y"].repeat_interleave(5)
    return (of_tokens(model, batch, "none") * by_row).sum() / by_row.sum()


TOKENS = count_tokens("labels")
SHIFTED = count_tokens("labels", shift=True)
BY_NAME = dict.fromkeys("ab", count_samples)
DROPOUTS = [nn.Dropout(0.2), nn.Dropout(0.3)]
ALONE = r".*the only cause; with this put aside the error is .*e-1\d$"
THREE = ["dropout: .* 3 .Dropout", "random: .*outside of dropout layers", "batchnorm: .* 2 .BatchNorm1d"]


RIGHT = [
    (net(), of_samples, {}),
    (net(), lambda m, b: {"loss": of_samples(m, b)}, {}),
    (net(), summed, {"reduction": "sum_to_mean"}),
    (token_net(), of_tokens, {"count": TOKENS}),
    (token_net(), shifted, {"count": SHIFTED}),
    (token_net(), lambda m, b: of_tokens(m, b, "sum"), {"count": TOKENS, "reduction": "sum_to_mean"}),
    (net(nn.BatchNorm1d(8)).eval(), of_samples, {}),
    (net(nn.LayerNorm(8), nn.GroupNorm(2, 8)), of_samples, {"micro_batch_size": 1}),
    (net().bfloat16(), lambda m, b: of_samples(m, {**b, "x": b["x"].to(m[1].weight.dtype)}), {}),
    (net(), of_samples, {"scaler": GradScaler("cpu", init_scale=64.0)}),
    (net(), two_losses, {"reduction": {"a": "mean", "b": "sum_to_mean"}, "count": {**BY_NAME, "b": TOKENS}}),
]


@pytest.mark.parametrize(("model", "loss", "options"), RIGHT)
def test_correct_setup_is_equivalent(model, loss, options):
    report = check(model, loss, **options)
    assert report.equivalent and not report.causes, report
    assert report.worst <= report.bound and report.dtype == "float64" and report.samples == 11
    assert sum(report.micro_batches) == -(-11 // options.get("micro_batch_size", 5))


WRONG = [
    (net(nn.BatchNorm1d(8)), of_samples, {}, ["batchnorm: .* 2 .BatchNorm1d"]),
    (net(Centred()), of_samples, {}, ["loss: .*samples depend on each other"]),
    (net(*DROPOUTS), of_samples, {}, ["dropout: .* 2, 3 .Dropout" + ALONE]),
    (net(nn.Dropout(0.2), Attending()), of_samples, {}, ["dropout: .* 2 .Dropout", "random: " + ALONE]),
    (net(Attending()), summed, {}, ["random: ", "reduction: "]),
    (net(nn.BatchNorm1d(8), *DROPOUTS), of_pairs, {}, ["dropout: ", "batchnorm: ", "loss: "]),
    (net(*DROPOUTS, Centred()), of_samples, {}, ["dropout: ", "loss: "]),
    (net(*DROPOUTS, Counting()), of_samples, {}, ["dropout: ", "random: "]),
    (net(*DROPOUTS), of_pairs, {}, ["dropout: ", "loss: "]),
    (net(*DROPOUTS), summed, {}, ["dropout: ", "reduction: "]),
    (net(*DROPOUTS), lambda m, b: of_samples(m, b) * (1 + random.random()), {}, ["dropout: ", "random: "]),
    (net(), lambda m, b: of_samples(m, b) * (1 + random.random()), {}, ["random: "]),
    (net(nn.BatchNorm1d(8), nn.Dropout(0.3)), noisy, {}, THREE),
    (net(Counting()), of_samples, {}, ["random: .*something is kept between calls"]),
    (net(), of_pairs, {}, ["loss: the loss is no sum or mean over samples"]),
    (net(), summed, {}, ["reduction: the criterion sums .* 'sum' or 'sum_to_mean'"]),
    (net(), of_samples, {"reduction": "sum"}, ["reduction: the criterion averages over samples .* say 'mean'"]),
    (net(), by_weight, {"reduction": "sum", "count": lambda b: b["y"].exp().sum()}, ["reduction: .* what count gave"]),
    (token_net(), of_tokens, {}, [r"count: .*the labels in 'labels' .*=count_tokens\('labels'\)"]),
    (token_net(), shifted, {"count": TOKENS}, [r"count: .*count=count_tokens\('labels', shift=True\)"]),
    (net(), of_samples, {"count": TOKENS}, ["count: the criterion averages over samples, .* count_samples"]),
    (net(), of_samples, {"count": lambda b: 7}, ["count: .* averages over samples, and count gave .7, 7, 7, 7. f"]),
    (net(), two_losses, {"count": BY_NAME}, ["reduction: the criterion of 'b' sums"]),
    (token_net(), weighted, {}, ["loss: .* or it is a mean by weights of its own, and count must return their s"]),
]


@pytest.mark.parametrize(("model", "loss", "options", "causes"), WRONG)
def test_report_names_each_cause(model, loss, options, causes):
    report = check(model, loss, **options)
    assert not report.equivalent and report.worst > report.bound
    assert len(report.causes) == len(causes), report
    text = "\n".join(report.causes)
    assert len(causes) == 1 or ALONE in causes[-1] or "put aside" not in text
    for cause in causes:
        assert re.search(cause, text), report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_in_float32_widens_the_bound(dtype):
    model = token_net().to(dtype)
    labels = torch.full((7, 12), -100)
    for row, number in enumerate([2, 3, 8, 4, 11, 6, 3]):  # 37 in all: float32 rounds these shares
        labels[row, :number] = 1
    batch = {"x": torch.randn(7, 12, 3, dtype=dtype), "labels": labels}
    report = check(model, in_float32, batch, micro_batch_size=3, count=TOKENS)
    assert report.equivalent and 1e-8 < report.worst < 1e-6 and report.bound == 1e-4, report
    assert report.dtype == "float64" and "computes in float32 in part" in report.notes[0]
    report = check(model, in_float32, batch, micro_batch_size=3)
    assert "count=count_tokens('labels')" in report.causes[0] and len(report.causes) == 1, report


@pytest.mark.parametrize("labels", [[0, -100], [0, 1, -100], [0, -100, 1, -100], [0, 1, 2, -100, 1], [0, -100] * 6])
def test_wrong_count_shows_in_few_samples_and_where_even_parts_keep_as_many_labels(labels):
    model = nn.Linear(6, 3)
    batch = {"x": torch.randn(len(labels), 6), "labels": torch.tensor(labels)}

    def checked(count: Any) -> Report:
        loss_fn = lambda model, part: cross_entropy(model(part["x"]), part["labels"])  # noqa: E731
        return check(model, loss_fn, batch, micro_batch_size=2, count=count)

    report = checked(count_samples)
    assert not report.equivalent and "count=count_tokens('labels')" in report.causes[0] and len(report.causes) == 1
    assert checked(TOKENS).equivalent
    if len(labels) > 4:  # parts of fewer samples keep one label each
        assert not checked(lambda part: 1).equivalent


def test_check_restores_model_gradients_and_random_numbers():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    model[3].eval()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0, momentum=0.9), micro_batch_size=5)
    of_samples(model, make_batch()).backward()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    modes, state, drawn = [m.training for m in model.modules()], torch.get_rng_state(), random.getstate()
    batch = make_batch()
    given = {key: one.clone() for key, one in batch.items()}
    report = accumulator.check(batch, lambda part: of_samples(model, part))
    assert [cause.split(":")[0] for cause in report.causes] == ["batchnorm"]
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert all(p.grad is g and torch.equal(g, v) for p, g, v in zip(model.parameters(), gradients, values, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == drawn
    assert all(torch.equal(batch[key], given[key]) for key in given)
    assert accumulator.index == 0 and not model[2]._forward_pre_hooks
    with pytest.warns(UserWarning, match="2 normalise each micro-batch"):  # check() has not used up the warning
        accumulator.split(batch)
    with pytest.raises(KeyError):
        accumulator.check(batch, lambda part: of_samples(model, part) + {}["a bug"])
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_loss_that_cannot_be_cast_is_checked_in_its_own_dtype():
    weight = torch.arange(1.0, 5.0)
    report = check(net(), lambda m, b: cross_entropy(m(b["x"]), b["y"], weight))
    assert not report.equivalent and report.dtype == "float32"  # a mean weighted by class
    assert "a mean by weights of its own" in report.causes[0]
    assert "not in float64: RuntimeError" in report.notes[0]


LAYERS = {"batchnorm": [nn.BatchNorm1d(8)], "dropout": DROPOUTS}
LOSSES = {"count": of_tokens, "loss": of_pairs, "reduction": summed}


@pytest.mark.parametrize("kind", ["DDP", "DDP views", "FSDP2, root only", "FSDP1, root only"])
@on_ranks(2)
def test_ranks_report_the_same_verdict(kind):
    for cause in ("", *LAYERS, *LOSSES):
        made = token_net() if cause == "count" else net(*copy.deepcopy(LAYERS.get(cause, [])))
        model, optimizer, _ = wrapped(kind, made)
        batch, loss = make_batch(*[(7, 1), (4, 2)][dist.get_rank()]), LOSSES.get(cause, of_samples)
        accumulator = Accumulator(model, optimizer, micro_batch_size=3)
        one = accumulator.check(batch, lambda part, model=model, loss=loss: loss(model, part))
        dist.all_gather_object(both := [one, one], one)
        assert both[0] == both[1] and one.samples == 11 and one.micro_batches == (3, 2)
        assert one.equivalent == (not cause), one
        assert [found.split(":")[0] for found in one.causes] == ([cause] if cause else []), one


@on_ranks(2)
def test_count_wrong_only_between_ranks_is_found():
    """Token counts are even within each rank and differ between ranks: only the job's big batch shows the error."""
    batch = make_batch(6, seed=dist.get_rank())
    batch["labels"] = torch.full((6, 5), 1)
    if dist.get_rank():
        batch["labels"][:, 1:] = -100
    report = check(DistributedDataParallel(token_net()), of_tokens, batch, micro_batch_size=3)
    assert not report.equivalent and "count_tokens('labels')" in report.causes[0]


@on_ranks(2)
def test_bad_batch_of_one_rank_raises_on_all_ranks():
    rank = dist.get_rank()
    said = refused(check, DistributedDataParallel(net()), of_samples, make_batch() if rank else "text")
    assert "a str without tensors or lists of samples has no batch dimension" in said
    assert "rank 0 could not plan this window (TypeError: " in said or rank == 0
