"""Receipts of thousands of right windows, none of which may be found wrong.

    nice python -m tests.programs.right_windows --windows 20000

Shapes, scales, lengths, sizes and shares of ranks are drawn anew for every hundred windows.
"""

import argparse
import random
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator
from distaccum.extensions import Receipt
from tests.support.ranks import Ranks

EACH = 100  # windows of a model
SHARES = {"plain": 0.5, "ddp": 0.25, "fsdp2": 0.25}
DTYPES = (torch.float32, torch.bfloat16)


def wrapped(kind: str, dtype: torch.dtype, draw: random.Random) -> nn.Module:
    width, out = draw.choice([3, 8, 33, 64]), draw.choice([2, 7, 16])
    norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.Identity()
    model = nn.Sequential(nn.Embedding(20, width), norm, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
    with torch.no_grad():
        scale = 10 ** draw.uniform(-3, 2)
        for parameter in model.parameters():
            parameter.mul_(scale)
    if kind != "fsdp2":
        model = model.to(dtype)
        return model if kind == "plain" else DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=draw.choice([dtype, torch.float32]))
    fully_shard(model[2], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def go(kind: str, dtype: torch.dtype, num: int, seed: int) -> tuple[int, float]:
    """Windows that were checked, and the largest error."""
    warnings.filterwarnings("ignore", "gradients of .* add up in half precision")  # as they shall here
    done, worst, rank = 0, 0.0, dist.get_rank()
    while done < num:
        draw, own = random.Random(seed + done), random.Random(1000 * seed + 10 * done + rank)
        torch.manual_seed(seed + done)
        model = wrapped(kind, dtype, draw)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
        accumulator = Accumulator(model, sgd, max_norm=1.0, extensions=[Receipt(every=1)])
        for _ in range(EACH):
            sizes = [own.randint(1, 9) for _ in range(own.randint(1, 6))]
            window = accumulator.window([torch.randint(0, 20, (size, 5)) for size in sizes])
            for rows in window:
                outputs = model(rows).float().mean(1)
                window.backward(cross_entropy(outputs, rows[:, 0] % outputs.shape[1]))
            worst = max(worst, window.step().notes["receipt"])
        done += EACH
    return done, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kind, share in SHARES.items():
        ranks = Ranks(1 if kind == "plain" else 2)
        for dtype in DTYPES:
            num = round(options.windows * share / len(DTYPES))
            done, worst = ranks.run(go, kind, dtype, num, options.seed, seconds=36000)[0]
            print(f"{kind}, {dtype}: {done} windows, none found wrong, at most {worst:.2g} off", flush=True)
        ranks.stop()


if __name__ == "__main__":
    main()
