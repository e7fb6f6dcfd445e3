"""Out of memory: recognised, and what a failed attempt holds freed."""

from __future__ import annotations

import gc

import torch

from ..law import DistaccumError

# Of allocators and libraries that have no class of error for it.
MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS
    "can't allocate memory",  # torch's allocator on the host
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN gives where its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether a smaller micro-batch may fit.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), is_out_of_memory(KeyError())
    (True, False)
    """
    chain: dict[int, BaseException] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in chain:  # `raise error from error` is a circle
        chain[id(cause)] = cause
        cause = cause.__cause__
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (
            isinstance(one, RuntimeError)
            and not isinstance(one, DistaccumError)  # which may quote one
            and any(message in str(one) for message in MESSAGES)
        )
        for one in chain.values()
    )


def free() -> None:
    """Frees cycles that hold tensors, and the cached blocks of a device."""
    gc.collect()
    for name in ("cuda", "xpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", bool)():
            module.empty_cache()
