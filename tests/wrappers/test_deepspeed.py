"""DeepSpeed: its known traps, the collectives of each stage, and the refused uses."""

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from distaccum import Accumulator, count_samples
from tests.support.counting import Counting
from tests.support.engines import (
    COALESCES,
    HAS_UNMANAGED,
    UNMANAGED,
    import_deepspeed,
    wrappers,
    zero_config,
    zero_weights,
)
from tests.support.oracle import everything, own, step_off
from tests.support.problems import (
    Choosing,
    make_batch,
    make_net_without_router,
)
from tests.support.ranks import on_ranks
from tests.support.versions import has, needs
from tests.support.windows import loss_of, refused, run_window, warned

F32 = torch.float32
EVEN = [[2, 1, 3]] * 2
UNEVEN = [[2, 1, 3], [4]]


def initialize(stage: int, net: nn.Module | None = None, **config: Any) -> Any:
    net = net or make_net_without_router().float()
    optimizer = SGD(net.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda update: 1.0)
    import_deepspeed()
    return *wrappers.deepspeed(net, optimizer, zero_config(stage, **config), scheduler=schedule), schedule


def off(
    engine: Any, accumulator: Accumulator, layout: Any, index: int = 0, loss_fn: Any = loss_of, read: Any = zero_weights
) -> float:
    """The error of a window's step, compared with the one big batch."""
    window, whole = accumulator.window(own(layout, index, F32)), everything(layout, index, F32)
    return max(step_off(engine, window, make_net_without_router(), whole, loss_fn, read=read))


@on_ranks(2)
def test_named_losses_go_backward_together():
    engine, _, _ = initialize(3)
    accumulator = Accumulator(engine, count={"squares": count_samples, "means": count_samples})

    def losses(net: Any, batch: Any) -> dict[str, torch.Tensor]:
        outputs = net(batch["x"])
        return {"squares": outputs.square().mean(), "means": outputs.mean()}

    assert off(engine, accumulator, UNEVEN, 0, losses) <= 1e-5


def overlapped(stage: int, bucket: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": bucket}}


CONFIGS: list[Any] = [(0, {})]
CONFIGS += [(n, overlapped(n, size)) for n, size in [(1, 40), (1, 10**6), (2, 40), (3, 10**6)]] if COALESCES else []
CONFIGS += [(stage, {"gradient_allreduce_op": "sum"}) for stage in (0, 2)] if has("deepspeed", "0.19.8") else []


@pytest.mark.parametrize(("stage", "config"), CONFIGS, ids=str)
@on_ranks(2)
def test_full_and_short_windows_step_the_engine_exactly(stage, config):
    engine, _, schedule = initialize(stage, **config)
    warnings.filterwarnings("ignore", message="ZeRO stage . reduces gradients in each micro-step")
    accumulator = Accumulator(engine, scheduler=schedule)
    for layout in (UNEVEN, [[4], [5]]):
        assert off(engine, accumulator, layout) <= 1e-5
    assert engine.global_steps == schedule.last_epoch == 2
    assert engine._is_gradient_accumulation_boundary is None, "the engine is restored for a later loop of the caller"


@pytest.mark.skipif(COALESCES, reason="this version lets the library avoid it")
@on_ranks(2)
def test_overlap_comm_at_stage_1_is_refused_with_older_deepspeed():
    engine, _, _ = initialize(1, **overlapped(1, 10**6))
    assert 'put "overlap_comm": false' in refused(lambda: off(engine, Accumulator(engine), EVEN))


def reductions(seen: list[tuple[str, int]]) -> int:
    return sum(size > 30 and ("reduce" in name) for name, size in seen)


# Gradient reductions in each of three micro-steps, after the loop, and in step.
AT_ONCE, IN_EACH = [0, 0, 0, 1, 0], [1, 1, 1, 0, 0]
REDUCTIONS = [
    *((stage, "last", {}, AT_ONCE) for stage in range(4)),
    *((stage, "every", {}, IN_EACH) for stage in (2, 3)),
    (0, "last", UNMANAGED, AT_ONCE),
    (1, "last", UNMANAGED, AT_ONCE),
    (2, "every", UNMANAGED, IN_EACH),
]


def is_supported(stage: int, sync: str, config: dict[str, Any], *_: Any) -> bool:
    """Whether this version of DeepSpeed has it."""
    return (COALESCES or stage < 2 or sync == "every") and (HAS_UNMANAGED or not config)


@pytest.mark.parametrize(("stage", "sync", "config", "expected"), [one for one in REDUCTIONS if is_supported(*one)])
@on_ranks(2)
def test_stages_reduce_as_often_as_expected(stage, sync, config, expected):
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    engine, _, _ = initialize(stage, **config, zero_optimization=zero)
    accumulator = Accumulator(engine, sync=sync)
    for index in range(2):
        with Counting() as count:
            window = accumulator.window(own(EVEN, index, F32))
            count.take()
            seen = []
            for batch in window:
                loss = loss_of(engine, batch)
                count.take()
                window.backward(loss)
                seen.append(reductions(count.take()))
            seen.append(reductions(count.take()))
            window.step()
            seen.append(reductions(count.take()))
    assert seen == expected


def in_own_dtype(net: Any, batch: Any) -> torch.Tensor:
    return net(batch["x"].to(next(net.parameters()).dtype)).float().square().mean()


def read_masters(engine: Any) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    masters = [(p, safe_get_full_fp32_param(p)) for p in engine.module.parameters()]
    return torch.cat([(p.detach() if master is None else master).flatten().double() for p, master in masters])


IN_BF16 = [
    # 8e-3: the error of bf16 gradients; a sum of 64 in bf16 has several times that
    *((stage, sync, "fp32", 8e-3) for stage, sync in [(1, "last"), (2, "last"), (3, "every")]),
    (2, "last", None, 5e-2),
]


@pytest.mark.parametrize(("stage", "sync", "accumulate", "bound"), IN_BF16)
@on_ranks(2)
def test_bf16_adds_up_in_float32_with_grad_accum_dtype(stage, sync, accumulate, bound):
    config: dict[str, Any] = {"bf16": {"enabled": True, "immediate_grad_update": False}}
    if accumulate:
        config["data_types"] = {"grad_accum_dtype": accumulate}
    with warned() as texts:
        engine, _, _ = initialize(stage, **config)
        accumulator = Accumulator(engine, sync=sync)
    said = [text for text in texts if "deprecated" not in text]
    said = said if dist.get_rank() == 0 and accumulate else []
    if said or ((stage, sync) == (2, "last") and accumulate and COALESCES and dist.get_rank() == 0):
        assert "reduces gradients in each micro-step: coalesced they would not add up in torch.float32" in said[0]
        assert not COALESCES or (stage, sync) == (2, "last")
    for index, layout in enumerate([[[1] * 64, [1] * 60], [[1] * 8, []]]):  # then a dry rank
        assert off(engine, accumulator, layout, index, in_own_dtype, read_masters) <= bound


@on_ranks(2)
def test_engine_that_also_divides_clips_or_scales_is_refused_with_the_cure():
    clips, foreign = {"gradient_clipping": 1.0}, SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    accumulates = {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}
    for config, options, message in [
        (accumulates, {}, 'accumulates over 4 steps by itself.*"gradient_accumulation_steps": 1'),
        (clips, {}, 'clips at 1 .*max_norm=None; put "gradient_clipping": 0 into its config, or pass max_norm=1.0'),
        (clips, {"max_norm": 0.5}, 'clips at 1 .*max_norm=0.5; put "gradient_clipping": 0.5'),
        ({}, {"sync": "every"}, "sync='every', expected one of 'last' for DeepSpeed"),
        ({}, {"optimizer": foreign}, "optimizer is a SGD that the DeepSpeed engine does not own"),
        ({}, {"scaler": torch.amp.GradScaler("cpu")}, "scaler with DeepSpeed, which scales losses itself"),
    ]:
        said = refused(Accumulator, initialize(1, **config)[0], **options)
        assert re.search(message, said, re.DOTALL), said
    said = refused(Accumulator, [initialize(1)[0], nn.Linear(2, 2)])
    assert "weight, bias is trained and outside of the DeepSpeed engine" in said
    assert "an embedding of sparse gradients" in refused(Accumulator, initialize(1, nn.Embedding(8, 4, sparse=True))[0])
    immediate = {"bf16": {"enabled": True, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert '"immediate_grad_update": true, for which' in refused(Accumulator, initialize(1, **immediate)[0])
    check = Accumulator(initialize(1)[0], steps=2).check
    assert "check() with DeepSpeed, which shows no gradient" in refused(check, make_batch(4, seed=0), len)


class Towers(nn.Module):
    """Two outputs with a graph each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.towers = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_backwards_of_one_forward_add_up_with_sync_every(stage):
    engine, _, _ = initialize(stage, Towers())
    window = Accumulator(engine, sync="every").window(own(EVEN, 0, F32))

    def run(batch: Any) -> None:
        for output in window.parts(engine(batch["x"])):
            window.backward(output.square().mean())

    def both(net: nn.Module, batch: Any) -> torch.Tensor:
        return sum(output.square().mean() for output in net(batch["x"]))

    whole = everything(EVEN, 0, F32)
    assert max(step_off(engine, window, Towers().double(), whole, both, run, read=zero_weights)) <= 1e-5


# The layers that each micro-batch uses besides the first, by rank; four windows do not end with a step.
USES = [["12", ""], ["", "1"], ["2", "12", ""], ["", ""], ["12"], ["", "2"], ["1", "12"], ["", ""], ["1", "12"], [""]]
ON_ALL_RANKS = [[used, used] for used in USES]
ENDS = {4: "skip", 6: "break", 8: "discard"}
ALONE = [[["1", ""], ["", ""]], [["", ""], ["", "2"]], [["1"], ["2"]], [["2", "1"], []]]
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
IN_FP32 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def run_branch(engine: Any, window: Any, item: Any, factor: float = 1.0) -> None:
    window.backward(engine(*item).float().square().mean() * factor)


def of_branches(plain: nn.Module, items: list[Any]) -> torch.Tensor:
    return sum(plain(x.double(), used).square().mean() for x, used in items) / len(items)


def in_branches(stage: int, sync: str, layouts: Any, zero: dict[str, Any], **config: Any) -> float:
    """The largest error of the stepped windows."""
    zero = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 10**4, **zero}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **config}
    engine, _, _ = initialize(stage, Choosing().float(), **config)
    with warned():  # sums in float32 are not coalesced
        accumulator = Accumulator(engine, sync=sync, on_nonfinite="skip")
    dtype, worst = next(engine.module.parameters()).dtype, [0.0]
    for index, layout in enumerate(layouts):
        seeded, end = torch.Generator().manual_seed(index), ENDS.get(index, "step")
        batches = [[(torch.randn(2, 5, generator=seeded).to(dtype), "0" + used) for used in uses] for uses in layout]
        window = accumulator.window(batches[dist.get_rank()])
        if end == "step":
            run, everyone = partial(run_branch, engine, window), batches[0] + batches[1]
            worst += step_off(engine, window, Choosing(), everyone, of_branches, run, read=read_masters)
            continue
        for item in window:
            run_branch(engine, window, item, float("nan"))
            if end == "break":
                break
        assert end != "skip" or not window.step().stepped
        window.discard()
    engine.destroy()
    return max(worst)


STAGES = [
    *((stage, "last", {}, {}) for stage in range(4)),
    (1, "last", OFFLOADED, IN_FP32),
    (2, "every", {}, {}),
    (2, "every", OFFLOADED, IN_FP32),
    (3, "every", OFFLOADED, {}),
    (3, "every", OFFLOADED, UNMANAGED),
]


@needs("deepspeed", "0.19.4", "an unmanaged engine")
@pytest.mark.parametrize(("stage", "sync", "zero", "config"), STAGES)
@on_ranks(2)
def test_module_that_some_micro_batches_or_ranks_use_is_exact(stage, sync, zero, config):
    """DeepSpeed would step an unused module with an older gradient."""
    alone = ALONE if sync == "last" and stage < 3 else []  # elsewhere ranks have to use the same modules
    bound = 4e-2 if config == IN_FP32 else 1e-5
    assert in_branches(stage, sync, [*ON_ALL_RANKS, *alone], zero, **config) <= bound


@on_ranks(2)
def test_module_used_by_one_rank_is_refused_with_sync_every():
    said = refused(in_branches, 2, "every", ALONE[:1], {})
    assert "rank 1 does not use layers.1.bias in this micro-batch and another rank does (of layers.1.bias, la" in said
    assert "use the same modules on all ranks, or sync='last'" in said


@needs("deepspeed", "0.19.4", "an engine")
@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_fp16_is_exact_at_stage_1_and_refused_at_stage_0(stage):
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed reports False on CPUs
    engine, _, _ = initialize(stage, fp16={"enabled": True, "initial_scale_power": 8})
    if stage == 0:
        assert "a loss scale that it did not multiply the loss by; use stage 1" in refused(Accumulator, engine)
        return
    assert off(engine, Accumulator(engine), EVEN, 0, in_own_dtype, read_masters) <= 1e-2


NO_NORM = {"stage": 2, "overlap_comm": False, "compute_grad_norm": False}
BY_CONFIG, BY_VERSION = "that are not finite by its config", "that are not finite in this version; use DeepSpeed 0.19"
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
BLIND: list[Any] = []
if has("deepspeed", "0.19.8"):
    BLIND = [(1, UNCHECKED, BY_CONFIG), (2, UNCHECKED, BY_CONFIG), (2, {"zero_optimization": NO_NORM}, BY_CONFIG)]
elif not has("deepspeed", "0.19"):
    BLIND = [(stage, {}, BY_VERSION) for stage in (1, 2, 3)]


@pytest.mark.parametrize(("stage", "config", "said"), BLIND)
@on_ranks(2)
def test_engine_that_steps_nan_is_refused_unless_that_is_said(stage, config, said):
    engine, _, _ = initialize(stage, **config)
    assert said in refused(Accumulator, engine)
    accumulator = Accumulator(engine, on_nonfinite="ignore", max_norm=None)
    for index, factor in enumerate((1.0, float("nan"))):
        window = accumulator.window(own(EVEN, index, F32))
        run_window(window, engine, lambda *given, factor=factor: in_own_dtype(*given) * factor)
        assert window.step().stepped
    assert not zero_weights(engine).isfinite().all()
