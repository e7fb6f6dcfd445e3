"""Compares two updates of each loop of launch/bench/contenders.py with big batches in float64.

python tests/loops.py --only '^DDP|ZeRO 2' --ranks 2
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.optim import SGD

sys.path.append(str(Path(__file__).parent.parent / "launch" / "bench"))
from contenders import CONTENDERS, Contender, Task, as_torchrun, be_quiet, num_ranks

BOUND = 1e-5  # float32
CHECKED_STEPS, CHECKED_UPDATES, CHECKED_LR = 3, 2, 1.0


def errors(chosen: Sequence[Contender]) -> dict[str, float]:
    """Error of the change of the weights after two updates, relative to that of two big batches, on this rank."""
    be_quiet()
    ranks = num_ranks()
    if ranks > 1:
        as_torchrun()
    expected = moved_by_big_batches(ranks)
    found = {}
    for contender in chosen:
        net = checked_net()
        task = Task(net, checked_loss, partial(SGD, lr=CHECKED_LR), CHECKED_STEPS, layers=(net[0], net[2]))
        before = torch.cat([p.detach().flatten() for p in net.parameters()]).clone()
        loop = contender.set_up(task)
        for index in range(CHECKED_UPDATES):
            loop.run(checked_batches(index, dist.get_rank() if ranks > 1 else 0))
        moved = (loop.weights() - before).double()
        found[str(contender)] = ((moved - expected).norm() / expected.norm()).item()
    return found


def checked_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def checked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def checked_batches(index: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return [torch.randn(8, 16, generator=generator) for _ in range(CHECKED_STEPS)]


def moved_by_big_batches(ranks: int) -> Tensor:
    net = checked_net().double()
    parameters = list(net.parameters())
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    optimizer = SGD(parameters, lr=CHECKED_LR)
    for index in range(CHECKED_UPDATES):
        batch = torch.cat([x for rank in range(ranks) for x in checked_batches(index, rank)]).double()
        optimizer.zero_grad()
        checked_loss(net, batch).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach() - before


def errors_of(names: Sequence[str]) -> dict[str, float]:
    """Takes names, since a loop cannot be sent to a rank."""
    return errors([one for one in CONTENDERS if str(one) in names])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the loops that need a group (2)")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="run the loops whose 'engine, name' matches, such as '^DDP|ZeRO 2'"
    )
    options = parser.parse_args()
    chosen = [one for one in CONTENDERS if re.search(options.only, str(one))]
    alone = [one for one in chosen if not one.on_ranks]
    shared = [str(one) for one in chosen if one.on_ranks]
    found = [(1, errors(alone))] if alone else []
    if shared:
        ranks = Ranks(options.ranks)
        each = ranks.run(errors_of, shared, seconds=300)
        ranks.stop()
        found.append((options.ranks, {name: max(one[name] for one in each) for name in shared}))
    print("| loop | ranks | error |\n| --- | --: | --: |")
    print("\n".join(f"| {name} | {num} | {off:.1e} |" for num, part in found for name, off in part.items()))
    return int(not all(off <= BOUND for _, part in found for off in part.values()))


if __name__ == "__main__":
    raise SystemExit(main())
