"""Collectives with a gradient, for models whose ranks hold parts of the same sample."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Sum(torch.autograd.Function):
    """The sum over ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, whole = group, part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(gradient, ctx.group), None


def gathered(part: Tensor, sizes: Sequence[int], group: Any, dim: int = 0) -> Tensor:
    """The parts of all ranks, of these sizes; in backward their sum, of which each rank takes its part."""
    zeros = [part.new_zeros(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
    zeros[dist.get_rank(group)] = part
    return Sum.apply(torch.cat(zeros, dim), group)
