"""DeepSpeed: an engine of any ZeRO stage, which keeps backward and step to itself.

| stage | sync="last"                                       | sync="every"               |
| ----- | ------------------------------------------------- | -------------------------- |
| 0, 1  | no_sync, one all-reduce after the last backward   | -                          |
| 2, 3  | coalesced: one reduction after the last backward  | a reduction per micro-step |

Stage 1 also coalesces if its config has `overlap_comm`, since no_sync then holds nothing back.

An engine whose config says `"managed_gradient_accumulation": false` (0.19.4) leaves the window to the caller; its
stages 2 and 3 reduce in each backward. A managed engine's do so too, with a warning, if it cannot coalesce: before
0.19.2, or if its config asks for sums in another dtype than the model's, in which coalescing adds up. In stages that
communicate in each micro-step, ranks with fewer micro-batches stand in.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from operator import add, mul
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter import Prepared
from ..engines.base import OVERFLOW, Engine, Gradient, Sync, refuse_left_out_terms, sparse_embeddings
from ..law import DistaccumError, Plan
from ..private import replaced
from ..ranks import Groups
from ..text import ranks_where, shorten, warn
from . import private

# How backwards are kept from reducing.
Form = Literal["no_sync", "coalesced", "each"]


@final
class DeepSpeedEngine(Engine):
    name = "DeepSpeed"

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        return isinstance(module, getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ()))

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        engines = [module for model in models for module in model.modules() if self.wraps(module)]
        if len(engines) > 1:
            raise ValueError("several DeepSpeed engines in one Accumulator, expected one; give each its own")
        engine: Any = engines[0]
        self._deepspeed = engine
        self._optimizer = engine.optimizer
        self._stage = int(engine.zero_optimization_stage())
        self._is_managed = bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())
        _refuse_what_cannot_accumulate(engine, models)
        self._form = _choose_form(engine, sync, self._is_managed)
        # Optimizer states, and the gradients that they are stepped with, are on the host.
        self._offloads = any(getattr(self._optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))
        loses = self._offloads and not hasattr(self._optimizer, "finalize_gradient_accumulation_boundary")
        if self._form == "each" and loses:
            raise ValueError(
                f"ZeRO stage {self._stage} offloads its optimizer and reduces in each micro-step, where DeepSpeed "
                "before 0.19.4 loses gradients; use sync='last', or leave offload_optimizer out"
            )
        if self._stage < 2:
            self.policies = ("last",)
        super().__init__(models, sync, engine.data_parallel_group or dist.group.WORLD)
        # Its config may say "gradient_allreduce_op": "sum".
        self.divisor = self.divisor if engine.gradient_average else 1
        self.lockstep = self._stage == 3 or self._form == "each"
        self.owns = frozenset(("step", "sums", "stages", "dtype", *(("parameters",) if self._stage == 3 else ())))
        # DeepSpeed's own optimizers check the gradient, skip non-finite ones, and keep the norm.
        self._scales = engine.fp16_enabled()
        self._judges = self._scales or not isinstance(self._optimizer, Optimizer)
        self.run_backward = lambda losses, _: engine.backward(losses[0])
        self._context = ExitStack()
        # It holds gradients of a window that was not stepped.
        self._holds = False
        # Against steps by the caller in mid-window.
        self._guards = ExitStack()
        weakref.finalize(self, self._guards.close)

    def _own_optimizers(self) -> list[Any]:
        """The optimizers that deepspeed.initialize was given and returned."""
        inner = getattr(self._optimizer, "optimizer", None)
        return [self._optimizer, inner, self._deepspeed.basic_optimizer, self._deepspeed.client_optimizer]

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        for optimizer in given.optimizers:
            if not any(optimizer is own for own in self._own_optimizers()):
                raise ValueError(
                    f"optimizer is a {type(optimizer).__name__} that the DeepSpeed engine does not own; pass the one "
                    "that deepspeed.initialize returned, or leave it out: window.step() steps the engine"
                )
        if given.scaler is not None:
            raise ValueError(f"scaler with {self.name}, which scales losses itself; leave it out")
        clips = float(self._deepspeed.gradient_clipping() or 0.0)
        wanted = 0.0 if max_norm is None or max_norm == float("inf") else max_norm
        if clips != wanted:
            raise DistaccumError(
                f"DeepSpeed clips at {clips:g} (1.0 where its config does not say) and max_norm={max_norm}; put "
                f'"gradient_clipping": {wanted:g} into its config, or pass max_norm={clips or None}'
            )
        why_blind = private.why_blind(self._optimizer) if self._judges and not self._scales else None
        if why_blind is not None and on_nonfinite != "ignore":
            raise ValueError(
                f"on_nonfinite={on_nonfinite!r} with {self.name}, which steps gradients that are not finite "
                f"{why_blind}, or say 'ignore'"
            )
        given.optimizers = []
        given.schedulers = [one for one in given.schedulers if one is not self._deepspeed.lr_scheduler]

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        steps, _ = super().num_micro_steps(plan)
        if self.lockstep and self.peers.num_ranks > 1:
            could_coalesce = self._stage == 2 and self._is_managed
            refuse_left_out_terms(plan, ", or use sync='last'" if could_coalesce else "")
        # DeepSpeed takes only the last for a boundary.
        return steps, 0

    def will_reduce(self, reduce: bool) -> bool:
        return self._form == "each"

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        for owner in (self._deepspeed, *self._own_optimizers()):
            if isinstance(owner, Optimizer):
                # A scheduler may have replaced its step.
                self._guards.callback(owner.register_step_pre_hook(_refuse_step).remove)
            elif owner is self._deepspeed or owner is self._optimizer:
                self._guards.enter_context(replaced(owner, step=_refuse_step))
        self._holds = True
        if self.lockstep:
            for partition in private.kept_partitions(self._optimizer):
                partition.zero_()
        if self._form == "coalesced":
            self._context.enter_context(self._deepspeed.coalesce_grad_reduction())

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self._form == "each":
            # As its forwards do: otherwise a second backward of one forward would overwrite the first one's gradient.
            self._optimizer.clear_backward_seen_flag()
        # engine.backward takes no seed.
        loss = functools.reduce(add, map(mul, losses, seeds))
        if self._form == "each" and self._stage == 2 and self.peers.num_ranks > 1:
            # The hook runs in backward, before anything is reduced.
            loss.register_hook(self._refuse_another_use)
        how: Any = nullcontext()
        if self._is_managed and self._form == "no_sync":
            how = self._deepspeed.no_sync()
        elif self._is_managed and self._form == "each":
            how = private.ending_window(self._deepspeed, reduce and not self._offloads)
        with how:
            self.run_backward([loss], [])

    def grad_leaves(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        stay = self._form != "each" and not hasattr(self._optimizer, "get_grads_for_norm")
        return self.parameters() if stay else ()

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        shows = not self._scales and self.grad_leaves(parameters)
        return None if shows else "which reduces in each micro-step here, trains in fp16 or has BF16_Optimizer; use DDP"

    def _refuse_another_use(self, _: Tensor) -> None:
        """Raises if ranks use different parameters: each buckets its own backward's, and assumes the others' alike."""
        named = self._deepspeed.module.named_parameters()
        unused = {name for name, p in named if p.requires_grad and not private.is_reached(p)}
        by_rank = self.peers.gather_objects(unused)
        if differ := sorted(set.union(*by_rank) - set.intersection(*by_rank)):
            without = ranks_where([differ[0] in names for names in by_rank])
            raise DistaccumError(
                f"rank {without} does not use {differ[0]} in this micro-batch and another rank does (of "
                f"{shorten(differ)}), and ZeRO stage 2 reduces in each micro-step the gradients of a rank's own "
                "backward; use the same modules on all ranks" + (", or sync='last'" if self.sync == "every" else "")
            )

    def finish(self) -> None:
        if not self.lockstep:
            private.give_all_a_gradient(self._optimizer, self.parameters(), sets_up=self._form == "no_sync")
        # An unmanaged engine does so in step().
        if self._form == "each" and self._offloads and self._is_managed:
            self._optimizer.finalize_gradient_accumulation_boundary()
        if self._form == "no_sync":
            with private.ending_window(self._deepspeed, True):
                self._deepspeed.allreduce_gradients()
        self._context.close()

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        super().clear(parameters)
        self._guards.close()
        if self._holds:
            # With nothing left to reduce, leaving the context sends nothing.
            self._context.close()
            private.discard_window(self._deepspeed, self._stage)
            self._holds = False

    def gradient(self, parameters: Sequence[nn.Parameter]) -> Gradient:
        if not self._judges:
            return Gradient(parameters)
        cut: Groups = self.peers.groups if self._stage == 3 else ()
        return Gradient(None, [cut] * len(parameters))

    def step(self, optimizers: Sequence[Optimizer], gradient: Gradient, max_norm: float | None) -> str | None:
        engine = self._deepspeed
        self._guards.close()
        if max_norm is not None:
            gradient.take()  # DeepSpeed clips it
        # An unmanaged engine would reduce again in step.
        with replaced(engine, enable_backward_allreduce=self._form != "no_sync"):
            engine.step()
        # A skipped step leaves gradients in some places.
        self._holds = not engine.was_step_applied()
        if self._judges:
            norm = engine.get_global_grad_norm()
            gradient.known = torch.as_tensor(float("nan") if norm is None else norm)
        if not self._holds:
            return None
        return OVERFLOW if self._scales else "a gradient is not finite"


def _refuse_step(*_: object, **__: object) -> None:
    raise DistaccumError(
        "the DeepSpeed engine is stepped in the window, whose gradients belong together; leave engine.step() out (and "
        "accelerator.backward(), which calls it): window.step() steps the engine"
    )


def _refuse_what_cannot_accumulate(engine: Any, models: Sequence[nn.Module]) -> None:
    own = {id(p) for p in engine.module.parameters()}
    outside = [n for model in models for n, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if outside:
        raise ValueError(
            f"{shorten(outside)} is trained and outside of the DeepSpeed engine, which neither reduces nor steps it; "
            "put it into the module that deepspeed.initialize gets"
        )
    own_steps = engine.gradient_accumulation_steps()
    if own_steps > 1:
        raise DistaccumError(
            f"DeepSpeed accumulates over {own_steps} steps by itself, which would divide "
            'the loss a second time and skip steps; put "gradient_accumulation_steps": 1 into its config'
        )
    sparse = any(weight.requires_grad for weight in sparse_embeddings([engine.module]).values())
    for what, is_given in {
        "mixture-of-experts layers": engine.has_moe_layers,
        "sequence parallelism": getattr(engine, "sequence_parallel_size", 1) > 1,
        "ZenFlow": getattr(engine, "zenflow", False),
        "a pipeline, or its all-reduce turned off": not engine.enable_backward_allreduce,
        '"immediate_grad_update": true': getattr(engine.optimizer, "immediate_grad_update", False),
        "an embedding of sparse gradients": sparse,
    }.items():
        if is_given:
            raise ValueError(f"DeepSpeed with {what}, for which there is no engine here; leave it out")
    if engine.zero_optimization_stage() == 0 and engine.fp16_enabled():
        raise ValueError(
            "ZeRO stage 0 with fp16: DeepSpeed divides the gradient by a loss scale that it did not "
            "multiply the loss by; use stage 1, 2 or 3, or bf16"
        )


def _choose_form(engine: Any, sync: Sync, is_managed: bool) -> Form:
    stage = int(engine.zero_optimization_stage())
    optimizer = engine.optimizer
    can_coalesce = private.can_coalesce(optimizer)
    if stage == 1 and getattr(optimizer, "overlap_comm", False):
        # Its hooks send in each backward, even under no_sync.
        if not can_coalesce:
            raise ValueError(
                'ZeRO stage 1 with "overlap_comm": true reduces within each backward, and this version of DeepSpeed '
                'cannot be kept from it (0.19.2 can); put "overlap_comm": false into its config'
            )
        return "coalesced"
    if stage < 2:
        return "no_sync"
    if sync != "last":
        return "each"
    dtype = optimizer.gradient_accumulation_dtype
    if not is_managed:
        why = 'its config says "managed_gradient_accumulation": false'
    elif not can_coalesce:
        why = "this version of DeepSpeed cannot coalesce them (0.19.2 can)"
    elif dtype != next(engine.module.parameters()).dtype:
        why = f"coalesced they would not add up in {dtype}, as the config asks"
    else:
        return "coalesced"
    if engine.global_rank == 0:
        warn(f"ZeRO stage {stage} reduces gradients in each micro-step: {why}")
    return "each"
