"""Bugs from public trackers: the arithmetic of each thread in a loop of about ten lines, and the same window with ours.

A case returns two numbers, of that loop and of ours: relative errors against one big batch in float64, or numbers of
reductions per window. docs/field.md lists them, and a test compares that page with what is measured here.
`python tests/test_field.py` prints all of them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import full_gradient
from problems import Batch, error, gradient, join, loss_of, make_batch, make_net, make_net_without_router, token_loss
from ranks import Ranks
from test_meshes import criterion, make_text, parallelized
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from distaccum import Accumulator, count_samples, count_tokens

PAGE = Path(__file__).parent.parent / "docs" / "field.md"
EXACT = 1e-10
Numbers = tuple[float | str, float]  # of the naive loop, and of ours
CASES: dict[str, tuple[int, Callable[[], Numbers]]] = {}  # by thread: the number of ranks (0: this process), the case
TOKENS = count_tokens("labels")


def case(thread: str, ranks: int = 0) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    def note(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
        CASES[thread] = ranks, function
        return function

    return note


def batches_of(rank: int = 0, sizes: Sequence[int] = (2, 1, 3, 2)) -> list[Batch]:
    """Micro-batches whose numbers of tokens differ widely."""
    kept = (0.9, 0.3, 0.6, 0.15)
    return [make_batch(size, seed=10 * rank + i, kept=kept[(i + rank) % 4]) for i, size in enumerate(sizes)]


def tokens_in(batch: Batch) -> int:
    return int(batch["labels"].ne(-100).sum())


def big(batches: Sequence[Batch], loss: Callable[..., Tensor] = token_loss) -> Tensor:
    net = make_net_without_router()
    loss(net, join(batches)).backward()
    return gradient(net)


def ours(
    model: nn.Module, batches: Any, exact: Tensor, loss: Callable[..., Tensor] = token_loss, **options: Any
) -> float:
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), **options)
    window = accumulator.window(batches)
    for batch in window:
        window.backward(loss(model, batch))
    off = error(full_gradient(model), exact)
    assert window.step().stepped
    return off


def token_sum(net: nn.Module, batch: Batch) -> Tensor:
    return token_loss(net, batch, "sum")


# One process


@case("huggingface/transformers#34191")
def mean_of_means() -> Numbers:
    batches, net = batches_of(), make_net_without_router()
    for batch in batches:
        (token_loss(net, batch) / len(batches)).backward()
    exact = big(batches)
    return error(gradient(net), exact), ours(make_net_without_router(), batches, exact, count=TOKENS)


@case("verl-project/verl#5625")
def token_means_weighted_by_samples() -> Numbers:
    batches, net = batches_of(), make_net_without_router()
    samples = sum(len(batch["x"]) for batch in batches)
    for batch in batches:
        (token_loss(net, batch) * len(batch["x"]) / samples).backward()
    exact = big(batches)
    return error(gradient(net), exact), ours(make_net_without_router(), batches, exact, count=TOKENS)


@case("areal-project/AReaL#1273")
def schedule_divides_what_is_normalized() -> Numbers:
    batches, net = batches_of(), make_net_without_router()
    total = sum(map(tokens_in, batches))
    for batch in batches:
        loss = token_loss(net, batch) * tokens_in(batch) / total  # their sum is the mean
        (loss / len(batches)).backward()  # the schedule expects a mean of each
    exact = big(batches)
    options = {"reduction": "sum_to_mean", "count": TOKENS}
    return error(gradient(net), exact), ours(make_net_without_router(), batches, exact, token_sum, **options)


@case("Lightning-AI/pytorch-lightning#19987")
def short_window_divided_by_the_full_length() -> Numbers:
    batches, net, steps = batches_of(sizes=(2,) * 5), make_net_without_router(), 4
    for i, batch in enumerate(batches):
        if i % steps == 0:
            net.zero_grad()
        (loss_of(net, batch) / steps).backward()
    exact, model = big(batches[4:], loss_of), make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=steps)
    for window in accumulator.windows(batches):
        for batch in window:
            window.backward(loss_of(model, batch))
        off = error(gradient(model), exact)  # of the last window in the end
        window.step()
    return error(gradient(net), exact), off


@case("huggingface/accelerate#1299")
def gradients_cleared_at_the_start_of_the_last_micro_step() -> Numbers:
    batches, net = batches_of(sizes=(2,) * 4), make_net_without_router()
    optimizer = SGD(net.parameters(), lr=0.1)
    for i, batch in enumerate(batches):
        if i + 1 == len(batches):  # a wrapped optimizer clears, as it steps, in the last micro-step alone
            optimizer.zero_grad()
        (loss_of(net, batch) / len(batches)).backward()
    exact = big(batches, loss_of)
    return error(gradient(net), exact), ours(make_net_without_router(), batches, exact, loss_of)


@case("tenstorrent/tt-metal#17568")
def clipping_after_each_backward() -> Numbers:
    batches, net, bound = batches_of(), make_net_without_router(), 0.1
    total = sum(map(tokens_in, batches))
    for batch in batches:
        (token_sum(net, batch) / total).backward()
        nn.utils.clip_grad_norm_(net.parameters(), bound)
    exact, model = big(batches), make_net_without_router()
    exact *= bound / (exact.norm() + 1e-6)  # as torch clips
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), max_norm=bound, count=TOKENS)
    window = accumulator.window(batches)
    for batch in window:
        window.backward(token_loss(model, batch))
    window.step()
    moved = before - nn.utils.parameters_to_vector(model.parameters()).detach()
    return error(gradient(net), exact), error(moved, exact)


@case("h2oai/h2o-llmstudio#663")
def scheduler_stepped_in_each_micro_step() -> Numbers:
    """The rate of the third of 12 updates, in a linear decay over 12."""
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
    batches, steps, updates = batches_of(sizes=(1,) * 48), 4, 12
    rates: list[list[float]] = []
    for how in ("naive", "ours"):
        net = make_net_without_router()
        optimizer, seen = SGD(net.parameters(), lr=1e-3), []
        scheduler = LambdaLR(optimizer, lambda done: max(0.0, 1 - done / updates))
        if how == "naive":
            for i, batch in enumerate(batches):
                (loss_of(net, batch) / steps).backward()
                if (i + 1) % steps == 0:
                    seen.append(scheduler.get_last_lr()[0])
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
        else:
            for window in Accumulator(net, optimizer, steps=steps, scheduler=scheduler).windows(batches):
                for batch in window:
                    window.backward(loss_of(net, batch))
                seen.append(scheduler.get_last_lr()[0])
                window.step()
        rates.append(seen)
    exact = 1e-3 * (1 - 2 / updates)
    return abs(rates[0][2] - exact) / exact, abs(rates[1][2] - exact) / exact


@case("NVIDIA-NeMo/Automodel#3359")
def auxiliary_loss_added_whole_in_each_micro_batch() -> Numbers:
    """The mean over tokens is normalized for the window; the router's loss, a mean over rows, is not."""

    def router(net: Any, batch: Batch) -> Tensor:
        return 0.1 * net.router(net.body(batch["x"])).square().mean()

    batches, net, exact = batches_of(), make_net(), make_net()
    total = sum(map(tokens_in, batches))
    for batch in batches:
        (token_sum(net, batch) / total + router(net, batch)).backward()
    (token_loss(exact, join(batches)) + router(exact, join(batches))).backward()
    model = make_net()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), count={"tokens": TOKENS, "router": count_samples})
    window = accumulator.window(batches)
    for batch in window:
        window.backward(tokens=token_loss(model, batch), router=router(model, batch))
    off = error(gradient(model), gradient(exact))
    window.step()
    return error(gradient(net), gradient(exact)), off


@case("mlfoundations/open_clip#761")
def temperature_counted_in_each_micro_step() -> Numbers:
    """Features of other micro-batches are cached; the loss over all pairs goes backward once for each micro-batch."""

    def make() -> tuple[nn.Module, nn.Parameter]:
        torch.manual_seed(5)
        return nn.Linear(5, 4).double(), nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def clip(features: Tensor, temperature: Tensor) -> Tensor:
        logits = features[: len(features) // 2] @ features[len(features) // 2 :].T * temperature.exp()
        return cross_entropy(logits, torch.arange(len(logits)))

    def features_of(tower: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
        return normalize(tower(torch.cat([images, texts])))

    batch = torch.randn(8, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (exact_tower, exact), (tower, naive), (model, temperature) = make(), make(), make()
    clip(features_of(exact_tower, *batch.unbind(1)), exact).backward()
    cached = normalize(tower(batch), dim=-1).detach()
    for i in range(4):
        rows = cached.clone()
        rows[2 * i : 2 * i + 2] = normalize(tower(batch[2 * i : 2 * i + 2]), dim=-1)
        clip(torch.cat(rows.unbind(1)), naive).backward()
    accumulator = Accumulator(model, SGD([*model.parameters(), temperature], lr=1.0), micro_batch_size=2)
    accumulator.contrast(
        batch, lambda part: normalize(model(part), dim=-1), lambda rows: clip(torch.cat(rows.unbind(1)), temperature)
    )
    moved = 1.3 - temperature.detach()
    off = torch.linalg.vector_norm(naive.grad - exact.grad) / exact.grad.abs()
    return float(off), float((moved - exact.grad).abs() / exact.grad.abs())


# Data parallel ranks


@case("huggingface/transformers#34242", ranks=2)
def tokens_counted_on_each_rank_alone() -> Numbers:
    mine, every = batches_of(dist.get_rank()), [*batches_of(0), *batches_of(1)]
    net = DistributedDataParallel(make_net_without_router())
    total = sum(map(tokens_in, mine))
    for i, batch in enumerate(mine):
        with nullcontext() if i + 1 == len(mine) else net.no_sync():
            (token_sum(net, batch) / total).backward()
    exact, model = big(every), DistributedDataParallel(make_net_without_router())
    return error(gradient(net), exact), ours(model, mine, exact, count=TOKENS)


@case("radixark/miles#3231", ranks=2)
def token_sums_in_place_of_their_mean() -> Numbers:
    mine, every = batches_of(dist.get_rank()), [*batches_of(0), *batches_of(1)]
    net, model = sharded(), sharded()
    for batch in mine:
        token_sum(net, batch).backward()  # FSDP2 averages over ranks, and nothing divides by the tokens
    exact = big(every)
    off = error(full_gradient(net), exact)
    return off, ours(model, mine, exact, token_sum, reduction="sum_to_mean", count=TOKENS)


def sharded(mesh: Any = None) -> nn.Module:
    net = make_net_without_router()
    fully_shard(net, **({} if mesh is None else {"mesh": mesh}))
    return net


@case("baidu-baige/LoongForge#163", ranks=2)
def no_sync_around_the_backward_alone() -> Numbers:
    """All-reduces of the gradient in a window of four."""
    mine = batches_of(dist.get_rank())
    net, model = (DistributedDataParallel(make_net_without_router()) for _ in range(2))
    with Counting() as counting:
        for i, batch in enumerate(mine):
            loss = loss_of(net, batch)
            with nullcontext() if i + 1 == len(mine) else net.no_sync():
                loss.backward()
    naive = all_reduces(counting)
    with Counting() as counting:
        ours(model, mine, torch.ones(()), loss_of)
    return naive, all_reduces(counting)


def all_reduces(counting: Counting) -> int:
    """Of gradients; the plan and the record have less than 40 elements."""
    return sum(name.startswith("allreduce") and size > 40 for name, size in counting.take())


@case("NVIDIA/cosmos-framework#162", ranks=4)
def replicas_reduced_in_each_micro_step() -> Numbers:
    """All-reduces of the gradient between replicas in a window of four; ranks reduce-scatter in each micro-step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mine, net, model = batches_of(dist.get_rank()), sharded(mesh), sharded(mesh)
    with Counting() as counting:
        for i, batch in enumerate(mine):
            is_ddp = isinstance(net, DistributedDataParallel)  # which is all that the context looks for
            with net.no_sync() if is_ddp and i + 1 < len(mine) else nullcontext():
                loss_of(net, batch).backward()
    naive = all_reduces(counting)
    with Counting() as counting:
        ours(model, mine, torch.ones(()), loss_of, sync="replicas")
    return naive, all_reduces(counting)


# Context parallel ranks: each has half of each sequence


def parts() -> tuple[Any, list[Batch], list[Batch], Tensor]:
    """The mesh, this rank's whole sequences, its parts of them, and the exact gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    whole = batches_of(mesh["data"].get_local_rank())
    mine = [cut(batch, mesh["context"]) for batch in whole]
    return mesh, whole, mine, big([*batches_of(0), *batches_of(1)])


def cut(batch: Batch, mesh: Any) -> Batch:
    return {key: value.chunk(2, dim=1)[mesh.get_local_rank()].contiguous() for key, value in batch.items()}


def sum_over(mesh: Any, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, group=None if mesh is None else mesh.get_group())
    return tensor


@case("PrimeIntellect-ai/prime-rl#2562", ranks=4)
def whole_masks_counted_by_each_context_rank() -> Numbers:
    mesh, whole, mine, exact = parts()
    net = make_net_without_router()
    total = sum_over(None, torch.tensor(sum(map(tokens_in, whole))))  # over data and context ranks
    for batch in mine:
        (token_sum(net, batch) / total).backward()
    naive = error(sum_over(None, gradient(net)), exact)
    model = DistributedDataParallel(make_net_without_router())
    options = {"reduction": "sum_to_mean", "count": count_tokens("labels", over=mesh["context"])}

    def cut_later(net: nn.Module, batch: Batch) -> Tensor:
        return token_sum(net, cut(batch, mesh["context"]))

    return naive, ours(model, whole, exact, cut_later, mesh=mesh["data"], **options)


@case("NVIDIA/Megatron-LM#673", ranks=4)
def loss_times_context_ranks_over_tokens_of_data_ranks() -> Numbers:
    mesh, _, mine, exact = parts()
    net, total = make_net_without_router(), torch.zeros((), dtype=torch.int64)
    for batch in mine:
        (token_sum(net, batch) * mesh["context"].size()).backward()
        total += sum_over(mesh["context"], torch.tensor(tokens_in(batch)))
    naive = error(sum_over(None, gradient(net)) / sum_over(mesh["data"], total), exact)
    return naive, ours(sharded(), mine, exact, mesh=mesh["data"], count=TOKENS)


# Tensor parallel ranks


@case("NVIDIA-NeMo/RL#3788", ranks=2)
def norm_that_counts_replicas_on_each_rank() -> Numbers:
    mesh = init_device_mesh("cpu", (2,))
    batches, plain, net, model = batches_of(), make_text(), *(parallelized(make_text(), mesh, "tensor") for _ in "12")
    criterion(plain, join(batches)).backward()
    criterion(net, join(batches)).backward()
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in net.parameters()]
    naive = sum_over(None, sum(one.square().sum() for one in gradients)).sqrt()
    return off_norms(naive, model, batches, gradient(plain).norm())


def off_norms(naive: Tensor | None, model: nn.Module, batches: list[Batch], exact: Tensor) -> Numbers:
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), count=TOKENS, max_norm=math.inf)
    window = accumulator.window(batches)
    for batch in window:
        window.backward(criterion(model, batch))
    norm = window.step().grad_norm
    off = float(abs(norm - exact) / exact)
    return "raises" if naive is None else float((naive - exact).abs() / exact), off


@case("meta-pytorch/torchtune#2420", ranks=2)
def norm_over_mixed_meshes() -> Numbers:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    batches, plain, made = batches_of(), make_text(), []
    for _ in range(2):
        made.append(parallelized(make_text(), mesh["tensor"], "tensor"))
        fully_shard(made[-1], mesh=mesh["data"])
    criterion(plain, join(batches)).backward()
    criterion(made[0], join(batches)).backward()
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        nn.utils.clip_grad_norm_(made[0].parameters(), math.inf)
    return off_norms(None, made[1], batches, gradient(plain).norm())


# Pipelines of two stages


def stage_of(rank: int) -> nn.Module:
    net = make_net_without_router()
    return nn.Sequential(net.body, net.head)[rank]


def whole_of(stage: nn.Module) -> Tensor:
    """The gradients of both stages."""
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, gradient(stage))
    return torch.cat(every)


def schedule_of(stage: nn.Module, chunks: int, loss_fn: Callable[..., Tensor], scale_grads: bool) -> Any:
    first = PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu"))
    return ScheduleGPipe(first, chunks, loss_fn=loss_fn, scale_grads=scale_grads)


def called(batches: Sequence[Batch], loss_fn: Callable[..., Tensor], chunks: int, scale_grads: bool) -> Tensor:
    """The gradient after a call of torch's schedule for each batch."""
    stage = stage_of(dist.get_rank())
    schedule = schedule_of(stage, chunks, loss_fn, scale_grads)
    for batch in batches:
        if dist.get_rank() == 0:
            schedule.step(batch["x"])
        else:
            schedule.step(target=batch["labels"])
    return whole_of(stage)


def ours_in_stages(batches: Sequence[Batch], loss_fn: Callable[..., Tensor], exact: Tensor, **options: Any) -> float:
    stage = stage_of(dist.get_rank())
    schedule = schedule_of(stage, 2, loss_fn, scale_grads=False)
    accumulator = Accumulator(schedule, SGD(stage.parameters(), lr=0.1), **options)
    window = accumulator.window([(batch["x"], batch["labels"]) for batch in batches])
    for x, labels in window:
        window.run(x, target=labels)
    off = error(whole_of(stage), exact)
    assert window.step().stepped
    return off


def sum_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.square().mean()


@case("pytorch/torchtitan#2972", ranks=2)
def token_sums_go_backward_in_the_schedule() -> Numbers:
    """The trainer divides the loss by the tokens after the schedule has gone backward."""
    batches = batches_of(sizes=(2,) * 4)
    exact, naive = big(batches), called([join(batches)], sum_of, 8, scale_grads=False)
    options = {"reduction": "sum_to_mean", "count": count_tokens(1)}
    return error(naive, exact), ours_in_stages(batches, sum_of, exact, **options)


@case("pytorch/torchtitan#1733", ranks=2)
def schedule_divides_what_it_divided_before() -> Numbers:
    batches = batches_of(sizes=(2,) * 4)
    exact = big(batches, loss_of)
    naive = called(batches, lambda out, _: out.square().mean() / len(batches), 2, scale_grads=True)
    return error(naive, exact), ours_in_stages(batches, mean_square, exact)


@case("deepspeedai/DeepSpeed#7773", ranks=2)
def pipeline_sums_means() -> Numbers:
    """A pipeline by hand: the gradient of what a stage sent comes back, and nothing divides."""
    rank, batches, stage = dist.get_rank(), batches_of(sizes=(2,) * 4), stage_of(dist.get_rank())
    for batch in batches:
        if rank == 0:
            hidden = stage(batch["x"])
            dist.send(hidden.detach(), 1)
            back = torch.empty_like(hidden)
            dist.recv(back, 1)
            hidden.backward(back)
        else:
            hidden = torch.empty(2, 6, 8, dtype=torch.float64)
            dist.recv(hidden, 0)
            mean_square(stage(hidden.requires_grad_()), batch["labels"]).backward()
            dist.send(hidden.grad, 0)
    exact = big(batches, loss_of)
    return error(whole_of(stage), exact), ours_in_stages(batches, mean_square, exact)


# The page


def measured(ranks: Callable[[int], Ranks], thread: str) -> Numbers:
    num, function = CASES[thread]
    if num == 0:
        return function()
    of_ranks = ranks(num).run(function)
    assert len(set(map(str, ([one[0] for one in of_ranks])))) == 1, of_ranks
    return of_ranks[0]


def rows_of(page: str) -> dict[str, list[str]]:
    """The two last cells of each row, by thread."""
    thread, cell = r"\[([^]]+)\]\(https://github.com/([^)]+)\)", r"([^|]+)"
    rows = re.findall(rf"^\| (\d+) \| {thread} \|.*\| {cell} \| {cell} \|$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    for _, thread, address, *_ in rows:
        assert re.sub("/(issues|pull)/", "#", address) == thread
    return {thread: cells for _, thread, _, *cells in rows}


def written(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.2g}"


@pytest.mark.parametrize("thread", CASES)
def test_page_has_what_is_measured(ranks, thread):
    naive, own = measured(ranks, thread)
    page = rows_of(PAGE.read_text())[thread]
    assert page[0] == written(naive), (naive, own)
    if isinstance(naive, int):
        assert page[1] == written(own)
    else:  # rounding, which differs between machines
        assert own <= EXACT and float(page[1]) <= EXACT
    assert naive == "raises" or float(naive) > 0.1  # the bug shows


def test_page_has_a_row_for_each_case():
    assert rows_of(PAGE.read_text()).keys() == CASES.keys()


def test_rows_with_another_address_are_found():
    with pytest.raises(AssertionError):
        rows_of("| 1 | [a/b#1](https://github.com/a/b/issues/2) | what | 0.5 | 1e-16 |")


if __name__ == "__main__":
    started: dict[int, Ranks] = {}
    for name in CASES:
        print(name, *measured(lambda num: started.setdefault(num, Ranks(num)), name), flush=True)
    for one in started.values():
        one.stop()
