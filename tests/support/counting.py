"""Counts collectives, the library's own exchanges through the host, and values read on the host."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from distaccum.ranks import Peers

LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # functional collectives that send nothing
HOST_READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero"}


class Counting(TorchDispatchMode):
    """Also counts collectives that C++ starts, as DDP's reducer does; patching torch.distributed would miss them.

    Each of the library's own exchanges counts as one "exchange", with the size of its row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []  # name, and number of elements
        self.host_reads: Counter[str] = Counter()

    def __enter__(self) -> "Counting":
        self._own = {name: getattr(Peers, name) for name in ("_joined", "largest", "sum")}
        for name, exchange in self._own.items():
            setattr(Peers, name, self._counted(exchange))
        return super().__enter__()

    def _counted(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """One message counts once, over however many groups it goes."""

        def counted(peers: Peers, values: Any, *groups: Any, **options: Any) -> Any:
            if peers.is_alone:
                return exchange(peers, values, *groups, **options)
            self.collectives.append(("exchange", torch.as_tensor(values).numel()))
            with _disable_current_modes():
                return exchange(peers, values, *groups, **options)

        return counted

    def __exit__(self, *error: Any) -> None:
        for name, exchange in self._own.items():
            setattr(Peers, name, exchange)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "from_local") for kind in types):
            return NotImplemented  # a DTensor's collectives are counted when its own dispatch has decomposed the call
        name = str(func).rsplit(".", 1)[0]
        if func.namespace in ("c10d", "_c10d_functional") and not name.endswith(LOCAL):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.collectives.append((name.split(".")[1], sum(t.numel() for t in tensors)))
        elif name in HOST_READS:
            self.host_reads[name] += 1
        return func(*args, **(kwargs or {}))

    def take(self) -> list[tuple[str, int]]:
        seen, self.collectives = self.collectives, []
        return seen
