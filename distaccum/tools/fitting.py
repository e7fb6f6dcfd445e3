"""Tries which micro-batch of a model fits on this machine, and measures what it keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..cutting import count_samples, cut_batch, tensors_in
from ..law import plural
from ..runs.memory import free, is_out_of_memory
from ..runs.snapshot import kept
from .plan import Sizes
from .terminal import bytes_text


def fit(
    model: Any, batch: Any, loss_fn: Callable[[Any], Any], micro_batch_size: int | None = None
) -> tuple[Sizes, int, str]:
    """The bytes of a model, the micro-batch that gets through forward and backward here, and a sentence about it.

    A micro-batch that runs out of memory is halved until it fits; none is larger than the batch. Gradients, buffers and
    random state are restored. On the meta device any micro-batch fits, and has the bytes of a real one.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    parameters = [parameter for module in models for parameter in module.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient, expected one to train")
    length = count_samples(batch)
    asked = size = micro_batch_size or length
    if size > length:
        raise ValueError(f"micro_batch_size={size} and the model's batch has {length}; give a batch as long")
    with kept(models, trained):
        while (saved := _saved_for_backward(loss_fn, next(cut_batch(batch, [size], length)), trained, size)) is None:
            size //= 2
            free()
    for tensor in [*parameters, *(tensor for _, tensor in tensors_in(batch))]:
        saved.pop(_storage_of(tensor), None)
    activations = sum(saved.values())
    stacks = [part for module in models for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    layers = max([1, *(sum(any(True for _ in layer.parameters()) for layer in stack) for stack in stacks)])
    of_all, of_trained = (sum(parameter.nbytes for parameter in some) for some in (parameters, trained))
    sizes = Sizes(sum(parameter.numel() for parameter in trained), of_all, of_trained, layers, activations)
    seen = "halved until it fitted" if size < asked else f"more than {size} was not tried"
    fits = f"a micro-batch of {plural(size, 'sample')} fits on {trained[0].device} (one rank alone; {seen})"
    return sizes, size, f"{fits}; its forward keeps {bytes_text(activations)} for backward"


def _saved_for_backward(
    loss_fn: Callable[[Any], Any], micro_batch: Any, trained: Sequence[nn.Parameter], size: int
) -> dict[Any, int] | None:
    """The bytes of each storage that the forward keeps; None if a smaller micro-batch may fit instead."""
    saved: dict[Any, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[_storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_fn(micro_batch)
        total: Any = sum(loss.values()) if isinstance(loss, Mapping) else loss
        total.backward()
    except Exception as error:
        if not is_out_of_memory(error) or size == 1:
            raise
        return None
    finally:
        for parameter in trained:
            parameter.grad = None
    return saved


def _storage_of(tensor: Tensor) -> Any:
    # Addresses do not tell storages on the meta device apart.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
