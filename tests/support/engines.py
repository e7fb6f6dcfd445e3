"""The wrappers on which the law is tested: how each is made, and how every rank reads all of its weights."""

import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, Extension
from tests.support.oracle import Off, everything, step_off
from tests.support.problems import CASES, Batch, Net, make_net, micro_batches_of
from tests.support.ranks import mesh_of
from tests.support.versions import has
from tests.support.windows import weights

sys.path.append(str(Path(__file__).parents[2] / "launch"))
import wrappers
from wrappers import zero_weights


@dataclass(frozen=True)
class Kind:
    """One way to wrap a net for training with SGD."""

    wrap: Callable[..., tuple[nn.Module, Any]]  # net, learning rate, max_norm=None -> model, optimizer
    weights: Callable[[nn.Module], Tensor]  # all in one vector, in the order of the net's parameters
    policies: tuple[str, ...] = ("last", "every")
    world: int = 2
    dtype: torch.dtype = torch.float64
    extensions: Callable[[], Sequence[Extension]] = tuple

    @property
    def bound(self) -> float:
        return 1e-10 if self.dtype == torch.float64 else 1e-5


def with_sgd(model: nn.Module, lr: float) -> tuple[nn.Module, SGD]:
    return model, SGD(model.parameters(), lr=lr)


def plain(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, SGD]:
    return with_sgd(net, lr)


def ddp(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, SGD]:
    return with_sgd(wrappers.ddp(net, find_unused_parameters=True), lr)  # no loss uses the router


def ddp_with_views(net: Any, lr: float, max_norm: float | None = None) -> tuple[nn.Module, SGD]:
    net.router.requires_grad_(False)  # as no view stays a gradient where DDP looks for unused parameters
    return with_sgd(wrappers.ddp(net, gradient_as_bucket_view=True), lr)


def layers(net: Any) -> list[nn.Module]:
    return [net.body[0], net.body[2]]


def fully_sharded(*, parts: bool = True, shape: tuple[int, ...] | None = None, **options: Any):
    def wrapped(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, SGD]:
        mesh = mesh_of(shape, "replicas", "shards") if shape else None
        return with_sgd(wrappers.fully_sharded(net, layers(net) if parts else [], mesh=mesh, **options), lr)

    return wrapped


def fsdp1(strategy: str, *, parts: bool = True, **options: Any):
    def wrapped(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, SGD]:
        mesh = {"device_mesh": mesh_of((2, 2), "replicas", "shards")} if strategy.startswith("HYBRID") else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
            found = wrappers.fsdp1(net, layers(net) if parts else [], strategy=strategy, **mesh, **options)
        return with_sgd(found, lr)

    return wrapped


def summoned_weights(model: nn.Module) -> Tensor:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):
        by_name = dict(model.named_parameters())
        tidy = {name.replace("_fsdp_wrapped_module.", ""): p.detach().flatten() for name, p in by_name.items()}
        return torch.cat([tidy[name] for name, _ in Net().named_parameters()]).clone()


def zero(stage: int, **config: Any):
    """A DeepSpeed engine."""

    def wrapped(net: nn.Module, lr: float, max_norm: float | None = None) -> tuple[nn.Module, Any]:
        import_deepspeed()
        return wrappers.deepspeed(net, SGD(net.parameters(), lr=lr), zero_config(stage, max_norm, **config))

    return wrapped


def zero_config(stage: int, max_norm: float | None = None, **config: Any) -> dict[str, Any]:
    clipping = 0.0 if max_norm in (None, math.inf) else max_norm
    return wrappers.zero_config(stage, **{"gradient_clipping": clipping, **config})


def import_deepspeed() -> Any:
    """Uses this process's gloo group and compiles nothing; the environment stays set for the tests."""
    os.environ.update({**wrappers.deepspeed_variables(), "LOCAL_RANK": str(dist.get_rank())})
    warnings.filterwarnings("ignore", message=".*model_fields.*")  # of DeepSpeed 0.18, with a newer pydantic
    warnings.filterwarnings("ignore", category=FutureWarning, module="deepspeed")
    if not COALESCES:
        warnings.filterwarnings("ignore", message="ZeRO stage . reduces gradients in each micro-step")
    return wrappers.import_deepspeed()


COALESCES = has("deepspeed", "0.19.2")
HAS_UNMANAGED = has("deepspeed", "0.19.4")


def zero_kind(stage: int, world: int = 2, **config: Any) -> Kind:
    if stage < 2:
        policies: tuple[str, ...] = ("last",)
    else:
        policies = ("last", "every") if COALESCES and not config else ("every",)  # elsewhere 'last' warns
    return Kind(zero(stage, **config), zero_weights, policies, world, torch.float32)


UNMANAGED = {"managed_gradient_accumulation": False}
SHARDED = ("last", "every", "gathered")
HYBRID = (*SHARDED, "replicas")


def wide_sums() -> list[Any]:
    from distaccum.extensions import WideSums  # which the core alone has not

    return [WideSums(torch.float64)]


KINDS: dict[str, Kind] = {
    "plain": Kind(plain, weights, world=1),
    "DDP": Kind(ddp, weights),
    "DDP, bucket views": Kind(ddp_with_views, weights),
    "DDP, three ranks": Kind(ddp, weights, world=3),
    "DDP, one rank": Kind(ddp, weights, world=1),
    "DDP, wide sums": Kind(ddp, weights, dtype=torch.float32, extensions=wide_sums),
    "FSDP2": Kind(fully_sharded(), weights, SHARDED),
    "FSDP2, root only": Kind(fully_sharded(parts=False), weights, SHARDED),
    "FSDP2, parts": Kind(fully_sharded(root=False), weights, SHARDED),
    "FSDP2, one rank": Kind(fully_sharded(), weights, SHARDED, world=1),
    "FSDP2, kept after forward": Kind(fully_sharded(reshard_after_forward=False), weights, ("last",)),
    "HSDP, 2 replicas of 1 shard": Kind(fully_sharded(shape=(2, 1)), weights, HYBRID),
    "HSDP, 2 replicas of 2 shards": Kind(fully_sharded(shape=(2, 2)), weights, HYBRID, world=4),
    "FSDP1": Kind(fsdp1("FULL_SHARD"), summoned_weights),
    "FSDP1, flat parameters": Kind(fsdp1("FULL_SHARD", use_orig_params=False), summoned_weights),
    "FSDP1, root only": Kind(fsdp1("FULL_SHARD", parts=False), summoned_weights),
    "FSDP1, parts": Kind(fsdp1("FULL_SHARD", root=False), summoned_weights),
    "FSDP1, SHARD_GRAD_OP": Kind(fsdp1("SHARD_GRAD_OP"), summoned_weights),
    "FSDP1, NO_SHARD": Kind(fsdp1("NO_SHARD"), summoned_weights),
    "FSDP1, HYBRID_SHARD": Kind(fsdp1("HYBRID_SHARD"), summoned_weights, world=4),
    **{f"ZeRO {stage}": zero_kind(stage) for stage in range(4)},
    "ZeRO 2, one rank": zero_kind(2, world=1),
    **({f"ZeRO {stage}, unmanaged": zero_kind(stage, **UNMANAGED) for stage in range(4)} if HAS_UNMANAGED else {}),
}


FORMS = {
    "DDP": {},
    "DDP views": {"gradient_as_bucket_view": True},
    "DDP find": {"find_unused_parameters": True},
    "DDP find, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "DDP static": {"static_graph": True},
}


def wrapped(name: str, net: nn.Module, lr: float = 1.0) -> tuple[nn.Module, Any, Callable[[nn.Module], Tensor]]:
    """The model, its SGD, and what reads its weights: of a form of DDP, or of one of `KINDS`."""
    if name in FORMS:
        return *with_sgd(wrappers.ddp(net, **FORMS[name]), lr), weights
    return *KINDS[name].wrap(net, lr), KINDS[name].weights


def freeze(net: Net, names: Sequence[str]) -> Net:
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    return net


class Run:
    """A net under one kind of wrapper; each of its windows is compared with the one big batch."""

    def __init__(self, name: str, case: str = "samples mean", frozen: Sequence[str] = (), **options: Any) -> None:
        self.kind, self.case, self.frozen = KINDS[name], case, frozen
        _, _, reduction, count = CASES[case]
        self.lr = 1 / 32 if reduction == "sum" else 1.0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        net = freeze(make_net(self.kind.dtype), frozen)
        self.model, self.optimizer = self.kind.wrap(net, self.lr, options.get("max_norm"))
        options = {"extensions": self.kind.extensions(), "reduction": reduction, "count": count, **options}
        self.accumulator = Accumulator(self.model, self.optimizer, **options)

    def weights(self) -> Tensor:
        return self.kind.weights(self.model)

    def micro_batches(self, layout: Any, index: int) -> list[Batch]:
        return micro_batches_of(layout, index, self.rank, self.kind.dtype)

    def window(self, layout: Any, index: int, clip: float = math.inf, also: Callable[[], Any] = lambda: None) -> Off:
        """`also` is called after each backward, and between the loop and step()."""
        loss_fn, how, reduction, _ = CASES[self.case]
        window, turns = self.accumulator.window(self.micro_batches(layout, index)), itertools.count()

        def run(micro_batch: Batch) -> None:
            assert window.stand_in == (next(turns) >= len(window))
            window.backward(loss_fn(self.model, {name: micro_batch.pop(name) for name in [*micro_batch]}, how))
            also()

        plain = freeze(make_net(), self.frozen).double()
        whole = everything(layout[: self.world], index, self.kind.dtype)
        of_all = partial(loss_fn, how="mean" if reduction == "sum_to_mean" else how)
        return step_off(self.model, window, plain, whole, of_all, run, clip, self.kind.weights, self.lr, also)


# A window lists the micro-batch sizes of each rank, for up to four ranks.
EVEN = [[3, 1, 2]] * 4
LAYOUTS = [
    [[4], [4], [4], [4]],  # short
    [[1, 6, 2], [5, 3], [2, 2, 9], [1]],  # uneven sizes and numbers
    [[2, 3, 1], [], [1], [4, 4]],  # a dry rank
    [[], [2, 1, 4], [1], []],
]
FOR_ONE_RANK = LAYOUTS[:3]


def windows_off(name: str, sync: str, case: str) -> list[Off]:
    """How far off this rank is in consecutive windows of this loss."""
    run = Run(name, case, sync=sync)
    return [run.window(layout, index) for index, layout in enumerate(LAYOUTS if run.world > 1 else FOR_ONE_RANK)]
