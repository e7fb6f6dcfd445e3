"""DeepSpeed: an engine of any ZeRO stage, which owns the backward and the step.

| stage | sync="last"                                       | sync="every"               |
| ----- | ------------------------------------------------- | -------------------------- |
| 0, 1  | no_sync, one all-reduce after the last backward   | -                          |
| 2, 3  | coalesced: one reduction after the last backward  | a reduction per micro-step |

Stage 1 coalesces too where its config has `overlap_comm`, with which no_sync keeps nothing back.

An engine whose config says `"managed_gradient_accumulation": false` (0.19.4) leaves the window to the caller; its
stages 2 and 3 reduce in each backward. Those of a managed one do too, with a warning, where it cannot coalesce (before
0.19.2, or if its config asks for sums in another dtype than that of the model, in which coalescing adds up). In stages
that communicate in each micro-step, ranks with fewer micro-batches stand in.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter import Prepared
from ..engines.averaging import sparse_embeddings
from ..engines.base import Engine, Owned, Sync
from ..engines.private.autograd import is_reached
from ..law import DistaccumError, Plan, ranks_where, shorten, warn
from ..norms import total_norm
from .private import deepspeed as private

# The way in which backwards are kept from reducing.
Form = Literal["no_sync", "coalesced", "each"]


@final
class DeepSpeedEngine(Engine):
    name = "DeepSpeed"

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        deepspeed = sys.modules.get("deepspeed")
        kind = getattr(deepspeed, "DeepSpeedEngine", None)
        return kind is not None and isinstance(module, kind)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        engines = [module for model in models for module in model.modules() if self.wraps(module)]
        if len(engines) > 1:
            raise ValueError("several DeepSpeed engines in one Accumulator, expected one; give each its own")
        engine: Any = engines[0]
        self._deepspeed = engine
        self._stage = int(engine.zero_optimization_stage())
        self.hides_parameters = self._stage == 3
        self._optimizer: Any = engine.optimizer
        # The ids of parameters with sparse gradients: by module, then by the last gradient.
        self._sparse = {id(weight) for weight in sparse_embeddings([engine.module]).values() if weight.requires_grad}
        self._is_managed = bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())
        _refuse_what_cannot_accumulate(engine, models)
        if self._stage and self._sparse:
            raise ValueError(
                f"an embedding with sparse=True under ZeRO stage {self._stage}, which partitions gradients that are "
                "dense; use stage 0, or sparse=False"
            )
        self._form = _choose_form(engine, sync, self._is_managed)
        # Whether optimizer states, and the gradients of their step, live on the host.
        offloads = getattr(self._optimizer, "cpu_offload", getattr(self._optimizer, "offload_optimizer", False))
        self._offloads = bool(offloads)
        if self._form == "each" and self._offloads and not hasattr(self._optimizer, private.FINALIZE):
            raise ValueError(
                f"ZeRO stage {self._stage} offloads its optimizer and reduces in each micro-step, and this version of "
                "DeepSpeed then forgets the gradient of a module that the last micro-batch does not use (0.19.4 does "
                "not); use sync='last', or leave offload_optimizer out"
            )
        if self._stage < 2:
            self.policies = ("last",)
        group: Any = engine.data_parallel_group or dist.group.WORLD
        super().__init__(models, sync, group)
        self.lockstep = self._stage == 3 or (self._stage == 2 and self._form != "coalesced")
        self.owns = _owned(engine)
        self.run_backward = lambda losses, _: engine.backward(losses[0])
        self._context = ExitStack()
        self._holds = False  # gradients of a window that was not stepped
        self._step_id: int | None = None
        # The objects with a step() of their own; a hook guards that of a torch optimizer.
        own = [] if isinstance(self._optimizer, Optimizer) else [self._optimizer]
        self._stepped_by_caller: list[Any] = [engine, *own]
        weakref.finalize(self, _allow_steps, self._stepped_by_caller)

    def guarded(self) -> list[Optimizer]:
        return [one for one in self._own_optimizers() if isinstance(one, Optimizer)]

    def _own_optimizers(self) -> list[Any]:
        """The optimizers that deepspeed.initialize returned and got, each once."""
        named = (getattr(self._deepspeed, name, None) for name in ("basic_optimizer", "client_optimizer"))
        every = (self._optimizer, getattr(self._optimizer, "optimizer", None), *named)
        return list({id(one): one for one in every if one is not None}.values())

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        for one in given.optimizers:
            if not any(one is other for other in self._own_optimizers()):
                raise ValueError(
                    f"optimizer is a {type(one).__name__} that the DeepSpeed engine does not own; pass the one that "
                    "deepspeed.initialize returned, or leave it out: window.step() steps the engine"
                )
        if given.scaler is not None:
            raise ValueError(f"scaler with {self.name}, which scales losses itself; leave it out")
        clips = float(self._deepspeed.gradient_clipping() or 0.0)
        wanted = 0.0 if max_norm is None or max_norm == float("inf") else max_norm
        if clips != wanted:
            raise DistaccumError(
                f"DeepSpeed clips at {clips:g} (1.0 where its config does not say) and max_norm={max_norm}; put "
                f'"gradient_clipping": {wanted:g} into its config, or pass max_norm={clips or None}. (Accelerate drops '
                "DeepSpeedPlugin(gradient_clipping=0.0): give it a config with that line)"
            )
        if "finite" in self.owns:
            is_blind = None if "scale" in self.owns else private.why_blind(self._optimizer)
            if is_blind is not None and on_nonfinite != "ignore":
                raise ValueError(
                    f"on_nonfinite={on_nonfinite!r} with {self.name}, which steps gradients that are not finite "
                    f"{is_blind}, or say 'ignore'"
                )
            if is_blind is None and on_nonfinite == "ignore":
                raise ValueError(
                    f"on_nonfinite='ignore' with {self.name}, which looks at each gradient and skips what is not "
                    "finite; say 'raise' or 'skip'"
                )
        given.optimizers = []  # the engine steps, and its schedule too
        given.schedulers = [one for one in given.schedulers if one is not self._deepspeed.lr_scheduler]

    # A window

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if self.lockstep and self.peers.num_ranks > 1:
            could_coalesce = self._stage == 2 and self._is_managed
            self.refuse_left_out_terms(plan, ", or use sync='last'" if could_coalesce else "")
        if plan.some_rank_is_dry and getattr(self._optimizer, "immediate_grad_update", False):
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches, and a BF16_Optimizer with immediate_grad_update "
                'takes gradients from backward alone; set "immediate_grad_update": false (the default) in the "bf16" '
                "part of its config, or give each rank a micro-batch"
            )
        average = getattr(self._deepspeed, "gradient_average", True)
        self.divisor = self.peers.num_ranks if average else 1  # "gradient_allreduce_op": "sum"

    def will_reduce(self, reduce: bool) -> bool:
        return self._form == "each"

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        for one in self._stepped_by_caller:
            one.step = _refuse_step  # on the instance, until the window is stepped or discarded
        self._holds, self._step_id = True, None
        if self._stage == 3 or self._form == "each":
            for partition in private.kept_partitions(self._optimizer):
                partition.zero_()
        if self._form == "coalesced":
            self._context.enter_context(self._deepspeed.coalesce_grad_reduction())

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        engine = self._deepspeed
        if self._form == "each" and self._stage == 3:
            # ZeRO-3 takes the backwards between two forwards for one, and keeps the last one's gradient.
            step_id = getattr(self._optimizer, "micro_step_id", None)  # each forward changes it
            if step_id is not None and step_id == self._step_id:
                raise DistaccumError(
                    "a second backward without a forward before it: ZeRO stage 3 would keep only the last one's "
                    "gradient; run the forward again for each part, or coalesce (sync='last' on a managed engine)"
                )
            self._step_id = step_id
        # engine.backward takes no seed.
        weighted = [loss * seed for loss, seed in zip(losses, seeds, strict=True)]
        loss: Any = weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()
        if self._form == "each":
            if self._is_managed:
                engine.set_gradient_accumulation_boundary(reduce and not self._offloads)
            if self._stage == 2 and self.peers.num_ranks > 1:
                loss.register_hook(self._refuse_another_use)  # runs in backward, before anything is reduced
        with engine.no_sync() if self._is_managed and self._form == "no_sync" else nullcontext():
            self.run_backward([loss], [])

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        stay = self._form != "each" and not hasattr(self._optimizer, "get_grads_for_norm")
        return self.parameters() if stay else ()

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        if self._form == "each":
            return (
                "which reduces in each micro-step here and shows no rank's own; use sync='last' with DeepSpeed 0.19.2"
            )
        if "scale" in self.owns:
            return "which scales the loss by itself (fp16); train in bf16"
        if hasattr(self._optimizer, "get_grads_for_norm"):
            return f"whose {type(self._optimizer).__name__} keeps gradients elsewhere; use ZeRO stage 2 or 3"
        return None

    def _refuse_another_use(self, _: Tensor) -> None:
        """Each rank fills a bucket with the gradients of its own backward, and takes other ranks' for the same."""
        trained = (named for named in self._deepspeed.module.named_parameters() if named[1].requires_grad)
        unused = [name for name, parameter in trained if not is_reached(parameter)]
        digests = self.peers.gather([float(zlib.crc32(repr(unused).encode()))])
        if all(digest == digests[0] for digest in digests):
            return
        by_rank = [set(names) for names in self.peers.gather_objects(unused)]
        differ = sorted(set.union(*by_rank) - set.intersection(*by_rank))
        without = ranks_where([differ[0] in names for names in by_rank])
        raise DistaccumError(
            f"rank {without} does not use {differ[0]} in this micro-batch and another rank does (of "
            f"{shorten(differ)}), and ZeRO stage 2 reduces in each micro-step the gradients of a rank's own backward; "
            "use the same modules on all ranks" + (", or sync='last'" if self.sync == "every" else "")
        )

    def finish(self) -> None:
        if self._stage < 3 and self._form in ("no_sync", "coalesced"):
            parameters, sets_up = self.parameters(), self._form == "no_sync"
            private.give_all_a_gradient(self._optimizer, parameters, self._sparse, sets_up=sets_up)
        if self._form == "each" and self._offloads and self._is_managed:  # an unmanaged engine does it in step
            getattr(self._optimizer, private.FINALIZE)()
            self._deepspeed.set_gradient_accumulation_boundary(True)
        if self._form == "no_sync":
            private.set_boundary(self._deepspeed, True)
            self._deepspeed.allreduce_gradients()
        self._context.close()

    def release(self) -> None:
        private.set_boundary(self._deepspeed, None)  # to the engine each step is one

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        super().clear(parameters)
        _allow_steps(self._stepped_by_caller)
        if self._holds:
            # With nothing to reduce, leaving the context sends nothing.
            self._context.close()
            private.discard_window(self._deepspeed, self._stage)
            self._holds = False

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        if "norm" in self.owns:  # after the step
            norm = self._deepspeed.get_global_grad_norm()
            return (
                norm if isinstance(norm, Tensor) else torch.tensor(float("nan" if norm is None else norm), device="cpu")
            )
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if hasattr(self._optimizer, "get_grads_for_norm"):  # BF16_Optimizer, which keeps them elsewhere
            found = self._optimizer.get_grads_for_norm()
            gradients = list(found[0] if isinstance(found, tuple) else found)
        return total_norm(gradients, kind, over)

    def step(self, optimizers: Sequence[Optimizer]) -> str | None:
        engine = self._deepspeed
        _allow_steps(self._stepped_by_caller)
        found = engine.enable_backward_allreduce
        engine.enable_backward_allreduce = self._form != "no_sync"  # an unmanaged engine would reduce in step, again
        try:
            engine.step()
        finally:
            engine.enable_backward_allreduce = found
        self._holds = not engine.was_step_applied()  # a skipped step leaves gradients in some places
        if not self._holds:
            return None
        return "the scaled gradients overflowed" if "scale" in self.owns else "a gradient is not finite"


def _refuse_step(*_: object, **__: object) -> None:
    raise DistaccumError(
        "the DeepSpeed engine is stepped in the window, whose gradients belong together; leave engine.step() out (and "
        "accelerator.backward(), which calls it): window.step() steps the engine"
    )


def _allow_steps(stepped_by_caller: Sequence[Any]) -> None:
    for one in stepped_by_caller:
        one.__dict__.pop("step", None)


def _owned(engine: Any) -> frozenset[Owned]:
    """ZeRO checks the gradient itself, skips a step that is not finite on all ranks, and keeps the norm."""
    looks = private.knows_norm(engine.optimizer) or engine.fp16_enabled()
    more: list[Owned] = [*(("norm", "finite") if looks else ()), *(("scale",) if engine.fp16_enabled() else ())]
    return frozenset(("step", "clip", *more))


def _refuse_what_cannot_accumulate(engine: Any, models: Sequence[nn.Module]) -> None:
    own = {id(p) for p in engine.module.parameters()}
    outside = [n for model in models for n, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if outside:
        raise ValueError(
            f"{shorten(outside)} is trained and outside of the DeepSpeed engine, which neither reduces nor steps it; "
            "put it into the module that deepspeed.initialize gets"
        )
    if engine.optimizer is None:
        raise ValueError("the DeepSpeed engine has no optimizer; give deepspeed.initialize one")
    if engine.gradient_accumulation_steps() > 1:
        raise DistaccumError(
            f"DeepSpeed accumulates over {engine.gradient_accumulation_steps()} steps by itself, which would divide "
            'the loss a second time and skip steps; put "gradient_accumulation_steps": 1 into its config'
        )
    for what, given in {
        "mixture-of-experts layers": getattr(engine, "has_moe_layers", False),
        "sequence parallelism": getattr(engine, "sequence_parallel_size", 1) > 1,
        "ZenFlow": getattr(engine, "zenflow", False),
    }.items():
        if given:
            raise ValueError(f"DeepSpeed with {what} reduces in its own way, for which there is no engine here")
    if not getattr(engine, "enable_backward_allreduce", True):
        raise ValueError("DeepSpeed with its all-reduce turned off: nothing would reduce; turn it on")
    if engine.zero_optimization_stage() == 0 and engine.fp16_enabled() and hasattr(engine, "scale"):
        raise ValueError(
            "ZeRO stage 0 with fp16: this version of DeepSpeed divides the gradient by a loss scale that it did not "
            "multiply the loss by; use stage 1, 2 or 3, or bf16"
        )


def _choose_form(engine: Any, sync: Sync, is_managed: bool) -> Form:
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage == 1 and getattr(optimizer, "overlap_comm", False):
        # Its hooks send in each backward, which no_sync does not prevent.
        if not private.can_coalesce(optimizer):
            raise ValueError(
                'ZeRO stage 1 with "overlap_comm": true reduces within each backward, and this version of DeepSpeed '
                'cannot be kept from it (0.19.2 can); put "overlap_comm": false into its config'
            )
        return "coalesced"
    if stage < 2:
        return "no_sync"
    if sync != "last":
        return "each"
    why = "" if is_managed else 'its config says "managed_gradient_accumulation": false'
    dtype = getattr(optimizer, "gradient_accumulation_dtype", None)
    if not why and not hasattr(engine, "coalesce_grad_reduction"):
        why = "this version of DeepSpeed cannot coalesce them (0.19.2 can)"
    elif not why and not private.can_coalesce(optimizer):
        why = f"{type(optimizer).__name__} cannot coalesce them"
    elif not why and dtype is not None and dtype != next(engine.module.parameters()).dtype:
        why = f"coalesced they would not add up in {dtype}, as the config asks"
    if why and engine.global_rank == 0:
        warn(f"ZeRO stage {stage} reduces gradients in each micro-step: {why}")
    return "each" if why else "coalesced"
