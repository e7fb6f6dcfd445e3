"""Private names that the audit needs; if one is missing, it sees less."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import dataloader

from ..engines import base
from ..engines.private import fsdp2

LOADER = getattr(dataloader, "_BaseDataLoaderIter", None)  # no hook shows the time spent in a loader
SINK = "_DDPSinkBackward"  # all outputs of a DDP pass through it
# Nodes between a loss of a script's own and what divides it; others that scale and add up
CHAIN = ("Div", "Mul", "Neg", "Add", "Sub", "Rsub", "View", "ToCopy", SINK)
_MORE = """Sum MaskedFill MaskedScatter Alias AsStrided Cat Clone Expand Gather Index IndexAdd IndexSelect Mean NanToNum
Nansum Permute Repeat ReshapeAlias ScatterAdd Select Slice Split SplitWithSizes Squeeze Stack T Transpose Unbind
UnsafeView Unsqueeze Where"""
LINEAR = {*CHAIN, *_MORE.split()}  # nodes that scale and add up
OWN, BENEATH = "own", 64  # what is no sum; how many nodes are looked at for a criterion beneath it


def backwards() -> Iterator[tuple[Any, str, int]]:
    """Yields each function that runs backward, as owner and name, and the position of its roots among its arguments.

    Our windows call autograd's engine itself, to save the checks of torch.autograd.backward: through a function that an
    engine of ours keeps when it is made, which may have been before the audit.
    """
    yield from ((torch.autograd, "backward", 0), (base, "run_backward", 0))
    kinds: list[Any] = [base.Engine]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "backward" in vars(kind):
            yield kind, "backward", 1


def gathered_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[int, Any]]:
    """The gathered parameters that get autograd's gradients, by the ids of FSDP2's shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in {id(m): m for root in roots for m in root.modules()}.values() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            for group in fsdp2.groups_of(fsdp2.state_of(module)):
                yield from ((id(p.sharded_param), fsdp2.gathered_of(p)) for p in group.fsdp_params)


def starts_of(tensor: Any) -> tuple[int, ...]:
    """Where this rank's block of a DTensor begins in the whole, by dimension, as torch's checkpoints ask for it."""
    blocks = tensor.__create_chunk_list__() if hasattr(tensor, "to_local") else ()
    return tuple(blocks[0].offsets) if blocks else (0,) * tensor.ndim


def version(tensor: Any) -> int:
    """Counts changes in place."""
    return int(tensor._version)


def hook_first(leaf: Any, hook: Callable[[Tensor], None]) -> Any:
    """Registers a hook that gets the gradient before those of a script, which may change it."""
    handle = leaf.register_hook(hook)
    hooks = getattr(leaf, "_backward_hooks", None) or {}  # without it, what earlier hooks change is not seen
    for earlier in [*hooks][:-1]:
        hooks[earlier] = hooks.pop(earlier)
    return handle


def note_divisors(roots: Any, key: str, given: Any = None, most: int = 256) -> list[list[Any]]:
    """Notes, for each criterion's call near `roots`, by which numbers the graph divides or multiplies its loss ("mul").

    Also each other term that is added to it ("add"), means and sums with what they go over ("mean", "sum"), products
    within a batch ("pairs"), penalties on a parameter ("alone"), and what is no sum ("own"). Nodes have their criterion
    in `metadata[key]`. Returns such numbers of each addend that is no criterion's.
    """
    losses = [roots] if isinstance(roots, Tensor) else roots or ()
    factors = [given] if isinstance(given, Tensor) else given or [None] * len(losses)
    pairs = zip(losses, factors, strict=False)
    edges = [((node, 0), by) for loss, by in pairs if (node := getattr(loss, "grad_fn", None)) is not None]
    # Edge, path, and the number of a node above that is in no sum
    todo: list[tuple[Any, list[Any], int]] = [(edge, [("given", by)] * (by is not None), -1) for edge, by in edges]
    reached = set[int]()
    weighed = set[Any]()  # products with a criterion in them
    own = dict[int, list[Any]]()
    leaves = defaultdict[int, set[int]](set)  # elements of those beneath each: 0 of what has as many, -1 of others
    for i, ((node, place), path, above) in enumerate(todo):
        kind, _, overload = node.name().rpartition("Backward")
        name = kind if overload.isdigit() else node.name()
        if (term := node.metadata.get(key)) is not None:
            term["divisors"] = [*path, (OWN, None)] if id(term) in reached else path
            reached.add(id(term))
            weighed |= {product for how, product in path if how == "product"}
            own.pop(above, None)
            continue
        has_one = math.prod(getattr(node, "_saved_self_sym_sizes", (2,))) == 1
        beneath = _reduced(node, name) if name in CHAIN or has_one else _reduced(node, name) or [("other", None)]
        if above >= 0 and name == "Mm" and _is_square(node):
            own[above] = [*own[above], ("pairs", None)]
        if above < 0 and (name not in LINEAR or name == "Stack" or len(todo) >= most):  # its elements count once
            above = i
            own[i] = [*path, *beneath]
        is_full = len(todo) >= (most if above < 0 else BENEATH)
        is_leaf = hasattr(node, "variable") and i != above
        is_other = is_full or name not in (*CHAIN, "Pow", "Abs")
        leaves[above].add(node.variable.numel() if is_leaf else -is_other)
        if is_full:
            continue
        edges = node.next_functions[place : place + 1] if name == SINK else node.next_functions
        addends = [(k, edge) for k, edge in enumerate(edges) if edge[0] is not None]
        steps = [("add", None)] * (len(addends) - 1) + [(OWN, None)] * (name not in LINEAR and name == kind) + beneath
        product = [("product", i)] * (name == "Mul" and len(addends) > 1)
        for k, edge in addends:
            by: Any = None
            if name in ("Div", "Mul"):  # torch documents `_saved` names
                by = node._saved_self if k else node._saved_other
                by = by.detach() if getattr(by, "requires_grad", False) else by  # keeps no graph
                is_one = not isinstance(by, Tensor) or by.numel() == 1
                steps = [((OWN if k and name == "Div" else name.lower()) + "s" * (not is_one), by)]
            todo.append((edge, [*path, *product, *steps], above))
    for i, path in own.items():
        if {by[0] for how, by in path if how in ("sum", "mean")} >= leaves[i] - {0}:
            own[i] = [*path, ("alone", None)]
    # What a criterion is multiplied by, as a learned weight of a task, is no loss beside it.
    return [path for path in own.values() if weighed.isdisjoint(by for how, by in path if how == "product")]


def _reduced(node: Any, name: str) -> list[tuple[str, Any]]:
    """A mean or a sum with its number of elements, its rows, and how many a mask of 0 and 1 keeps (NaN without it)."""
    if name not in LINEAR and hasattr(node, "variable") and node.variable.numel() == 1:
        return [("mean", (1, 1, math.nan))]
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if name not in ("Mean", "Sum") or sizes is None:
        return []
    kept: Any = math.nan
    product, _ = node.next_functions[0]
    if product.name() == "PowBackward0":  # of a masked difference
        product, _ = product.next_functions[0]
    mask = None
    if name == "Sum" and product.name() == "MulBackward0" and product.next_functions[1][0] is None:
        mask = product._saved_other.detach()
    elif name == "Sum" and product.name().startswith("MaskedFill"):
        mask = ~product._saved_mask
    if mask is not None:
        is_mask = ((mask == 0) | (mask == 1)).all()
        kept = torch.where(is_mask, mask.sum() * (math.prod(sizes) / max(1, mask.numel())), torch.nan)
    return [(name.lower(), (math.prod(sizes), sizes[0] if sizes else 1, kept))]


def _is_square(node: Any) -> bool:
    """True for scores of each row against each other row, of which none are a weight's."""
    rows = node._saved_self_sym_sizes
    columns = node._saved_mat2_sym_sizes
    return bool(rows[0] == columns[1] > 1) and not any(_is_weight(side) for side, _ in node.next_functions)


def _is_weight(node: Any) -> bool:
    """True for a leaf, or one transposed."""
    while node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


def source_of(iterator: Any) -> int:
    """A number that is the same for all passes over a loader."""
    return id(getattr(iterator, "_dataset", iterator))
