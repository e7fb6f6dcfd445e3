"""What older versions of other libraries lack: the reasons of skips, which the table in CONTRIBUTING.md counts."""

from importlib import metadata
from importlib.util import find_spec

import pytest

# By a part of the error that a test fails with: the library, the version that has it, and the reason.
LACKS = {
    "FSDPState of this version of torch has no": ("torch", "2.13", "FSDP2 needs torch 2.13"),
    "Output 0 of SplitBackward0 is a view": ("deepspeed", "0.19", "ZeRO of DeepSpeed 0.18 cannot step on gloo by hand"),
    "this version of DeepSpeed cannot be kept from it": ("deepspeed", "0.19.2", "ZeRO 1, overlap_comm: 0.19.2"),
    "this version of torch reduces in each call": ("torch", "2.15", "stages under fully_shard need torch 2.15"),
    "in _initialize_stage": ("torch", "2.13", "a pipeline needs torch 2.13"),  # it greets in another dtype: gloo aborts
    "gradients that are not finite in this version": ("deepspeed", "0.19", "DeepSpeed 0.18 steps NaN, and is refused"),
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def has(library: str, version: str) -> bool:
    """True if the library is of this version or newer; also where it is not installed."""
    return find_spec(library) is None or numbers(metadata.version(library)) >= numbers(version)


def needs(library: str, version: str, what: str) -> pytest.MarkDecorator:
    """Skips a test, or a case of it, that older versions cannot run."""
    return pytest.mark.skipif(not has(library, version), reason=f"{what} needs {library} {version}")


def why_skipped(error: BaseException) -> str | None:
    """The reason why a failed test counts as skipped on these versions."""
    said = " ".join(str(error).split())  # a report is cut into lines
    reasons = (reason for part, (*needed, reason) in LACKS.items() if part in said and not has(*needed))
    return next(reasons, None)
