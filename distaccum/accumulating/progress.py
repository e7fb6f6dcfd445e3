"""Progress: where an accumulator is, what it learned, and both as a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from ..law import DistaccumError, warn, whole_number_in
from ..scaling import refuse_broken_scaler
from ..sizes import MicroBatchSize, learned_sizes
from ..snapshot import Snapshot
from ..window.source import StandIn
from ..window.start import Start, pack, unpack
from .config import Config
from .drawing import Seen
from .feed import Place
from .setup import Setup

KEYS = frozenset({"index", "skipped", "fit", "scaler", "ranks"})  # of a state, beside each rank's part


@final
class Progress:
    """The only state of an accumulator that outlives a window."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.index = 0  # of the next update
        self.skipped = 0  # updates in a row
        self.num_contrasts = 0  # that ended well in this process
        self.size = MicroBatchSize(None if config.most == "auto" else config.most)
        self.seen: Seen = {}  # what was cut of batches, and what went whole
        self.snapshot = Snapshot(setup.models)  # before a window that the library runs
        self.stand_in: StandIn | None = None  # of a window whose gradient was finite
        self.start = Start(setup.models, setup.once)
        self.place: Place | None = None  # of the loader, of a state that was loaded

    def state(
        self, setup: Setup, extensions: Mapping[str, Any], own: tuple[dict[str, Any], Place | None]
    ) -> dict[str, Any]:
        """`extensions` are states by key; `own` is this rank's: its random numbers, and its loader's place."""
        peers = setup.engine.peers
        return {
            "index": self.index,
            "skipped": self.skipped,
            "fit": self.size.state(),
            **extensions,
            "scaler": setup.scaler.state_dict() if setup.scaler else None,
            "ranks": peers.world_size,
            f"rank {peers.global_rank}": pack(own[0], own[1] and tuple(own[1])),
        }

    def load(self, state: Mapping[str, Any], setup: Setup, extensions: Mapping[str, Callable[[Any], None]]) -> None:
        """Resumes from the state; everything is read before anything is set. `extensions` load theirs, by key."""
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict() got a {type(state).__name__}, expected what state_dict() gave")
        if "in_window" in state:
            raise ValueError(
                "the state is of an earlier version of distaccum, which this one does not read; go on with the version "
                "that wrote it, or load the model and the optimizer alone"
            )
        if missing := sorted(KEYS - set(state)):
            raise ValueError(f"the state has no {', '.join(missing)}; give what state_dict() gave, of this version")
        if (state["scaler"] is None) != (setup.scaler is None):
            has, wants = ("no", "one") if state["scaler"] is None else ("a", "none")
            raise ValueError(f"the state holds {has} scaler and this accumulator has {wants}; give both the same")
        index, skipped, ranks = (whole_number_in(state, name, 0) for name in ("index", "skipped", "ranks"))
        for name in ("fit", "scaler"):
            if not isinstance(state[name], Mapping) and (name, state[name]) != ("scaler", None):
                raise ValueError(
                    f"the state has {name}={state[name]!r}, expected a dict; give what state_dict() gave, of this "
                    "version"
                )
        learned = learned_sizes(state["fit"])
        if setup.scaler is not None:
            refuse_broken_scaler(state["scaler"], setup.scaler)
        random, place = _own_part(state, ranks, setup)
        for key, load in extensions.items():
            load(state.get(key))

        self.start.loaded, self.place = random, None if place is None else Place(*place)
        self.index, self.skipped = index, skipped
        self.size.load(learned)
        if setup.scaler is not None:
            setup.scaler.load_state_dict(state["scaler"])


def _own_part(state: Mapping[str, Any], ranks: int, setup: Setup) -> tuple[dict[str, Any] | None, Any]:
    """This rank's random numbers and its loader's state."""
    peers = setup.engine.peers
    own = f"rank {peers.global_rank}"
    if ranks != peers.world_size:
        setup.once(
            "ranks",
            f"the state is of {ranks} ranks and this job has {peers.world_size}: the positions of loaders and the "
            "random numbers are left out",
        )
        return None, None
    if own in state:
        return unpack(state[own])
    parts = [unpack(part) for name, part in state.items() if name.startswith("rank ")]
    if any(loader is not None for _, loader in parts):
        raise DistaccumError(
            f"the state was taken on another rank and has no loader's position for rank {peers.global_rank}; save and "
            "load the state_dict() of every rank"
        )
    warn(
        f"the state has no part for rank {peers.global_rank}: its random numbers are left out; save and load the "
        "state_dict() of every rank"
    )
    return None, None
