"""Progress: where an accumulator is, what it learned, and both as a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from ..gradients.scaling import refuse_broken_scaler
from ..gradients.snapshot import Snapshot
from ..law.errors import DistaccumError
from ..law.shares import whole_number_in
from ..law.sizes import MicroBatchSize, learned_sizes
from ..observers.noise import Averages, averages_in
from ..window.resume import Unfinished, pack, unpack
from ..window.source import StandIn
from .config import Config
from .drawing import Feed
from .setup import Setup


@final
class Progress:
    """The only state of an accumulator that outlives a window."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.index = 0  # of the next update
        self.skipped = 0  # updates in a row
        self.num_contrasts = 0  # that ended well in this process
        self.size = MicroBatchSize(config.most)
        self.snapshot = Snapshot(setup.models)  # before a window that the library runs
        self.stand_in: StandIn | None = None  # of a window whose gradient was finite
        self.feed: Feed | None = None  # of the loop over windows(), or of one that was left
        self.unfinished: Unfinished | None = None  # of a loaded state: the next window continues it
        self.loader: Any = None  # of the same: the state of the loader

    def state(self, setup: Setup, averages: Averages | None, own: tuple[Unfinished | None, Any]) -> dict[str, Any]:
        """`own` is this rank's: a window that is not over, and where its loader stands."""
        peers = setup.engine.peers
        return {
            "index": self.index,
            "skipped": self.skipped,
            "fit": self.size.state(),
            "noise": None if averages is None else averages.state(),
            "scaler": setup.scaler.state_dict() if setup.scaler else None,
            "ranks": peers.world_size,
            "in_window": own[0] is not None,
            f"rank {peers.global_rank}": pack(*own),
        }

    def load(self, state: Mapping[str, Any], setup: Setup, averages: Averages | None) -> None:
        """Resumes from the state; everything is read before anything is set."""
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict() got a {type(state).__name__}, expected what state_dict() gave")
        known = {"index", "scaler", "skipped", "fit", "ranks", "in_window"}
        if missing := sorted(known - set(state)):
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
        learned, noise = learned_sizes(state["fit"]), averages_in(state.get("noise"))
        if setup.scaler is not None:
            refuse_broken_scaler(state["scaler"], setup.scaler)
        unfinished, loader = unpack(_own_part(state, ranks, setup))

        self.unfinished, self.loader = unfinished, loader
        if self.feed is not None and not self.feed.is_in_loop:  # of an epoch that was left before
            self.feed = None
        self.index, self.skipped = index, skipped
        self.size.load(learned)
        if averages is not None:
            averages.load(noise)
        if setup.scaler is not None:
            setup.scaler.load_state_dict(state["scaler"])


def _own_part(state: Mapping[str, Any], ranks: int, setup: Setup) -> bytes | None:
    """This rank's own part of the state."""
    peers = setup.engine.peers
    own = f"rank {peers.global_rank}"
    if ranks != peers.world_size:
        if state["in_window"]:
            raise DistaccumError(
                f"the state was taken in mid-window on {ranks} ranks and this job has {peers.world_size}, expected the "
                "same number: each rank has its own part of the gradient. Start that number of ranks, or load a state "
                "from between two windows"
            )
        if any(state.get(f"rank {rank}") for rank in range(ranks)):
            setup.once(
                "ranks",
                f"the state is of {ranks} ranks and this job has {peers.world_size}: the positions of loaders are "
                "left out",
            )
        return None
    part: bytes | None = state.get(own)
    is_of_another = own not in state and any(state.get(f"rank {rank}") for rank in range(ranks))
    if is_of_another or (state["in_window"] and not part):
        taken = "in mid-window" if state["in_window"] else "on another rank"
        raise DistaccumError(
            f"the state was taken {taken} and has no part for rank {peers.global_rank}; save and load the "
            "state_dict() of every rank"
        )
    return part
