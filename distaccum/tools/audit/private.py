"""Private names that the audit needs; without one of them it sees less."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import dataloader

from ...engines import base
from ...engines.private import fsdp2

LOADER = getattr(dataloader, "_BaseDataLoaderIter", None)  # no hook tells when a loader is waited for
# Our windows call the engine itself, to save the checks of torch.autograd.backward.
BACKWARDS = ((torch.autograd, "backward"), (base, "run_backward"))


def gathered_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """FSDP2's shards, each with the gathered parameter that gets autograd's gradient: no public name leads there."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in {id(m): m for root in roots for m in root.modules()}.values() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            for group in fsdp2.groups_of(fsdp2.state_of(module)):
                yield from ((p.sharded_param, fsdp2.gathered_of(p)) for p in group.fsdp_params)


def note_divisors(roots: Any, most: int = 24) -> None:
    """Tells each criterion's call near `roots` by which numbers the graph divides, or multiplies ("mul")."""
    nodes = [getattr(one, "grad_fn", None) for one in ([roots] if isinstance(roots, Tensor) else roots or ())]
    todo: list[tuple[Any, list[Any]]] = [(node, []) for node in nodes if node is not None]
    for node, path in todo:
        if (term := node.metadata.get("distaccum")) is not None:
            term["divisors"] = path
        elif len(todo) < most:
            if (name := node.name()) in ("DivBackward0", "MulBackward0"):  # `_saved` is so spelt in torch's notes
                path = [*path, (name[:3].lower(), node._saved_other)]
            todo += [(following, path) for following, _ in node.next_functions if following is not None]
