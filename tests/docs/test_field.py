"""Bugs from public trackers: the arithmetic of each thread in a loop by hand, and the same window with ours.

A case returns two numbers, of that loop and of ours: relative errors against one big batch in float64, or numbers of
reductions per window. docs/results.md lists them, and a test compares that page with what is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from tests.meshes.test_sharing import criterion, make_text, parallelized
from tests.support.counting import Counting
from tests.support.problems import Batch, error, gradient, join, loss_of, make_batch, make_net, token_loss, weights
from tests.support.problems import make_net_without_router as make

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
CASES: dict[str, tuple[int, Callable[[], Any]]] = {}  # by thread: the number of ranks (0: this process), the case
TOKENS = count_tokens("labels")


def case(thread: str, ranks: int = 0) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    return lambda function: CASES.setdefault(thread, (ranks, function))[1]


def batches_of(rank: int = 0, sizes: Sequence[int] = (2, 1, 3, 2)) -> list[Batch]:
    """Micro-batches whose numbers of tokens differ widely."""
    kept = (0.9, 0.3, 0.6, 0.15)
    return [make_batch(size, seed=10 * rank + i, kept=kept[(i + rank) % 4]) for i, size in enumerate(sizes)]


def token_sum(net: nn.Module, batch: Batch) -> Tensor:
    return token_loss(net, batch, "sum")


def by_hand(batches: Sequence[Batch], loss: Callable[..., Tensor], net: nn.Module | None = None) -> Tensor:
    """The gradient of all these backwards."""
    net = net or make()
    for batch in batches:
        loss(net, batch).backward()
    return gradient(net)


def big(batches: Sequence[Batch], loss: Callable[..., Tensor] = token_loss, net: nn.Module | None = None) -> Tensor:
    return by_hand([join(batches)], loss, net)


def ours(model: nn.Module, batches: Any, exact: Tensor, loss: Callable[..., Any] = token_loss, **options: Any) -> float:
    window = Accumulator(model, SGD(model.parameters(), lr=0.1), **options).window(batches)
    for batch in window:
        found = loss(model, batch)
        window.backward(**found) if isinstance(found, dict) else window.backward(found)
    off = error(gradient(model), exact)
    assert window.step().stepped
    return off


@case("huggingface/transformers#34191")
def mean_of_means() -> Any:
    batches = batches_of()
    naive, exact = by_hand(batches, lambda net, batch: token_loss(net, batch) / len(batches)), big(batches)
    return error(naive, exact), ours(make(), batches, exact, count=TOKENS)


@case("Lightning-AI/pytorch-lightning#19987")
def short_window_divided_by_the_full_length() -> Any:
    batches, model, steps = batches_of(sizes=(2,) * 5), make(), 4
    last = batches[4:]
    naive, exact = by_hand(last, lambda net, batch: loss_of(net, batch) / steps), big(last, loss_of)
    for window in Accumulator(model, SGD(model.parameters(), lr=0.0), steps=steps).windows(batches):
        for batch in window:
            window.backward(loss_of(model, batch))
        off = error(gradient(model), exact)  # of the last window in the end
        window.step()
    return error(naive, exact), off


@case("tenstorrent/tt-metal#17568")
def clipping_after_each_backward() -> Any:
    batches, net, model, bound = batches_of(), make(), make(), 0.1
    for batch in batches:
        (token_sum(net, batch) / sum(map(TOKENS, batches))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), bound)
    exact, before = big(batches), weights(model)
    exact *= bound / (exact.norm() + 1e-6)  # as torch clips
    window = Accumulator(model, SGD(model.parameters(), lr=1.0), max_norm=bound, count=TOKENS).window(batches)
    for batch in window:
        window.backward(token_loss(model, batch))
    window.step()
    return error(gradient(net), exact), error(before - weights(model), exact)


@case("NVIDIA-NeMo/Automodel#3359")
def auxiliary_loss_added_whole_in_each_micro_batch() -> Any:
    """The mean over tokens is normalized for the window; the router's loss, a mean over rows, is not."""

    def named(net: Any, batch: Batch) -> dict[str, Tensor]:
        return {"tokens": token_loss(net, batch), "router": 0.1 * net.router(net.body(batch["x"])).square().mean()}

    batches, counts = batches_of(), {"tokens": TOKENS, "router": count_samples}
    total = sum(map(TOKENS, batches))
    naive = by_hand(batches, lambda net, one: token_sum(net, one) / total + named(net, one)["router"], make_net())
    exact = big(batches, lambda net, batch: sum(named(net, batch).values()), make_net())
    return error(naive, exact), ours(make_net(), batches, exact, named, count=counts)


@case("mlfoundations/open_clip#761")
def temperature_counted_in_each_micro_step() -> Any:
    """Features of other micro-batches are cached; the loss over all pairs goes backward once for each micro-batch."""
    batch = torch.randn(8, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    tower = nn.Linear(5, 4).double()
    exact, naive, own = (nn.Parameter(torch.tensor(1.3, dtype=torch.float64)) for _ in range(3))

    def encode(pairs: Tensor) -> Tensor:
        return normalize(tower(pairs), dim=-1)

    def clip(pairs: Tensor, temperature: Tensor) -> Tensor:
        logits = pairs[:, 0] @ pairs[:, 1].T * temperature.exp()
        return cross_entropy(logits, torch.arange(len(logits)))

    clip(cached := encode(batch).detach(), exact).backward()
    for i in range(0, 8, 2):
        clip(torch.cat([cached[:i], encode(batch[i : i + 2]), cached[i + 2 :]]), naive).backward()
    accumulator = Accumulator(tower, SGD([*tower.parameters(), own], lr=1.0), micro_batch_size=2)
    tower.zero_grad()
    accumulator.contrast(batch, encode, lambda rows: clip(rows, own))
    return error(naive.grad, exact.grad), error(1.3 - own.detach(), exact.grad)


@case("huggingface/transformers#34242", ranks=2)
def tokens_counted_on_each_rank_alone() -> Any:
    mine, (net, model) = batches_of(dist.get_rank()), (DistributedDataParallel(make()) for _ in range(2))
    total = sum(map(TOKENS, mine))
    naive = by_hand(mine, lambda net, batch: token_sum(net, batch) / total, net)
    exact = big(batches_of(0) + batches_of(1))
    return error(naive, exact), ours(model, mine, exact, count=TOKENS)


@case("baidu-baige/LoongForge#163", ranks=2)
def no_sync_around_the_backward_alone() -> Any:
    """All-reduces of the gradient in a window of four; the plan and the record have less than 40 elements."""
    mine, found = batches_of(dist.get_rank()), []
    net, model = (DistributedDataParallel(make()) for _ in range(2))
    with Counting() as counting:
        for i, batch in enumerate(mine):
            loss = loss_of(net, batch)
            with nullcontext() if i + 1 == len(mine) else net.no_sync():
                loss.backward()
        found.append(counting.take())
        ours(model, mine, torch.ones(()), loss_of)
        found.append(counting.take())
    return [sum(name.startswith("allreduce") and size > 40 for name, size in one) for one in found]


@case("PrimeIntellect-ai/prime-rl#2562", ranks=4)
def whole_masks_counted_by_each_context_rank() -> Any:
    """Each of two context ranks has half of each sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    batches, context = batches_of(mesh["data"].get_local_rank()), mesh["context"]

    def of_half(net: nn.Module, batch: Batch) -> Tensor:
        half = {key: value.chunk(2, dim=1)[context.get_local_rank()].contiguous() for key, value in batch.items()}
        return token_sum(net, half)

    dist.all_reduce(total := sum(map(TOKENS, batches)))  # over data and context ranks
    dist.all_reduce(naive := by_hand(batches, lambda net, batch: of_half(net, batch) / total))
    exact, model = big(batches_of(0) + batches_of(1)), DistributedDataParallel(make())
    options = {"reduction": "sum_to_mean", "count": lambda one: TOKENS(one) / context.size(), "mesh": mesh["data"]}
    return error(naive, exact), ours(model, batches, exact, of_half, **options)


@case("NVIDIA-NeMo/RL#3788", ranks=2)
def norm_that_counts_replicas_on_each_tensor_parallel_rank() -> Any:
    mesh, batches = init_device_mesh("cpu", (2,)), batches_of()
    net, model = (parallelized(make_text(), mesh, "tensor") for _ in range(2))
    criterion(net, join(batches)).backward()
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in net.parameters()]
    dist.all_reduce(naive := torch.stack([one.square().sum() for one in gradients]).sum())
    window = Accumulator(model, SGD(model.parameters(), lr=0.1), count=TOKENS, max_norm=1e9).window(batches)
    for batch in window:
        window.backward(criterion(model, batch))
    norm, exact = window.step().grad_norm, big(batches, criterion, make_text()).norm()
    return float(abs(naive.sqrt() - exact) / exact), float(abs(norm - exact) / exact)


@case("pytorch/torchtitan#2972", ranks=2)
def token_sums_go_backward_in_the_schedule_of_a_pipeline() -> Any:
    """The trainer divides the loss by the tokens after the schedule has gone backward."""
    batches, rank, errors = batches_of(sizes=(2,) * 4), dist.get_rank(), []

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    for chunks in (8, 2):
        stage = nn.Sequential(make().body, make().head)[rank]
        first = PipelineStage(stage, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(first, chunks, loss_fn=loss_fn, scale_grads=False)
        if chunks == 8:
            whole = join(batches)
            schedule.step(*[whole["x"]][rank:], target=whole["labels"])
        else:
            options = {"reduction": "sum_to_mean", "count": count_tokens(1)}
            accumulator = Accumulator(schedule, SGD(stage.parameters(), lr=0.1), **options)
            for x, labels in (window := accumulator.window([(one["x"], one["labels"]) for one in batches])):
                window.run(x, target=labels)
        dist.all_gather_object(every := [torch.empty(0)] * 2, gradient(stage))
        errors.append(error(torch.cat(every), big(batches)))
    assert window.step().stepped
    return errors


# The page


def rows_of(page: str) -> dict[str, list[str]]:
    """The two last cells of each row, by thread."""
    thread, cell = r"\[([^]]+)\]\(https://github.com/([^)]+)\)", r"([^|]+)"
    rows = re.findall(rf"^\| (\d+) \| {thread} \|.*\| {cell} \| {cell} \|$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    for _, thread, address, *_ in rows:
        assert re.sub("/(issues|pull)/", "#", address) == thread
    return {thread: cells for _, thread, _, *cells in rows}


@pytest.mark.parametrize("thread", CASES)
def test_page_has_what_is_measured(ranks, thread):
    num, function = CASES[thread]
    for naive, own in ranks(num).run(function) if num else [function()]:
        page = rows_of(PAGE.read_text())[thread]
        assert page[0] == f"{naive:.2g}" and naive > 0.1, (naive, own)  # the bug shows
        if isinstance(naive, int):
            assert page[1] == f"{own:.2g}"
        else:  # rounding, which differs between machines
            assert own <= 1e-10 and float(page[1]) <= 1e-10


def test_page_has_a_row_for_each_case():
    assert rows_of(PAGE.read_text()).keys() == CASES.keys()
    with pytest.raises(AssertionError):
        rows_of("| 1 | [a/b#1](https://github.com/a/b/issues/2) | what | 0.5 | 1e-16 |")
