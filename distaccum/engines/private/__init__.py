"""The only modules of the engines that use private names of other libraries, a file per library or wrapper.

Unless a function says otherwise, its names were seen in torch 2.9 to 2.15, DeepSpeed 0.18 to 0.19.8 and Accelerate 1.11
to 1.15.
"""

from __future__ import annotations

from ...law.errors import DistaccumError

SEEN = {"torch": "2.9 to 2.15", "DeepSpeed": "0.18 to 0.19.8"}


def require(library: str, owner: object, *names: str) -> None:
    """Raises if this version of a library lacks private names without which an engine cannot work."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise DistaccumError(
            f"{kind} of this version of {library} has no {', '.join(missing)}, which distaccum needs; use {library} "
            f"{SEEN[library]}"
        )
