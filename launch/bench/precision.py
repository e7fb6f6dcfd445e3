"""The error of adding gradients up in bfloat16, float16 and float32, by the number of micro-steps.

    python launch/bench/precision.py --out launch/results/precision

A net in low precision, two ranks where there are several. Two errors of the gradient, relative in the 2-norm: of the
adding up alone, against the same micro-gradients added up in float64; and of all, against one big batch in float64 at
the same weights, which has the rounding of each forward and backward in it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit import (
    CPU,
    Options,
    circumstances,
    header,
    in_turns,
    ratios,
    relative_difference,
    some_ranks,
    spelled,
    table,
    write,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.tools import wrap

WIDE = torch.float32
Wrapped = tuple[nn.Module, Any]


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)


def micro_batches(steps: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 32, generator=generator) + 0.5 for _ in range(steps)]


def loss_of(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return model(inputs.to(dtype)).to(max(dtype, WIDE, key=lambda one: one.itemsize)).square().mean()


def plain(dtype: torch.dtype) -> Wrapped:
    model = net(dtype)
    return model, SGD(model.parameters(), lr=1.0)


def ddp(dtype: torch.dtype) -> Wrapped:
    model = wrap.ddp(net(dtype))
    return model, SGD(model.parameters(), lr=1.0)


def fsdp2(reduce_dtype: torch.dtype | None) -> Callable[[torch.dtype], Wrapped]:
    def wrapped(dtype: torch.dtype) -> Wrapped:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        model = wrap.fully_sharded(net(dtype).float(), mp_policy=policy)
        return model, SGD(model.parameters(), lr=1.0)

    return wrapped


def zero(stage: int, accumulate: str | None) -> Callable[[torch.dtype], Wrapped]:
    def wrapped(dtype: torch.dtype) -> Wrapped:
        model = net(dtype)
        adds_up = {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}
        config = wrap.zero_config(stage, bf16={"enabled": True}, **adds_up)
        return wrap.deepspeed(model, SGD(model.parameters(), lr=1.0), config)[0], None

    return wrapped


# By name: the wrapper, the number of ranks, the dtype, and the options of the Accumulator.
ROWS: dict[str, tuple[Callable[[torch.dtype], Wrapped], int, torch.dtype, dict[str, Any]]] = {
    "plain, bfloat16": (plain, 1, torch.bfloat16, {}),
    "plain, bfloat16, accumulate_dtype=float32": (plain, 1, torch.bfloat16, {"accumulate_dtype": WIDE}),
    "plain, float16": (plain, 1, torch.float16, {}),
    "plain, float16, accumulate_dtype=float32": (plain, 1, torch.float16, {"accumulate_dtype": WIDE}),
    "DDP, bfloat16": (ddp, 2, torch.bfloat16, {}),
    "DDP, bfloat16, accumulate_dtype=float32": (ddp, 2, torch.bfloat16, {"accumulate_dtype": WIDE}),
    "DDP, bfloat16, accumulate_dtype=float32, sync='every'": (
        ddp, 2, torch.bfloat16, {"accumulate_dtype": WIDE, "sync": "every"},
    ),
    "FSDP2, param_dtype and reduce_dtype bfloat16": (fsdp2(torch.bfloat16), 2, torch.bfloat16, {}),
    "FSDP2, param_dtype bfloat16, reduce_dtype float32": (fsdp2(WIDE), 2, torch.bfloat16, {"accumulate_dtype": WIDE}),
    "ZeRO 2, bf16": (zero(2, None), 2, torch.bfloat16, {}),
    "ZeRO 2, bf16, grad_accum_dtype fp32": (zero(2, "fp32"), 2, torch.bfloat16, {"accumulate_dtype": WIDE}),
    "ZeRO 1, bf16, grad_accum_dtype fp32": (zero(1, "fp32"), 2, torch.bfloat16, {"accumulate_dtype": WIDE}),
}  # fmt: skip


def measure(name: str, steps: int) -> tuple[float, float]:
    """Errors of the adding up, and of all."""
    wrapped, world, dtype, options = ROWS[name]
    rank = dist.get_rank() if dist.is_initialized() else 0
    warnings.simplefilter("ignore")
    model, optimizer = wrapped(dtype)
    seen = gradient_of_window(name, model, optimizer, micro_batches(steps, rank), dtype, options)
    everything = [micro_batches(steps, r) for r in range(world)]
    exact = net(dtype).double()
    loss_of(exact, torch.cat([x for one in everything for x in one]), torch.float64).backward()
    return relative_difference(seen, added_up(everything, dtype)), relative_difference(seen, flat(exact))


def gradient_of_window(
    name: str, model: Any, optimizer: Any, batches: list[Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> Tensor:
    accumulator = Accumulator(model, optimizer, **options)
    window = accumulator.window(batches)
    before = copy.deepcopy(full(model)) if name.startswith("ZeRO") else None
    for inputs in window:
        window.backward(loss_of(model, inputs, dtype))
    if before is None:
        return flat(model)
    window.step()  # ZeRO shows no gradient; its weights move by it in float32
    return before - full(model)


def full(model: Any) -> Tensor:
    """ZeRO's weights in float32, from which those in bfloat16 are rounded."""
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat([safe_get_full_fp32_param(p).double().flatten() for p in model.module.parameters()])


def flat(model: nn.Module) -> Tensor:
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def added_up(everything: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
    """The micro-gradients that the run has too, in float64."""
    model, number = net(dtype), sum(map(len, everything))
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    share = torch.tensor(len(everything) / number)
    for inputs in (x for one in everything for x in one):
        loss_of(model, inputs, dtype).backward(share)
        total += flat(model)
        model.zero_grad()
    return total / len(everything)


def price(rounds: int) -> dict[str, float]:
    """Of `accumulate_dtype`: the time of a window of a plain net in bfloat16, with it over without."""
    loops = {}
    for name, options in {"without": {}, "with": {"accumulate_dtype": WIDE}}.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(torch.bfloat16)
        accumulator = Accumulator(model, SGD(model.parameters(), lr=1e-3), **options)

        def window(model: nn.Module = model, accumulator: Accumulator = accumulator) -> None:
            begun = accumulator.window([torch.ones(64, 512, dtype=torch.bfloat16)] * 32)
            for inputs in begun:
                begun.backward(model(inputs).float().square().mean())
            begun.step()

        loops[name] = window
    taken = in_turns(loops, rounds, CPU)
    return ratios(taken["with"], taken["without"])


def main() -> None:
    parser = Options(__doc__)
    parser.counts("--steps", [8, 64, 256, 1024], "micro-steps per window")
    parser.counts("--rounds", 9, "of what it costs in time")
    options = parser.parse_args()
    torch.set_num_threads(1)

    found: dict[str, dict[int, tuple[float, float]]] = {}
    with some_ranks(2) as ranks:
        for name, (_, world, *_rest) in ROWS.items():
            found[name] = {}
            for steps in options.steps:
                errors = ranks.run(measure, name, steps, seconds=120)[0] if world > 1 else measure(name, steps)
                found[name][steps] = errors
            print(name, found[name], file=sys.stderr)

    about = circumstances(CPU)
    extra = price(options.rounds)
    lines = header("Adding gradients up in low precision", about, str(__doc__).split("\n\n")[2].replace("\n", " "))
    for i, what in enumerate(("of the adding up alone", "of the gradient")):
        rows = [[name, *(f"{errors[i]:.1e}" for errors in by_steps.values())] for name, by_steps in found.items()]
        lines += [f"Relative error {what}:", "", *table(["micro-steps", *options.steps], rows)]
    lines.append(
        f"A window of 32 micro-steps of 64 samples through eight layers of 512 x 512 in bfloat16, one process, takes "
        f"{spelled(extra)} of the time with accumulate_dtype=torch.float32 that it takes without."
    )
    write(options.out, "\n".join(lines).rstrip(), {**about, "errors": found, "time": extra})


if __name__ == "__main__":
    main()
