"""Losses of reinforcement learning, over uneven micro-batches, against their formulas.

The formulas are written out with loops over rows and tokens of the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from tests.support.problems import error, gradient
from tests.support.ranks import on_ranks

WORDS, COLUMNS, LONGEST = 7, 6, 10  # LONGEST: the constant of Dr. GRPO
EPSILON = 0.2
Batch = dict[str, Tensor]


class Policy(nn.Module):
    """The logarithm of each token's probability."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        log_p = torch.log_softmax(self.head(torch.tanh(self.embed(tokens))), dim=-1)
        return log_p.gather(-1, tokens.roll(-1, dims=-1)[..., None])[..., 0]


def make_policy() -> Policy:
    torch.manual_seed(3)
    return Policy()


def make_rows(number: int, seed: int) -> Batch:
    """Responses of different lengths with rewards, and what the policy gave for them before."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, COLUMNS + 1, (number,), generator=generator)
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    tokens = torch.randint(0, WORDS, mask.shape, generator=generator)
    old, _ = -torch.rand(2, *mask.shape, generator=generator, dtype=torch.float64) * 3
    rewards = torch.randn(number, generator=generator, dtype=torch.float64)
    return {"tokens": tokens, "mask": mask, "old": old, "rewards": rewards}


def normalized(rewards: Tensor, group: int) -> Tensor:
    """Of each prompt's responses, which are `group` rows in a row."""
    groups = rewards.view(-1, group)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def of_tokens(policy: nn.Module, batch: Batch) -> Tensor:
    """The clipped loss of each token."""
    now = policy(batch["tokens"])
    ratio, gain = (now - batch["old"]).exp(), batch["advantages"][:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(1 - EPSILON, 1 + EPSILON) * gain)


def token_mean(policy: nn.Module, batch: Batch) -> Tensor:
    return (of_tokens(policy, batch) * batch["mask"]).sum()


def seq_mean_token_mean(policy: nn.Module, batch: Batch) -> Tensor:
    summed = (of_tokens(policy, batch) * batch["mask"]).sum(-1)
    return (summed / batch["mask"].sum(-1).clamp(min=1)).sum()


# By mode: the criterion, which sums; the count; what a whole batch of rows of token losses gives
MODES: dict[str, tuple[Callable[..., Tensor], Any, Callable[[list[list[Tensor]]], Tensor]]] = {
    "token-mean": (
        token_mean,
        count_tokens("mask", ignore_index=0),
        lambda rows: sum(loss for row in rows for loss in row) / sum(map(len, rows)),
    ),
    "seq-mean-token-sum": (token_mean, count_samples, lambda rows: sum(sum(row) for row in rows) / len(rows)),
    "seq-mean-token-mean": (
        seq_mean_token_mean,
        count_samples,
        lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    ),
    "seq-mean-token-sum-norm": (
        lambda policy, batch: token_mean(policy, batch) / LONGEST,
        count_samples,
        lambda rows: sum(sum(row) / LONGEST for row in rows) / len(rows),
    ),
}


def by_formula(policy: nn.Module, batch: Batch, aggregate: Callable[[list[list[Tensor]]], Tensor]) -> Tensor:
    """A token at a time."""
    now = policy(batch["tokens"])
    rows = []
    for i, length in enumerate(batch["mask"].sum(-1).tolist()):
        row = []
        for t in range(length):
            ratio, gain = (now[i, t] - batch["old"][i, t]).exp(), batch["advantages"][i]
            clipped = min(max(ratio, ratio.new_tensor(1 - EPSILON)), ratio.new_tensor(1 + EPSILON))
            row.append(-min(ratio * gain, clipped * gain))
        rows.append(row)
    return aggregate(rows)


def parts_of(batch: Batch, sizes: list[int]) -> list[Batch]:
    cut = {name: value.split(sizes) for name, value in batch.items()}
    return [{name: pieces[i] for name, pieces in cut.items()} for i in range(len(sizes))]


def make_batch() -> Batch:
    batch = make_rows(12, seed=1)
    return {**batch, "advantages": normalized(batch["rewards"], group=4)}


def run(model: nn.Module, micro_batches: list[Batch], loss: Callable[..., Any], **options: Any) -> tuple[Tensor, float]:
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), **options)
    window = accumulator.window(micro_batches)
    for batch in window:
        window.backward(loss(model, batch))
    taken = gradient(model)
    return taken, window.step().loss


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_each_mode_is_its_formula_on_the_whole_batch(mode):
    """Groups of 4 responses, which the ranks share: rewards are normalized over a group wherever its rows are."""
    loss, count, aggregate = MODES[mode]
    rank, layout, batch = dist.get_rank(), [[3, 2], [1, 6]], make_batch()
    mine = parts_of(batch, [sum(sizes) for sizes in layout])[rank]
    rewards: list[Any] = [None] * 2
    dist.all_gather_object(rewards, mine["rewards"])  # small, and once per update
    mine["advantages"] = normalized(torch.cat(rewards), group=4).split([5, 7])[rank]
    whole, model = make_policy(), DistributedDataParallel(make_policy())
    exact = by_formula(whole, batch, aggregate)
    exact.backward()
    found, value = run(model, parts_of(mine, layout[rank]), loss, reduction="sum_to_mean", count=count)
    assert max(error(found, gradient(whole)), abs(value - exact.item())) <= 1e-12


def test_mean_of_micro_batch_means_is_another_loss():
    """What a loop gives that averages each micro-batch's own mean over tokens; docs/losses.md has the number."""
    batch, whole, naive = make_batch(), make_policy(), make_policy()
    by_formula(whole, batch, MODES["token-mean"][2]).backward()
    parts = parts_of(batch, [1, 5, 2, 4])
    for part in parts:
        (token_mean(naive, part) / part["mask"].sum() / len(parts)).backward()
    off = error(gradient(naive), gradient(whole))
    assert f"{off:.0%}" == "38%", off
