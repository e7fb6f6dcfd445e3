"""Train on scikit-learn's digits under DDP, then prove the run: the same training with one big batch per update."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from distaccum import Accumulator, Update

BOUNDS = {"float64": 1e-10, "float32": 1e-3}  # float32: rounding, which training amplifies


@dataclasses.dataclass(frozen=True)
class Config:
    ranks: int = 2
    epochs: int = 12
    batch_size: int = 64
    micro_batch_size: int = 8
    lr: float = 0.2
    momentum: float = 0.9
    max_norm: float = 1.0
    dtype: str = "float64"
    seed: int = 0


def main() -> int:
    config = read_config()
    if "RANK" not in os.environ:  # not started by torchrun: start it, now that the options are known to be good
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.ranks), *sys.argv]
        return subprocess.call([sys.executable, *command], env={"OMP_NUM_THREADS": "1", **os.environ})
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train, test = digits(config)
    model = make_model(config)
    initial = copy.deepcopy(model)

    # Each rank has every ranks-th image: none twice, so with three ranks not as many on each.
    mine = TensorDataset(torch.arange(len(train[1]))[rank::ranks], *(tensor[rank::ranks] for tensor in train))
    loader = DataLoader(mine, config.micro_batch_size, shuffle=True, generator=torch.Generator().manual_seed(rank))
    ddp = DistributedDataParallel(model)
    optimizer, schedule = make_optimizer(model, config, num_updates(len(train[1]), config, ranks))
    accumulator = Accumulator(
        ddp,
        optimizer,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        max_norm=config.max_norm,
        scheduler=schedule,
    )

    seen: list[list[int]] = []  # which images each update took, on this rank
    gradients: list[Tensor] = []
    updates: list[Update] = []
    start = time.perf_counter()
    bar = tqdm(total=schedule.T_max, unit="update", disable=None if rank == 0 else True)
    for _ in range(config.epochs):
        for window in accumulator.windows(loader):
            seen.append([])
            for indices, images, labels in window:
                seen[-1] += indices.tolist()
                window.backward(cross_entropy(ddp(images), labels))
            gradients.append(flat([p.grad for p in model.parameters()]))
            updates.append(window.step())
            bar.update()
            bar.set_postfix(loss=f"{updates[-1].loss:.4f}")
    bar.close()
    seconds = time.perf_counter() - start

    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, seen)
    status = 0
    if rank == 0:
        samples = sum(update.counts["samples"] for update in updates)
        print(f"{len(updates)} updates on {ranks} ranks, {samples} samples in {seconds:.1f} s")
        print(f"micro-batches per update on rank 0: {sorted({update.micro_batches for update in updates})}")
        print(f"loss {updates[0].loss:.4f} -> {updates[-1].loss:.4f}, test accuracy {accuracy(model, test):.1%}")
        status = prove(initial, model, train, everyone, gradients, config)
    dist.barrier()  # the others wait for the proof, which is made on rank 0
    dist.destroy_process_group()
    return status


def prove(
    reference: nn.Module,
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    everyone: list[list[list[int]]],
    gradients: list[Tensor],
    config: Config,
) -> int:
    """The same training in one process, with each update's images in one batch."""
    images, labels = train
    optimizer, schedule = make_optimizer(reference, config, len(gradients))
    worst = 0.0
    for windows, gradient in zip(zip(*everyone, strict=True), gradients, strict=True):
        batch = torch.tensor([index for window in windows for index in window])
        cross_entropy(reference(images[batch]), labels[batch]).backward()
        exact = flat([p.grad for p in reference.parameters()])
        worst = max(worst, float((gradient - exact).norm() / exact.norm()))
        nn.utils.clip_grad_norm_(reference.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    exact = flat([p.detach() for p in reference.parameters()])
    apart = float((flat([p.detach() for p in model.parameters()]) - exact).norm() / exact.norm())
    bound = BOUNDS[config.dtype]
    good = max(worst, apart) <= bound
    print("against the same training with one big batch per update, in one process:")
    print(f"  largest relative difference of a gradient  {worst:.1e}")
    print(f"  relative difference of the final weights   {apart:.1e}")
    print(f"  {'equal' if good else 'NOT EQUAL'} ({config.dtype}, bound {bound:.0e})")
    return 0 if good else 1


def digits(config: Config) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images [n, 1, 8, 8] and labels, to train and to test on."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=getattr(torch, config.dtype)).unsqueeze(1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed))
    held_out = len(labels) // 5
    test, train = order[:held_out], order[held_out:]
    return (images[train], labels[train]), (images[test], labels[test])


def make_model(config: Config) -> nn.Module:
    torch.manual_seed(config.seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),  # not BatchNorm, whose statistics are those of the micro-batch
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).to(getattr(torch, config.dtype))


def make_optimizer(model: nn.Module, config: Config, updates: int) -> tuple[SGD, CosineAnnealingLR]:
    optimizer = SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    return optimizer, CosineAnnealingLR(optimizer, updates)


def num_updates(samples: int, config: Config, ranks: int) -> int:
    """The rank with the most images says how many windows an epoch has."""
    steps = -(-config.batch_size // (ranks * config.micro_batch_size))
    return config.epochs * -(-samples // (ranks * config.micro_batch_size * steps))


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def read_config() -> Config:
    """The file's keys, then those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).parent.parent / "configs" / "digits.toml",
        help="a TOML file; options beat its keys",
    )
    known = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    for field in dataclasses.fields(Config):
        option, text = f"--{field.name.replace('_', '-')}", f"where the file has none: {field.default}"
        parser.add_argument(option, type=known[field.name], default=None, help=text)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    path = given.pop("config")
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        stop(f"{path} is not there, expected a file like configs/digits.toml")
    except tomllib.TOMLDecodeError as error:
        stop(f"{path} is not TOML: {error}")
    for name, value in values.items():
        if name not in known:
            stop(f"{path} has {name!r}, which is not known; known are {', '.join(known)}")
        if type(value) is not known[name] and not (known[name] is float and type(value) is int):
            stop(f"{path} has {name} = {value!r}, expected {known[name].__name__}")
    config = Config(**{**values, **given})
    for name, value in dataclasses.asdict(config).items():
        if not isinstance(value, str) and not value > 0 and name != "seed":
            stop(f"{name}={value!r}, expected a number above 0")
    if config.dtype not in BOUNDS:
        stop(f"dtype={config.dtype!r}, expected one of {', '.join(BOUNDS)}")
    return config


def stop(message: str) -> NoReturn:
    print(f"demo: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    raise SystemExit(main())
