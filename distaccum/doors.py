"""Doors: the names behind which a module is imported on first use. Only here does the core name a room outside of it.

A room can be deleted: its doors then open no more, and all else works.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for annotations in the core
    from .feeding.by_cost import ByCost as ByCost
    from .meshes.pipeline import PipelineSchedule as PipelineSchedule
    from .runs.check.report import Report as Report
    from .runs.contrast import Encode as Encode
    from .runs.contrast import PairsLoss as PairsLoss
    from .runs.update import LossFn as LossFn

# The module of each name of `distaccum`.
PUBLIC = {
    "Accumulator": "accumulator",
    "ByCost": "feeding.by_cost",
    "DistaccumError": "law",
    "Extension": "extension",
    "Forecast": "tools.plan",
    "Report": "runs.check.report",
    "Update": "update",
    "Window": "window",
    "audit": "auditing.session",
    "count_samples": "batch",
    "count_tokens": "batch",
    "load": "saving",
    "plan": "tools.plan",
    "save": "saving",
}
DOORS = {
    **PUBLIC,
    # Libraries that wrap the caller's objects, and engines of wrappers.
    "Accelerated": "wrappers.accelerate",
    "FromFabric": "wrappers.fabric",
    "FSDPEngine": "wrappers.fsdp1",
    "DeepSpeedEngine": "wrappers.deepspeed",
    # Ranks with parts of the same samples.
    "Pipeline": "meshes.pipeline",
    "on_mesh": "meshes.ranks",
    **dict.fromkeys(("Experts", "UnwrappedEngine"), "meshes.sharing"),
    **dict.fromkeys(("leave_out_gathered", "lies_over", "peers_of", "whole_loss"), "meshes.sharing"),
    **dict.fromkeys(("refuse_other_meshes", "refuse_unclaimed_dimensions"), "meshes.sharing"),
    # Runs of whole windows, and their states.
    **dict.fromkeys(("each_head", "each_part"), "runs.parts"),
    "Places": "state.places",
    "RandomNumbers": "state.randomness",
    "update": "runs.update",
    "contrast": "runs.contrast",
    "check": "runs.check.report",
    **dict.fromkeys(("load_state", "state_dict_of"), "state.checkpoint"),
}


def opened(name: str) -> Any:
    """The class or function behind a door; imports its module."""
    return getattr(import_module(f"{__package__}.{DOORS[name]}"), name)


def is_there(name: str) -> bool:
    """Tells whether the module behind a door is installed."""
    module = f"{__package__}.{DOORS[name]}"
    return find_spec(module.rpartition(".")[0]) is not None and find_spec(module) is not None
