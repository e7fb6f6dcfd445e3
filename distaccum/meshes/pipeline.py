"""A schedule of torch.distributed.pipelining, which runs the forwards and backwards of a micro-batch in one call.

It cuts the micro-batch into chunks, and its ranks hold stages of the model. The engine is that of the stages' own
wrappers. This module adds what a schedule needs: each chunk's loss is multiplied by its share, because the schedule
gives backward no seed, and gradients stay unreduced until the window's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch import count_samples, cut_batch
from ..law import Counts, DistaccumError
from ..private import replaced
from . import private
from .ranks import on_mesh


class PipelineSchedule(Protocol):
    """A schedule of `torch.distributed.pipelining`."""

    scale_grads: bool

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


def _is_sharded(module: nn.Module) -> bool:
    """Returns whether the module is under fully_shard; imports nothing."""
    return hasattr(module, "set_requires_gradient_sync")


@final
class Pipeline:
    """The schedule, and the stages of the model on this rank."""

    def __init__(self, models: Sequence[Any], adapters: Sequence[Any] = ()) -> None:
        schedule = next(model for model in models if not isinstance(model, nn.Module))
        name = type(schedule).__name__
        if len(models) > 1:
            raise ValueError(
                f"model holds a {name} and {len(models) - 1} more, expected the schedule alone; give what it does not "
                "train an Accumulator of its own"
            )
        if any(adapter.scales_losses for adapter in adapters):
            raise ValueError(
                f"accelerator with a {name}, which runs forward and backward of its chunks itself; leave it out"
            )
        self._schedule = schedule
        self._stages = private.stages_of(schedule)
        if schedule.scale_grads:
            raise ValueError(
                f"the {name} divides gradients by its number of chunks (scale_grads=True, torch's default), and so "
                "does the share of each; make it with scale_grads=False"
            )
        self.num_chunks, loss_fn = private.chunks_and_loss(schedule)
        if loss_fn is None:
            raise ValueError(f"the {name} has no loss_fn, so it runs no backward; give it one on every rank")
        self.modules: list[nn.Module] = [stage.submod for stage in self._stages]
        self.group: Any = self._stages[0].group or torch.distributed.group.WORLD
        self.splits_backward = private.splits_backward(schedule)
        is_sharded = any(_is_sharded(one) for module in self.modules for one in module.modules())
        if is_sharded and not all(map(_is_sharded, self.modules)):
            raise ValueError(
                f"fully_shard was called on a module inside of a stage of the {name} and not on the stage's own, which "
                "is where the schedule postpones the reduction; call it on the stage's module too"
            )
        if is_sharded and self.splits_backward:
            raise ValueError(
                f"stages under fully_shard with a {name}, which runs backward for inputs and for weights apart: torch "
                "gives weights that are parts again after forward no gradient then; use Schedule1F1B or "
                "ScheduleInterleaved1F1B, or DistributedDataParallel"
            )
        if is_sharded and not private.postpones_reduction(schedule):
            raise ValueError(
                f"a stage of the {name} is under fully_shard, whose gradients this version of torch reduces in each "
                "call of the schedule; use torch 2.15, or DistributedDataParallel"
            )
        self._options = {"finalize_gradients": False} if is_sharded else {}
        # The samples in each micro-batch, once a call has fixed them.
        self._length: int | None = None
        self._counts: list[list[Counts]] = []  # of each micro-batch's chunks

    def join(self, engine: Any) -> None:
        """Turns `engine` into one for stages: nothing is reduced before the window's end."""
        if "stages" in engine.owns:
            raise ValueError(
                f"stages of a pipeline under {engine.name}, expected DistributedDataParallel or fully_shard"
            )
        if engine.sync != "last":
            raise ValueError(
                f"sync={engine.sync!r} with a pipeline, whose stages reduce at the window's end; use 'last'"
            )
        engine.policies = ("last",)
        engine.recount = self.recount
        engine.run = self.run
        engine.run_backward = self._refuse_backward
        begin = engine.begin
        engine.begin = lambda plan, parameters: begin(plan._replace(reduce_afterwards=True), parameters)
        engine.peers = on_mesh(engine.peers)
        engine.peers.add_stages(self.group)
        if self.splits_backward:
            engine.why_no_local_grad = lambda _: "whose schedule runs backward for weights apart"
            self._refuse_frozen_beginning(engine)

    def _refuse_frozen_beginning(self, engine: Any) -> None:
        """Raises if the first stage is frozen: a stage whose inputs need no gradient then gets none for its weights."""
        of_stages = zip(self._stages, self.modules, strict=True)
        trained = [stage.stage_index for stage, one in of_stages if any(p.requires_grad for p in one.parameters())]
        first = min((index for one in engine.peers.gather_objects(trained, everyone=True) for index in one), default=0)
        if first:
            raise ValueError(
                f"stages before {first} are frozen, and the {type(self._schedule).__name__} runs backward for inputs "
                f"and for weights apart: torch gives the weights of stage {first}, whose inputs need no gradient, "
                "none; use Schedule1F1B or ScheduleInterleaved1F1B"
            )

    def recount(self, micro_batches: Sequence[Any], counts_of: Callable[[list[Any]], list[Counts]]) -> list[Counts]:
        """The denominators of each micro-batch; keeps those of its chunks, which `run` weighs one by one."""
        counts = iter(counts_of([piece for pieces in self._pieces(micro_batches) for piece in pieces]))
        self._counts = [[next(counts) for _ in range(self.num_chunks)] for _ in micro_batches]
        return [tuple(map(sum, zip(*of_pieces, strict=True))) for of_pieces in self._counts]

    def _pieces(self, micro_batches: Sequence[Any]) -> list[list[Any]]:
        """The chunks that the schedule cuts each micro-batch into."""
        if self.num_chunks == 1:
            return [[micro_batch] for micro_batch in micro_batches]
        lengths = list(map(count_samples, micro_batches))
        name = type(self._schedule).__name__
        uneven = next((length for length in lengths if length % self.num_chunks), None)
        if uneven is not None:
            raise ValueError(
                f"a micro-batch has {uneven} samples, and the {name} cuts it into {self.num_chunks} chunks of one "
                f"shape; give it a multiple of {self.num_chunks}"
            )
        known = self._length if private.knows_shapes(self._schedule) else None
        for length in lengths:
            known = known or length
            if length != known:
                raise ValueError(
                    f"a micro-batch has {length} samples and another {known}, and stages of the {name} exchange "
                    "tensors of one shape; pad the short one with samples that do not count, or drop it (drop_last)"
                )
        self._length = known
        return [
            list(cut_batch(one, [length // self.num_chunks] * self.num_chunks, length))
            for one, length in zip(micro_batches, lengths, strict=True)
        ]

    def run(self, micro: Any, weigh: Callable[..., Any], inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Runs all chunks through all stages, forward and backward; returns what the schedule returns."""
        if own := sorted(options.keys() & {"arg_mbs", "kwarg_mbs", "target_mbs", "losses"}):
            raise DistaccumError(
                f"run() got {', '.join(own)}, of chunks, and each chunk's count is of an even cut along the first "
                "dimension; give the whole micro-batch, window.run(inputs, target=labels), and read update.losses"
            )
        target = options.pop("target", None)
        if any(stage.is_last for stage in self._stages):
            options["target"] = target
        is_first = any(stage.is_first for stage in self._stages)
        with ExitStack() as stack:
            for stage in self._stages:
                # The schedule would make DDP reduce.
                if isinstance(stage.submod, DistributedDataParallel):
                    stack.enter_context(replaced(stage, submod=stage.submod.module))
            stack.enter_context(private.weighing(self._schedule, partial(self._weigh_chunk, micro, weigh)))
            return self._schedule.step(*(inputs if is_first else ()), **options, **self._options)

    def _refuse_backward(self, losses: object, seeds: object) -> None:
        raise DistaccumError(
            f"window.backward() with a {type(self._schedule).__name__}, which runs forward and backward itself; call "
            "window.run(inputs, target=labels) on every stage"
        )

    def _weigh_chunk(
        self, micro: Any, weigh: Callable[..., Any], piece: int, take_loss: Callable[[], Any]
    ) -> Tensor | None:
        """The loss of a chunk times its share, as a schedule gives backward no seed; None if nothing in it counts."""
        counts = () if micro is None else self._counts[micro.number][piece]
        if not any(counts):
            return None
        loss = take_loss()
        named = loss if isinstance(loss, Mapping) else {}
        losses, seeds = weigh(counts, micro, None if named else loss, named)
        return torch.stack([one * seed for one, seed in zip(losses, seeds, strict=True)]).sum()
