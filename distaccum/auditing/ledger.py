"""Ledger: receipts of what autograd gives each parameter, and of the gradients that optimizers use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from .private import gathered_parameters, hook_first
from .receipt import NUM, is_seen, num_copies, project

Receipts = dict[int, Tensor]  # by the parameter's place in the ledger
Result = TypeVar("Result")
failures: dict[str, None] = {}


def quietly(function: Callable[..., Result]) -> Callable[..., Result | None]:
    """Lets the script go on if the audit itself fails; the failure is reported as something not seen."""

    @wraps(function)
    def attempt(*args: Any, **options: Any) -> Result | None:
        try:
            return function(*args, **options)
        except Exception as error:
            failures.setdefault(f"{function.__name__}: {type(error).__name__}: {error}")
            return None

    return attempt


@final
class Ledger:
    """The parameters of all optimizers, each with a place in the order in which they were met."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []  # what is known of each parameter, in plain numbers
        self.owners: dict[int, set[int]] = {}  # optimizers, by the parameter's place
        self.receiving: Receipts | None = None  # of the backward that runs now
        self.wrapped = False  # data-parallel, by DDP, FSDP1 or FSDP2
        self.unseen: set[int] = set()  # places of those that receipts cannot see
        self._places: dict[int, int] = {}  # by id
        self._refs: list[weakref.ref[Any]] = []  # by place
        self._roots: list[weakref.ref[nn.Module]] = []
        self._known = (0, 0)
        self._trained = list[weakref.ref[nn.Module]]()
        self._hooks: dict[int, tuple[Any, Any]] = {}  # a leaf, weakly, and its hook, by place

    def place(self, parameter: Any) -> int:
        place = self._places.get(id(parameter))
        if place is None or self._refs[place]() is not parameter:  # another one had this id
            place = self._places[id(parameter)] = len(self.rows)
            row = {"name": f"parameter {place}", "vector": parameter.ndim < 2, "numel": parameter.numel()}
            self.rows.append(row | {"copies": num_copies(parameter)})
            self._refs.append(weakref.ref(parameter))
        return place

    def parameter(self, place: int) -> Any:
        """A parameter that is alive, or None."""
        return self._refs[place]()

    def owners_of(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        """The optimizers that hold any of these parameters that has a gradient."""
        places = (self._places.get(id(p)) for p in parameters if p.grad is not None)
        return set[int]().union(*(self.owners.get(place, ()) for place in places if place is not None))

    def add_root(self, root: nn.Module, /, *_: Any, **options: Any) -> None:
        if all(ref() is not root for ref in self._roots):
            inner = {*map(id, root.modules())} if vars(root) else set[int]()  # as of fully_shard, layer by layer
            self._roots = [*(ref for ref in self._roots if id(ref()) not in inner), weakref.ref(root)][:32]
            self._known = (0, 0)

    def roots(self) -> list[nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    def trained_roots(self) -> list[nn.Module]:
        """Modules with parameters of an optimizer: not averaged copies or teachers."""
        if (known := (len(self._roots), len(self.owners))) != self._known:
            roots = [inner for root in self.roots()[:8] for inner in callable_parts(root)]
            every = ((root, (self._places.get(id(p)) for p in root.parameters())) for root in roots)
            self._trained = [weakref.ref(root) for root, places in every if any(one in self.owners for one in places)]
            self._known = known
        return [root for ref in self._trained if (root := ref()) is not None]

    def name(self) -> None:
        """Looks up the parameters' names, and wrappers, while their modules are alive."""
        modules = (module for root in self.roots() for module in root.modules())
        self.wrapped |= self.has_shards() or any(type(module).__name__.endswith("DataParallel") for module in modules)
        named = [(name, id(one)) for root in self.roots() for name, one in root.named_parameters()]
        by_id = {place: name for name, place in sorted(named, key=lambda pair: len(pair[0]))}  # of the outermost root
        for row, ref in zip(self.rows, self._refs, strict=True):
            if (name := by_id.get(id(ref()))) is not None:
                row["name"] = name.removeprefix("module.")

    def orphans(self) -> list[str]:
        """Names of what has a gradient and no optimizer, in models that one trains in part."""
        named = (pair for root in self.trained_roots() for pair in root.named_parameters())
        return [name for name, p in named if p.grad is not None and self._places.get(id(p)) not in self.owners]

    def has_shards(self) -> bool:
        return any(row["copies"] for row in self.rows)

    # Receipts

    @quietly
    def arm(self) -> None:
        """Hooks every leaf that has no hook yet: FSDP2's appear in the first forward."""
        gathered = dict(gathered_parameters(self.roots())) if self.has_shards() else {}
        for place, ref in enumerate(self._refs):
            leaf = gathered.get(id(ref()), ref())
            known, _ = self._hooks.get(place, (None, None))
            if leaf is None or (known is not None and known() is leaf) or not leaf.requires_grad or not is_seen(leaf):
                continue
            if num_copies(leaf):  # a shard that is not gathered, or tensor-parallel
                continue
            self._hooks[place] = (weakref.ref(leaf), hook_first(leaf, partial(self._receive, place)))

    def disarm(self) -> None:
        while self._hooks:
            _, (_, hook) = self._hooks.popitem()
            hook.remove()

    @quietly
    def _receive(self, place: int, gradient: Tensor) -> None:
        if (received := self.receiving) is not None and not gradient.is_sparse:
            received[place] = received.get(place, 0) + project(gradient)

    def receipts(self, places: Iterable[int], *, of_values: bool = False) -> Receipts:
        """Takes receipts of the gradients as they are now, or of the parameters themselves."""
        taken: Receipts = {}
        for place in places:
            parameter = self.parameter(place)
            tensor = parameter if of_values or parameter is None else parameter.grad
            if tensor is None:
                continue
            if tensor.is_sparse or not is_seen(parameter):
                self.unseen.add(place)
            # A sum over ranks that is yet to be made has no receipt.
            elif not any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
                taken[place] = project(tensor)
        return taken


def callable_parts(root: nn.Module) -> Iterable[nn.Module]:
    """The module itself, or what a list or dict of modules holds: its own mode means nothing."""
    if type(root).forward is not nn.Module.forward:
        return [root]
    return [part for child in root.children() for part in callable_parts(child)]


def on_host(receipts: Receipts, places: Sequence[int]) -> Tensor:
    """Copies these to the host, with 0 where there is none."""
    rows = torch.zeros(len(places), NUM, dtype=torch.float64, device="cpu")
    if present := [row for row, place in enumerate(places) if place in receipts]:
        rows[present] = torch.stack([receipts[places[row]] for row in present]).cpu().to(torch.float64)
    return rows
