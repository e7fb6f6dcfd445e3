"""Recognises out-of-memory errors, and frees what a failed attempt holds."""

from __future__ import annotations

import gc

import torch

from ..law import DistaccumError

# From allocators and libraries without an error class of their own for it.
MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS
    "can't allocate memory",  # torch's allocator on the host
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error if its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether a smaller micro-batch may fit.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), is_out_of_memory(KeyError())
    (True, False)
    """
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, DistaccumError)  # one of ours may quote such an error
        and any(message in str(error) for message in MESSAGES)
    )
    cause = error.__cause__  # itself after `raise error from error`
    return is_short or (cause is not None and cause is not error and is_out_of_memory(cause))


def free() -> None:
    """Frees reference cycles that hold tensors, and the cached blocks of a device."""
    gc.collect()
    for name in ("cuda", "xpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", bool)():
            module.empty_cache()
